"""The result of a fit: network, contexts and mixture, the one that is kept, and its report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pathspace.sequences.cli.console import console, per_symbol, say, symbols_shown
from pathspace.sequences.cli.fit_texts import Texts
from pathspace.sequences.cli.worth import verdict
from pathspace.sequences.mixed import Mixed, beside_contexts, mixed_after_fit
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.training import Training

Kept = Literal["network", "mixed", "contexts"]


def look_at_contexts(network: SequenceModel, texts: Texts, quiet: bool, *, fitted: bool) -> Mixed:
    """Return what contexts alone learn from the texts, and say what they need on the validation part.

    Args:
        network: which will be trained, or trained further.
        texts: of the fit.
        quiet: whether nothing is said.
        fitted: whether the network has been fitted, so that its alphabet is theirs.
    """
    begun = time.monotonic()
    with symbols_shown("contexts alone", quiet) as progress:
        if fitted:
            contexts = Mixed(network, silent=True).read(
                texts.text, texts.held, progress=progress, **texts.masks
            )
        else:
            contexts = Mixed().read(
                texts.text,
                texts.held,
                alphabet=texts.known,
                tokens=texts.mode,
                progress=progress,
                **texts.masks,
            )
    if not quiet and contexts.validation_bits_ is not None:
        each = per_symbol(contexts.validation_bits_, texts.held_counted)
        console.print(
            f"contexts alone need {each:.4f} bits/symbol of the validation part, after "
            f"{time.monotonic() - begun:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
    return contexts


def mix(
    network: SequenceModel, texts: Texts, contexts: Mixed, quiet: bool, *, mixed: bool
) -> dict[str, Mixed]:
    """Return contexts beside the silent network, and the network mixed with them if that is asked for.

    A network without a pass is not mixed: it says next to nothing, and that would take as long
    again.
    """
    found = {"contexts": beside_contexts(contexts, network)}
    training = network.training_
    if mixed and training.passes:
        seconds = None if network.seconds is None else training.seconds / 2
        with symbols_shown("mix, after a second network of half the text", quiet) as progress:
            found["mixed"] = mixed_after_fit(
                network,
                texts.fold(network.alphabet_),
                passes=training.passes,
                seconds=seconds,
                progress=progress,
            )
    return found


@dataclass(frozen=True)
class Result:
    """A network after its fit, and what mixing has made of it.

    Args:
        output: the model file.
        training: of the network.
        counted: predicted symbols of the training text.
        held_counted: those of the validation text.
        ensemble: whether the weights of merged networks were fitted to the validation text.
        training_bits: bits of the training text by model; empty where nothing was mixed.
        held_bits: bits of the validation text by model; empty where nothing was mixed or held back.
        kept: which model is saved.
        interrupted: whether Ctrl-C or SIGTERM has ended the command before it was done.
    """

    output: Path
    training: Training
    counted: int
    held_counted: int
    ensemble: bool = False
    training_bits: dict[str, float] | None = None
    held_bits: dict[str, float] | None = None
    kept: Kept = "network"
    interrupted: bool = False

    def beside(self, mixtures: dict[str, Mixed], context: bool | None) -> Result:
        """Return the result with what the models of `mix` need; None leaves the choice to the bits."""
        trained = {"network": -self.training.log_likelihood / math.log(2)}
        trained |= {name: mixture.bits_ for name, mixture in mixtures.items()}
        bits = {name: mixture.validation_bits_ for name, mixture in mixtures.items()}
        held = {name: each for name, each in bits.items() if each is not None}
        if held:
            held = {"network": self.training.result_bits, **held}
        by = held or self._unseen(trained)
        # whoever asks for contexts has the mixture, where there is one
        allowed: tuple[Kept, ...] = ("mixed", "contexts")
        if not context:
            allowed = ("network", *allowed)
        there = [name for name in allowed if name in by]
        kept = there[0] if context else min(there, key=by.__getitem__)
        return replace(self, training_bits=trained, held_bits=held, kept=kept)

    def _unseen(self, trained: Mapping[str, float]) -> dict[str, float]:
        """Return the bits by which models are compared without a validation part.

        On the text that a network was fitted to, neither it nor what it is mixed into is measured;
        of folds it has the bits of what they held back.
        """
        by = dict(trained)
        by["network"] = self.training.result_bits if self.held_counted else math.inf
        if "mixed" in by:
            by["mixed"] = math.inf
        return by

    def say(self, others: dict[str, float], as_json: bool) -> None:
        """Print it, beside the bits per symbol of the baselines."""
        training = self.training
        figures: dict[str, Any] = {
            "model": str(self.output),
            "passes": training.passes,
            "seconds": training.seconds,
            "units": training.result.units,
            "training_bits_per_symbol": self._trained,
            "interrupted": self.interrupted,
            "kept": self.kept,
        }
        lines = [
            f"{self.output}: {training.passes} passes in {training.seconds:.1f} s, {training.result.units} units",
        ]
        # before the first pass there is no figure
        if training.passes:
            is_best = training.passes == training.result_pass or not self.held_counted
            at = "" if is_best else " at the last pass"
            lines.append(f"training {self._trained:.4f} bits/symbol{at}")
        held = per_symbol(training.result_bits, self.held_counted)
        if self.held_counted:
            figures |= {"validation_bits_per_symbol": held, "best_pass": training.result_pass}
            figures["fitted_to_validation"] = self.ensemble
            fitted = ""
            if self.ensemble:
                fitted = ", to which the weights of the merged networks are fitted"
            lines.append(
                f"validation {held:.4f} bits/symbol{fitted}, best at pass {training.result_pass}"
            )
        if self.held_bits:
            rows = _rows(self.held_bits, self.held_counted)
            held = rows[self.kept]
            figures["validation_bits_per_symbol_by_model"] = rows
            figures["validation_bits_per_symbol"] = held
            lines.append(
                f"validation by {_listed(rows)} bits/symbol: the file has {_NAMED[self.kept]}"
            )
        elif self.training_bits is not None:
            rows = _rows(self.training_bits, self.counted)
            figures["training_bits_per_symbol_by_model"] = rows
            # by folds, which hold nothing back from contexts
            if self.held_counted:
                figures["validation_bits_per_symbol_by_model"] = {"network": held}
                figures["validation_bits_per_symbol"] = held if self.kept == "network" else math.nan
            told = _listed(rows, network=" (fitted to it)")
            lines.append(f"training by {told} bits/symbol: the file has {_NAMED[self.kept]}")
        if others:
            figures["baseline_bits_per_symbol"] = others
            # where no pass was looked at, none is known to have been worse
            worse = training.validation_bits > training.result_bits
            overfitted = worse and 2 * training.result_pass < training.passes
            lines += verdict(held, others, self.training_bits is not None, overfitted)
        say(as_json, figures, *lines, output=self.output)

    @property
    def _trained(self) -> float:
        """Bits per symbol of the training text."""
        return per_symbol(-self.training.log_likelihood / math.log(2), self.counted)


_NAMED = {
    "network": "the network alone",
    "mixed": "the mixture and the training text",
    "contexts": "contexts alone and the training text (the network is kept for --resume, and not used)",
}


def _rows(bits: Mapping[str, float], counted: int) -> dict[str, float]:
    """Return bits per symbol by model."""
    return {name: per_symbol(total, counted) for name, total in bits.items()}


def _listed(rows: Mapping[str, float], network: str = "") -> str:
    """Return what each model needs, in words; ``network`` is said of the network."""
    parts = []
    for name, bits in rows.items():
        if not math.isnan(bits):
            parts.append(f"{name} {bits:.4f}{network if name == 'network' else ''}")
    return ", ".join(parts)
