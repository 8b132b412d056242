"""Activations: functions f of single elements with f(s x) = s f(x) for s > 0.

Each is the identity in the squared network: gamma^2 counts all paths, active or not. A new one is
an entry of ``ACTIVATIONS``, which the tracer and the list of paths read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pathspace.network.rules.elementwise import number, option, unchanged
from pathspace.network.trace.functions import CLAMPS
from pathspace.network.trace.reasons import BOUNDED
from pathspace.network.trace.recorder import Recorder


def homogeneous(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace a function that is positively homogeneous, such as ReLU, whatever its other arguments are."""
    known = _BY_NAME.get(recorder.name)
    place = 2 if known is None else known.inplace
    in_place = option("inplace", place, args, kwargs, default=False)
    recorder.activated.append(recorder.as_units(input))
    return recorder.note_unit(unchanged(recorder, input, in_place=in_place))


def clamp(recorder: Recorder, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Trace ``clamp``: with min=0 it is a ReLU, with max=0 the negative part.

    Other bounds are constants that do not scale.
    """
    bounds = [number(b) if isinstance(b, (int, float)) else b for b in (min, max) if b is not None]
    if len(bounds) != 1 or recorder.lookup(bounds[0]) is not None:
        recorder.no_rule(BOUNDED)
    if not bool(recorder.zeros(bounds[0]).all()):
        recorder.no_rule(BOUNDED)
    return homogeneous(recorder, x)


def threshold(
    recorder: Recorder, input: Tensor, threshold: float, value: float, inplace: bool = False
) -> Tensor:
    """Trace ``threshold``: ``threshold(x, 0, 0)`` is a ReLU; other numbers do not scale."""
    if threshold != 0 or value != 0:
        recorder.no_rule(BOUNDED)
    return homogeneous(recorder, input, inplace=inplace)


def prelu(recorder: Recorder, input: Tensor, weight: Tensor) -> Tensor:
    """Trace PReLU.

    Its slope is no edge: rescaling changes neither the slope nor its gradient, so it takes the
    plain rule.
    """
    slope = recorder.lookup(weight)
    if slope is not None and slope.kind == "hidden":
        recorder.no_rule("its slope is an activation, or a function of parameters that may scale")
    if slope is not None and slope.kind == "parameter":
        recorder.left.add(slope.name)  # also as an edge elsewhere
    return homogeneous(recorder, input)


@dataclass(frozen=True)
class Activation:
    """A positively homogeneous function of single elements.

    Attributes:
        name: of the torch function; with ``_`` after it, it writes into its argument.
        rule: traces it, and refuses arguments with which it is not homogeneous.
        inplace: the place of the argument ``inplace`` after the tensor.
        captured: the ATen operations of it in a captured pass, besides one of its own name.
    """

    name: str
    rule: Callable[..., Any] = homogeneous
    inplace: int = 2
    captured: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The function, and the one that writes into its argument."""
        return (self.name, f"{self.name}_")


ACTIVATIONS = (
    Activation("relu", inplace=0),
    Activation("leaky_relu", inplace=1),
    Activation("rrelu", inplace=3),
    Activation("abs"),
    Activation("threshold", threshold),
    Activation("prelu", prelu, captured=("_prelu_kernel",)),
    *(Activation(name, clamp) for name in sorted(CLAMPS) if not name.endswith("_")),
)
_BY_NAME = {name: activation for activation in ACTIVATIONS for name in activation.names}

RULES: dict[str, Callable[..., Any]] = {
    name: activation.rule for name, activation in _BY_NAME.items()
}

CAPTURED = frozenset(_BY_NAME).union(*(activation.captured for activation in ACTIVATIONS))
"""Names of activations in a captured pass."""
