"""Texts of ``pathspace sequence fit``: the part to learn, the part to hold back, and choices stored with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.sequences.cli.files import Kind, mask_after, mode_from, read
from pathspace.sequences.folds import Fold, fold_of
from pathspace.sequences.text import Alphabet, Text
from pathspace.sequences.tokens import Mode, joined

SHARE = 0.1


@dataclass(frozen=True)
class Choices:
    """Options that a file keeps beside the model, for a fit that goes on; None: left out.

    Args:
        context: whether contexts are kept.
        after: the symbol whose next ones alone are predicted.
        share: of the file that is held out.
        validation: whether another file is what is held out.
        mask_numbers: whether numbers are masked in all files.
    """

    context: bool | None
    after: str | None
    share: float | None
    validation: bool
    mask_numbers: bool = False

    def over(self, told: Mapping[str, Any], output: Path) -> Choices:
        """Return the choices with those of the fit that goes on in the place of what is left out.

        Raises:
            ValueError: they would hold out what has been learned, or mask numbers that have been.
        """
        self._check_share(told, output)
        if self.mask_numbers and not told.get("mask_numbers"):
            raise ValueError(
                f"the model in {output} was begun without --mask-numbers: leave it out, or begin anew without --resume"
            )
        return replace(
            self,
            context=told.get("context") if self.context is None else self.context,
            after=told.get("after") if self.after is None else self.after,
            share=told.get("share") if self.share is None else self.share,
            mask_numbers=bool(told.get("mask_numbers")),
        )

    def _check_share(self, told: Mapping[str, Any], output: Path) -> None:
        """Refuse to hold out text that the model has learned."""
        if self.validation:
            return
        first = told.get("share")
        if told.get("validation"):
            # the last tenth of the file, in its place, has been learned
            if self.share is None:
                raise ValueError(
                    f"the model in {output} was begun with a --validation file: give it again, or --share 0 for none"
                )
            first = 0.0
        if self.share is not None and first is not None and self.share > first:
            raise ValueError(
                f"--share {self.share:g} holds back text that the model in {output} has learned: give at most "
                f"{first:g}, which it has not seen, or a --validation file"
            )

    def settled(self) -> Choices:
        """Return the choices with the default of the share."""
        return self if self.share is not None else replace(self, share=SHARE)


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a fit.

    Args:
        text: to learn, with the share of it that is held out at its end.
        held: the validation text, the share, or None.
        mask: which symbols of the text are predicted; None: all.
        held_mask: the same for a validation text.
        known: symbols that the model shall know too, or None.
        counted: predicted symbols that are learned.
        held_counted: predicted symbols that are held out.
        mode: the ``tokens`` of the fit.
    """

    text: Any
    held: Any
    mask: np.ndarray | None
    held_mask: np.ndarray | None
    known: Any
    counted: int
    held_counted: int
    mode: Mode = False

    @classmethod
    def read(
        cls,
        file: Path,
        kind: Kind,
        choices: Choices,
        validation: Path | None,
        alphabet: Path | None,
        folds: int,
    ) -> Texts:
        """Read the files; raises ValueError where one has no symbol to predict."""
        masked = choices.mask_numbers
        after = choices.after
        mode = mode_from(kind)
        text = read(file, kind, masked)
        known = None if alphabet is None else read(alphabet, kind, masked)
        mask = mask_after(text, after, file)
        counted = _count(text, mask)
        if validation is not None:
            held = read(validation, kind, masked)
            held_mask = mask_after(held, after, validation)
            return cls(text, held, mask, held_mask, known, counted, _count(held, held_mask), mode)
        if folds > 1:  # they take turns, and need no validation part of their own
            return cls(text, None, mask, None, known, counted, counted, mode)
        if not choices.share:
            return cls(text, None, mask, None, known, counted, 0, mode)
        size = int(len(text) * choices.share)
        held_counted = size if mask is None else int(mask[len(mask) - size :].sum())
        counted -= held_counted
        if mask is not None and size and not (counted and held_counted):
            part = (
                "training part" if held_counted else "last part, which is held out for validation,"
            )
            raise ValueError(
                f"no symbol of the {part} of {file} comes right after {after!r}, which --after names: give another "
                "--share or a --validation file"
            )
        return cls(text, choices.share, mask, None, known, counted, held_counted, mode)

    @property
    def masks(self) -> dict[str, Any]:
        """The masks by the names of arguments."""
        return {"mask": self.mask, "validation_mask": self.held_mask}

    def fold(self, alphabet: Alphabet) -> Fold:
        """Return the texts by the numbers of an alphabet."""
        return fold_of(alphabet, self.text, self.held, self.mask, self.held_mask)

    def parts(self) -> tuple[Text, Text, int]:
        """Return the held-out text, what comes before it, and the number of symbols held out."""
        held = self.held
        before = self.text
        if held is None or isinstance(held, float):
            cut = len(self.text) - int(len(self.text) * (held or 0.0))
            held = self.text[cut:]
            before = self.text[:cut]
        if self.mode is False:
            return held, before, len(held)
        return joined(held, self.mode), joined(before, self.mode), len(held)


def _count(text: Any, mask: np.ndarray | None) -> int:
    return len(text) if mask is None else int(mask.sum())
