"""The methods of the comparison: a rule, how much of kappa is in its metric, and what is done to kappa as a control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

import pathspace as ps
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.soap import SOAP

RECURRENT = "rnn.weight_hh_l0"
INTO_UNITS = ("rnn.weight_ih_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0")
OUTPUT = "readout.weight"
SOAP_FREQUENCY = 40  # as in `ps.optim.PathSOAP`

# By rule: the optimizer of the path metric, the one without a metric, and options of both.
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "muon": (ps.optim.PathMuon, MuonAdamW, {}),
    "muon-hidden": (ps.optim.PathMuon, MuonAdamW, {}),
    "soap": (ps.optim.PathSOAP, SOAP, {"precondition_frequency": SOAP_FREQUENCY}),
    "adamw": (ps.optim.PathAdam, AdamW, {"weight_decay": 0.0}),
}


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables call it.
        rule: A name in `RULES`. With "muon-hidden" Muon has the recurrent matrix alone, as Muon's
            authors advise.
        power: How much of kappa is in the metric, as in `ps.metrics.Path`; 0: none.
        balanced: Whether the start is balanced once; an invariant method does the same from any
            scaling.
        of: The parameters whose kappa is used; the others have the metric of the balanced network.
            Empty: all.
        once: kappa of the first step for good.
        permuted: Units of kappa in a random order, the same in all parameters and at all steps of a
            run.
    """

    label: str
    rule: str
    power: float = 0.0
    balanced: bool = True
    of: tuple[str, ...] = ()
    once: bool = False
    permuted: bool = False

    @property
    def is_control(self) -> bool:
        """True if kappa is changed."""
        return self.once or self.permuted or bool(self.of)

    @property
    def group(self) -> str:
        """The kind of metric: "path", "balanced once", "the weights", or "control" for a part of kappa."""
        if self.is_control:
            return "control"
        if self.power:
            return "path"
        return "balanced once" if self.balanced else "the weights"


class ChangedKappa(ps.metrics.Metric):
    """The metric of a control: kappa of the path norm, and what is done to it.

    Args:
        method: See `Method`.
        order: The order of the units in kappa, if it is permuted.
        options: See `ps.metrics.Metric`.
    """

    def __init__(self, method: Method, order: Tensor, **options: Any) -> None:
        super().__init__(method.power, **options)
        self.method, self.order = method, order
        self.first: Mapping[str, Tensor] = {}

    def values(self, network: ps.Network, names: Sequence[str]) -> Mapping[str, Tensor]:
        """See `ps.metrics.Metric`."""
        if self.first:
            return self.first
        kappa = ps.paths.kappa(network)
        if self.method.permuted:
            kappa = {name: self._permuted(value) for name, value in kappa.items()}
        if self.method.once:
            self.first = {name: value.clone() for name, value in kappa.items()}
        # without any kappa a parameter has the metric of the balanced network
        chosen = self.method.of or names
        return {
            name: kappa[name] if name in chosen else torch.zeros_like(kappa[name]) for name in names
        }

    def _permuted(self, kappa: Tensor) -> Tensor:
        for dim, size in enumerate(kappa.shape):
            if size == len(self.order):
                kappa = kappa.index_select(dim, self.order)
        return kappa


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
    "recurrent-only": Method("kappa of W_rec alone", "muon", 1.0, of=(RECURRENT,)),
    "input-only": Method("kappa of W_in and b alone", "muon", 1.0, of=INTO_UNITS),
    "output-only": Method("kappa of W_out alone", "muon", 1.0, of=(OUTPUT,)),
}
