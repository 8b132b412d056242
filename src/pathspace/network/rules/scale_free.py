"""Operations whose results no rescaling changes: comparisons and signs of activations, and random numbers.

A comparison of two values of one scale has the same result after every rescaling, and no gradient
passes through it. So its result is an input of the network, like a mask: every path that it can
open counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pathspace.network.rules.elementwise import number
from pathspace.network.trace.functions import tensors_in
from pathspace.network.trace.recorder import Recorder


def compare(recorder: Recorder, input: Tensor, other: Any, **_: Any) -> Tensor:
    """Trace ``a > b`` and its kin: both have one scale. Zero fits every scale; any other constant fixes it at 1."""
    a, b = (recorder.value(t if isinstance(t, Tensor) else number(t)) for t in (input, other))
    if "parameter" in (a.kind, b.kind):
        recorder.no_rule(
            "it compares with a parameter: no gradient would train it there", "Make it a buffer"
        )
    labels = recorder.scales.unify(a.labels, b.labels)
    batch = None
    for value in (a, b):
        if value.batch is not None:
            batch = value.batch + labels.dim() - value.labels.dim()
    return recorder.as_inputs(recorder.func, (input, other), {}, batch)


def sign(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace the sign of an activation, or whether it is finite: both are the same at every scale."""
    value = recorder.value(input)
    if value.kind == "parameter" or recorder.values_in(args, kwargs):
        recorder.no_rule("it takes the sign of a parameter, or mixes it with another traced tensor")
    return recorder.as_inputs(recorder.func, (input, *args), kwargs, value.batch)


def noise_like(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace random numbers that read only the shape and type of an activation."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "generator")}
    return recorder.note_drawn(
        recorder.as_inputs(recorder.func, (input, *args), kwargs, recorder.value(input).batch)
    )


def noise(recorder: Recorder, args: Any, kwargs: Any) -> Tensor:
    """Trace random numbers of a given shape; none are drawn."""
    if recorder.name.endswith("_"):
        return recorder.note_drawn(recorder.add_leaf(args[0], "input"))
    kwargs = {
        key: value
        for key, value in kwargs.items()
        if key not in ("device", "generator", "pin_memory")
    }
    if not tensors_in(args, kwargs):
        kwargs["device"] = "meta"
    return recorder.note_drawn(recorder.as_inputs(recorder.func, args, kwargs, None))


COMPARISONS = frozenset(
    [
        "gt",
        "lt",
        "ge",
        "le",
        "eq",
        "ne",
    ]
)
SIGNS = frozenset(["sign", "sgn", "signbit", "heaviside", "isfinite", "isnan", "isinf"])
"""Signs have a gradient, which is zero."""

RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(COMPARISONS, compare),
    **dict.fromkeys(SIGNS, sign),
    **dict.fromkeys(["rand_like", "randn_like", "randint_like"], noise_like),
}
