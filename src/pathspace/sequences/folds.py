"""Folds: the texts of a training, and the text held back to stop it and to choose by.

Alphabet of this module: A symbols. Encoded texts are vectors of symbol numbers; a mark is true
where a symbol is to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real  # what numpy numbers are, too
from typing import Any

import numpy as np

from pathspace.sequences.text import Alphabet, Corpus, Given, Text
from pathspace.sequences.tokens import (
    Mode,
    TokenAlphabet,
    Tokens,
    alphabet_over,
    mode_of,
    sequences_of,
)

Texts = Text | Sequence[Any]


class TooShortError(ValueError):
    """A text has fewer symbols to predict than folds need."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Training text and validation text of a training.

    Args:
        corpus: text to learn.
        validation: text to choose and to stop on, or None.
    """

    corpus: Corpus
    validation: Corpus | None = None


def is_share(validation: Any) -> bool:
    """Return whether no validation text is given beside the training text: none at all, or a share of that."""
    return validation is None or isinstance(validation, int | float | Real)


def held_back(validation: Any, mode: Mode) -> list[Any]:
    """Return the texts for validation that are given beside the training text: none if it is a share of that."""
    return [] if is_share(validation) else sequences_of(validation, mode).parts


def alphabet_of_texts(
    text: Any, validation: Any, known: Any, tokens: Mode | None, end: Any = None
) -> Alphabet:
    """Return the alphabet of a text to learn, of one held back, and of symbols to be known besides, None for none.

    Args:
        text: to learn.
        validation: held back, or a share, or None.
        known: symbols to be known besides, or None.
        tokens: what a symbol is.
        end: the symbol that ends each text, or None.

    Raises:
        ValueError: if the end is no single symbol.
    """
    mode = mode_of(text, tokens)
    parts = sequences_of(text, mode).parts + held_back(validation, mode)
    if known is not None:
        parts += sequences_of(known, mode).parts
    if end is None:
        return alphabet_over(parts, mode)
    ending = _ending(end, mode, isinstance(parts[0], bytes))
    alphabet = alphabet_over([*parts, ending], mode)
    return replace(alphabet, end=int(alphabet.encode(ending)[0]))


def _ending(end: Any, mode: Mode, of_bytes: bool) -> Any:
    """Return the text of the symbol that ends texts."""
    if mode is not False:
        return Tokens([end])
    if of_bytes and isinstance(end, int) and 0 <= end < 256:
        return bytes([end])
    kind = "a byte" if of_bytes else "a character"
    if not isinstance(end, bytes if of_bytes else str) or len(end) != 1:
        raise ValueError(f"end must be {kind}, as the texts have them, got {end!r}")
    return end


def check_end(alphabet: Alphabet, end: Any) -> None:
    """Refuse to end texts otherwise than the model was begun with; raises ValueError."""
    if end is None:
        return
    known = alphabet.end
    text = alphabet.symbols
    mode: Mode = alphabet.mode if isinstance(alphabet, TokenAlphabet) else False
    ending = _ending(end, mode, isinstance(text, bytes))
    numbers, is_known = alphabet.numbers(ending)
    if known is None or not is_known[0] or numbers[0] != known:
        begun = "no end" if known is None else f"the end {text[known]!r}"
        raise ValueError(
            f"the model was begun with {begun}, got {end!r}: leave end out, or fit anew"
        )


def with_ends(
    alphabet: Alphabet, encoded: list[np.ndarray], masks: list[np.ndarray] | None
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return texts and their masks with the symbol after each that ends it, if the alphabet has one."""
    if alphabet.end is None:
        return encoded, masks
    ended = [np.append(x, alphabet.end) for x in encoded]
    return ended, None if masks is None else [np.append(mask, True) for mask in masks]


def _as_mask(mask: Any) -> np.ndarray:
    """Return a mask as booleans; raises ValueError where an entry is neither true nor false, such as a NaN."""
    marks = np.asarray(mask)
    if marks.dtype != bool:
        wrong = np.atleast_1d((marks != 0) & (marks != 1))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"a mask holds True or False for each symbol, got {marks.ravel()[at]} at position {at}"
            )
    return marks.astype(bool)


def as_masks(mask: Any, given: Given) -> list[np.ndarray] | None:
    """Return the masks of one or several texts, None if there are none.

    Raises:
        ValueError: if there is not one for each text of a list, or one is no vector of booleans.
    """
    if mask is None:
        return None
    if given.is_one:
        only = _as_mask(mask)
        if only.ndim != 1:
            raise ValueError("the mask of a text needs one entry for each symbol of it, in a row")
        return [only]
    masks = [_as_mask(part) for part in mask]
    count = len(given.parts)
    if len(masks) != count or not all(part.ndim == 1 for part in masks):
        raise ValueError(
            f"a list of {count} texts needs a list of {count} masks, each with an entry for each symbol"
        )
    return masks


def fold_of(
    alphabet: Alphabet,
    text: Texts,
    validation: Texts | float | None,
    mask: Any,
    validation_mask: Any,
) -> Fold:
    """Return the texts to learn and to stop on, which may be a share of the former, by numbers of an alphabet."""
    given = alphabet.sequences(text)
    A = len(alphabet)
    encoded = [alphabet.encode(part) for part in given.parts]
    encoded, masks = with_ends(alphabet, encoded, as_masks(mask, given))
    if validation_mask is not None and is_share(validation):
        raise ValueError(
            "validation_mask is the mask of a validation text, and none is given: a share of the text to learn has its "
            "part of mask"
        )
    if validation is None or validation == 0:
        return Fold(Corpus.of(encoded, A, masks))
    if isinstance(validation, int | float | Real):
        if alphabet.end is not None:
            raise ValueError(
                "a share for validation would hold back the ends of all texts: give validation texts, or leave out end"
            )
        return keep_back(encoded, masks, float(validation), A)
    kept_back = alphabet.sequences(validation)
    held = [alphabet.encode(part) for part in kept_back.parts]
    if not any(len(x) for x in held):
        raise ValueError(
            "the validation text is empty: give one with a symbol to score, or None for none"
        )
    held, held_masks = with_ends(alphabet, held, as_masks(validation_mask, kept_back))
    return Fold(Corpus.of(encoded, A, masks), Corpus.of(held, A, held_masks))


@dataclass(frozen=True, eq=False)
class Scored:
    """A text to score.

    Args:
        corpus: its symbols that the alphabet has; None if there is none of them.
        escaped: bits of those that it lacks.
    """

    corpus: Corpus | None
    escaped: float


def to_score(alphabet: Alphabet, text: Any, mask: Any = None) -> Scored:
    """Return a text by the numbers of an alphabet, and what the symbols outside of it cost.

    Raises:
        ValueError: if nothing is to be predicted.
    """
    given = alphabet.sequences(text)
    A = len(alphabet)
    masks = as_masks(mask, given)
    numbers = []
    known = []
    for part in given.parts:
        x, is_known = alphabet.numbers(part)
        numbers.append(x)
        known.append(is_known)
    if all(is_known.all() for is_known in known):
        return Scored(Corpus.of(numbers, A, masks), 0.0)
    marks = [np.ones(len(x), bool) for x in numbers] if masks is None else masks
    # which says what is wrong with the masks
    Corpus.of(numbers, A, marks)
    escaped = 0.0
    kept_numbers = []
    kept_marks = []
    for part, x, is_known, mark in zip(given.parts, numbers, known, marks, strict=True):
        escaped += float(alphabet.escapes(part, is_known)[mark[~is_known]].sum())
        kept_numbers.append(x[is_known])
        kept_marks.append(mark[is_known])
    if not any(mark.any() for mark in kept_marks):
        return Scored(None, escaped)
    return Scored(Corpus.of(kept_numbers, A, kept_marks), escaped)


def keep_back(
    encoded: list[np.ndarray], masks: list[np.ndarray] | None, share: float, A: int
) -> Fold:
    """Keep back the last ``share`` of each text for validation."""
    if not 0 < share < 1:
        raise ValueError(f"the share for validation must lie between 0 and 1, got {share}")
    cuts = [len(x) - int(len(x) * share) for x in encoded]
    held = [x[cut:] for x, cut in zip(encoded, cuts, strict=True)]
    if not any(len(x) for x in held):
        raise ValueError(
            f"the text is too short to keep back {share:g} of it for validation: give another text for that, or a "
            "share of 0 for none"
        )
    kept_masks = None if masks is None else [m[:cut] for m, cut in zip(masks, cuts, strict=True)]
    held_masks = None if masks is None else [m[cut:] for m, cut in zip(masks, cuts, strict=True)]
    kept = [x[:cut] for x, cut in zip(encoded, cuts, strict=True)]
    return Fold(Corpus.of(kept, A, kept_masks), Corpus.of(held, A, held_masks))


def deal(
    encoded: list[np.ndarray], masks: list[np.ndarray] | None, folds: int, A: int
) -> list[Fold]:
    """Return folds that hold back every text in turn, or, with fewer texts than folds, stretches of each."""
    marks = [np.ones(len(x), bool) for x in encoded] if masks is None else masks
    texts = list(zip(encoded, marks, strict=True))
    found = []
    for k in range(folds):
        if len(texts) >= folds:
            held = texts[k::folds]
            kept = [text for number, text in enumerate(texts) if number % folds != k]
        else:
            kept, held = _without_stretch(texts, k, folds)
        found.append(Fold(_corpus(kept, folds, A), _corpus(held, folds, A)))
    return found


Marked = tuple[np.ndarray, np.ndarray]
"""The symbols of a text, and which of them are predicted."""


def _without_stretch(texts: list[Marked], k: int, folds: int) -> tuple[list[Marked], list[Marked]]:
    """Return what is left of each text without its k-th stretch, and these stretches."""
    kept = []
    held = []
    for x, mark in texts:
        begin = len(x) * k // folds
        end = len(x) * (k + 1) // folds
        held.append((x[begin:end], mark[begin:end]))
        kept.append((x[:begin], mark[:begin]))
        kept.append((x[end:], mark[end:]))
    return kept, held


def _corpus(texts: list[Marked], folds: int, A: int) -> Corpus:
    """Return the corpus of a part of a fold.

    Raises:
        TooShortError: if it has no symbol to predict.
    """
    if not any(mark.any() for _, mark in texts):
        raise TooShortError(
            f"the text is too short for {folds} folds: one of them has no symbol to predict"
        )
    return Corpus.of([x for x, _ in texts], A, [mark for _, mark in texts])
