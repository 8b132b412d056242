"""Activations: functions f of single elements with f(s x) = s f(x) for s > 0.

Each is the identity in the squared network: gamma^2 counts all paths, active or not. The tracer and
the list of paths read them from ``ACTIVATIONS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pathspace.network.rules.elementwise import option, unchanged
from pathspace.network.trace.functions import CLAMPS
from pathspace.network.trace.reasons import BOUNDED
from pathspace.network.trace.recorder import Recorder

IsZero = Callable[[Any], bool]
"""Returns whether a number or a tensor is zero, and stays zero."""


def always(is_zero: IsZero, *args: Any, **kwargs: Any) -> bool:
    """Return that a function is homogeneous whatever its other arguments are."""
    del is_zero, args, kwargs
    return True


def clamped(is_zero: IsZero, min: Any = None, max: Any = None) -> bool:
    """Return whether bounds make a ReLU (min=0), or the negative part (max=0)."""
    bounds = [bound for bound in (min, max) if bound is not None]
    return len(bounds) == 1 and is_zero(bounds[0])


def bounded(
    is_zero: IsZero, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> bool:
    """Return whether the bounds of ``hardtanh`` make a ReLU (0 and infinity), or the negative part."""
    del inplace
    if max_val == math.inf:
        return is_zero(min_val)
    return min_val == -math.inf and is_zero(max_val)


def thresholded(is_zero: IsZero, threshold: float, value: float, inplace: bool = False) -> bool:
    """Return whether ``threshold(x, threshold, value)`` is a ReLU."""
    del inplace
    return is_zero(threshold) and is_zero(value)


@dataclass(frozen=True)
class Activation:
    """A function of single elements that is positively homogeneous.

    Attributes:
        name: of the torch function; with ``_`` after it, it writes into its argument.
        holds: whether it is homogeneous with the arguments after the first one.
        inplace: the place of the argument ``inplace`` after the first one.
        captured: the ATen operations of it in a captured pass, besides one of its own name.
    """

    name: str
    holds: Callable[..., bool] = always
    inplace: int = 2
    captured: tuple[str, ...] = ()

    def __call__(self, recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Trace it."""

        def is_zero(bound: Any) -> bool:
            if not isinstance(bound, Tensor):
                return bound == 0
            return recorder.lookup(bound) is None and bool(recorder.zeros(bound).all())

        try:
            holds = self.holds(is_zero, *args, **kwargs)
        except TypeError:
            recorder.no_rule("it is called in a way that tracing has no rule for")
        if not holds:
            recorder.no_rule(BOUNDED)
        in_place = option("inplace", self.inplace, args, kwargs, default=False)
        recorder.activated.append(recorder.as_units(input))
        return recorder.note_unit(unchanged(recorder, input, in_place=in_place))


ACTIVATIONS = (
    Activation("relu", inplace=0),
    Activation("leaky_relu", inplace=1),
    Activation("rrelu", inplace=3),
    Activation("abs"),
    Activation("hardtanh", bounded),
    Activation("threshold", thresholded),
    Activation("prelu", captured=("_prelu_kernel",)),
    *(Activation(name, clamped) for name in sorted(CLAMPS) if not name.endswith("_")),
)

BY_NAME = {
    name: activation
    for activation in ACTIVATIONS
    for name in (activation.name, f"{activation.name}_", *activation.captured)
}
"""Activations by the names of torch functions and of operations of a captured pass."""


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
    return BY_NAME["prelu"](recorder, input)


RULES: dict[str, Callable[..., Any]] = {
    **{activation.name: activation for activation in ACTIVATIONS},
    **{f"{activation.name}_": activation for activation in ACTIVATIONS},
    "prelu": prelu,
}
