"""The methods of the comparison: a rule, how much of kappa is in its metric, and what is done to kappa as a control."""

from __future__ import annotations

from dataclasses import dataclass

from pathspace.experiments.long_memory.copies import NAMES


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables call it.
        rule: A name in `rules.RULES`.
        power: How much of kappa is in the metric, as in `ps.metrics.Path`; 0: none.
        balanced: Whether the start is balanced once; an invariant method does the same from any scaling.
        of: The parameters whose kappa is used; the others have the metric of the balanced network.
        once: kappa of the first step for good.
        permuted: Units of kappa in a random order, the same in all parameters and at all steps of a run.
    """

    label: str
    rule: str
    power: float = 0.0
    balanced: bool = True
    of: tuple[str, ...] = NAMES
    once: bool = False
    permuted: bool = False

    @property
    def group(self) -> str:
        """What the metric is: "path", "balanced once", "the weights", or "control" for a part of kappa."""
        if self.once or self.permuted or self.of != NAMES:
            return "control"
        return "path" if self.power else "balanced once" if self.balanced else "the weights"


METHODS = {
    "path-muon": Method("PathMuon", "muon", 1.0),
    "path-muon-half": Method("PathMuon, power 1/2", "muon", 0.5),
    "path-muon-hidden": Method("PathMuon, PathAdam", "muon-hidden", 1.0),
    "path-soap": Method("PathSOAP", "soap", 1.0),
    "path-adam": Method("PathAdam", "adamw", 1.0),
    "balanced-muon": Method("Muon", "muon"),
    "balanced-muon-hidden": Method("Muon, AdamW", "muon-hidden"),
    "balanced-soap": Method("SOAP", "soap"),
    "balanced-adamw": Method("AdamW", "adamw"),
    "muon": Method("Muon on the weights", "muon", balanced=False),
    "soap": Method("SOAP on the weights", "soap", balanced=False),
    "adamw": Method("AdamW on the weights", "adamw", balanced=False),
    # controls: what of kappa does it
    "once": Method("kappa of the first step", "muon", 1.0, once=True),
    "permuted": Method("kappa's units permuted", "muon", 1.0, permuted=True),
    "recurrent-only": Method("kappa of W_rec alone", "muon", 1.0, of=("recurrent",)),
    "input-only": Method("kappa of W_in and b alone", "muon", 1.0, of=("input", "bias")),
    "output-only": Method("kappa of W_out alone", "muon", 1.0, of=("output",)),
}
