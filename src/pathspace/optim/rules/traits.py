"""Traits of the rules that `Invariant` wraps, in one table.

A rule that is not in the table is treated with care: it sees the points themselves, all parameters
in one call, and the metric of the first step for good, unless the user names the points that it
keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import optim
from torch.optim import Optimizer

from pathspace.optim.rules.adafactor import Adafactor
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.nadam import NAdam
from pathspace.optim.rules.rmsprop import RMSprop
from pathspace.optim.rules.soap import SOAP
from pathspace.rescaling.optimizer_states import POWERS

Reach = Literal["element", "parameter", "all"]


@dataclass(frozen=True)
class RuleTraits:
    """Properties of a rule that decide how it is put into coordinates.

    Attributes:
        reads_points: whether its step depends on where the parameters are, beyond a decay.
        decays: ``"decoupled"`` if its weight decay is a factor of the parameters, ``"coupled"`` if
            it is added to the gradients.
        reach: of what a step of one element depends: of this ``"element"`` alone, of its
            ``"parameter"``, or of ``"all"``.
        one_by_one: whether parameters may be handed to it in several calls, as it treats each by
            itself and raises at its first step or never.
        by_sign: whether a gradient lost in rounding is to it as large as any.
        evaluates: whether a step evaluates the closure several times.
        points: entries of its state that are points and move with the coordinates; None where
            nobody knows.
        powers: entry of its state -> power of r that takes it from weights to coordinates; None
            where it has none.
        kernel: the option of torch that takes a step in few passes; empty where there is none.
        kernel_on: ``"cpu"`` if it is for the processor alone.
        takes_rows: whether it takes rows of a matrix that other processes have the rest of
            (``SHARD_OF``), and divides what needs the whole over them.
        replacement: a class of this library that steps as it does, in fewer passes.
    """

    reads_points: bool = True
    decays: Literal["decoupled", "coupled"] = "coupled"
    reach: Reach = "all"
    one_by_one: bool = False
    by_sign: bool = False
    evaluates: bool = False
    points: tuple[str, ...] | None = None
    powers: Mapping[str, int] | None = None
    kernel: Literal["", "fused", "foreach"] = ""
    kernel_on: Literal["any", "cpu"] = "any"
    takes_rows: bool = False
    replacement: type[Optimizer] | None = None

    @property
    def takes_parts(self) -> bool:
        """True if parameters may be sharded."""
        # what is nothing beside the largest element of the whole parameter is zero to a rule that
        # goes by signs
        return self.needs_whole or (self.reach == "element" and not self.by_sign)

    @property
    def needs_whole(self) -> bool:
        """True if the rule needs whole parameters, one at a time."""
        return self.reach == "parameter"


_ELEMENTS = RuleTraits(reads_points=False, reach="element", one_by_one=True, points=())
_ADAFACTOR = replace(_ELEMENTS, reads_points=True, reach="parameter")
_MATRICES = RuleTraits(
    reads_points=False, decays="decoupled", reach="parameter", one_by_one=True, points=()
)


def _of(traits: RuleTraits, kind: type[Optimizer], **more: Any) -> RuleTraits:
    """Return traits of a class of torch, with the powers of what it keeps."""
    return replace(traits, powers=POWERS.get(kind), **more)


# by class, not by name: others have rules of these names that decay in other ways
RULES: dict[type[Optimizer], RuleTraits] = {
    optim.SGD: _of(_ELEMENTS, optim.SGD, kernel="fused"),
    optim.Adam: _of(_ELEMENTS, optim.Adam, kernel="fused"),
    optim.AdamW: _of(_ELEMENTS, optim.AdamW, decays="decoupled", kernel="fused"),
    optim.NAdam: _of(_ELEMENTS, optim.NAdam, replacement=NAdam),
    NAdam: _of(_ELEMENTS, optim.NAdam),
    optim.RAdam: _of(_ELEMENTS, optim.RAdam, kernel="foreach", kernel_on="cpu"),
    optim.Adamax: _of(_ELEMENTS, optim.Adamax),
    optim.Adagrad: _of(_ELEMENTS, optim.Adagrad, kernel="fused", kernel_on="cpu"),
    optim.Adadelta: _of(_ELEMENTS, optim.Adadelta),
    optim.RMSprop: _of(_ELEMENTS, optim.RMSprop, replacement=RMSprop),
    RMSprop: _of(_ELEMENTS, optim.RMSprop),
    optim.Rprop: _of(_ELEMENTS, optim.Rprop, by_sign=True),
    optim.ASGD: _of(_ELEMENTS, optim.ASGD, reads_points=True, points=("ax",)),
    optim.Adafactor: _of(_ADAFACTOR, optim.Adafactor, replacement=Adafactor),
    Adafactor: _of(_ADAFACTOR, optim.Adafactor),
    optim.Muon: _of(_MATRICES, optim.Muon),
    MuonAdamW: replace(
        _MATRICES, powers={**POWERS[optim.AdamW], **POWERS[optim.Muon]}, takes_rows=True
    ),
    # its decompositions may raise at any step, so it gets all parameters at once
    SOAP: replace(_MATRICES, one_by_one=False),
    optim.LBFGS: RuleTraits(points=(), evaluates=True),
}

# rules of other packages, by the names of their classes and of those that they are made of
_POINTS: dict[str, tuple[str, ...]] = {
    **{kind.__name__: traits.points for kind, traits in RULES.items() if traits.points is not None},
    "Lion": (),
    "Prodigy": ("p0",),
    **{f"{kind}ScheduleFree": ("z",) for kind in ("AdamW", "SGD", "RAdam")},
    **{f"ScheduleFree{kind}": ("z",) for kind in ("AdamW", "SGD", "RAdam")},
}
_BY_SIGN = frozenset({"Rprop", "Lion", "SignSGD", "Tiger"})
_EVALUATES = ("LBFGS", "SAM")


def traits_of(kind: type[Optimizer]) -> RuleTraits:
    """Return what is known of a class of rules."""
    known = RULES.get(kind)
    if known is not None:
        return known
    return RuleTraits(
        by_sign=kind.__name__ in _BY_SIGN,
        evaluates=kind.__name__.endswith(_EVALUATES),
        points=_points_by_name(kind),
    )


def _points_by_name(kind: type[Optimizer]) -> tuple[str, ...] | None:
    names = [base.__name__ for base in kind.__mro__ if base is not Optimizer]
    found = [_POINTS[name] for name in names if name in _POINTS]
    return next((points for points in found if points), found[0] if found else None)
