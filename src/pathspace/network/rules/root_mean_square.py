"""x * rsqrt(mean(x^2) + eps), written by hand as in Llama and T5: an RMSNorm like any other.

Taken one by one, the square is a product, the root a cut, and the last product one with an input.
That would lose the normalization. So a tensor that may become the root mean square of x also
carries a note of which statistic of x it is. The product of x with the inverse of its root mean
square, or the quotient by it, is then traced as one normalization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules import movement
from pathspace.network.rules.normalization import normalized
from pathspace.network.trace.functions import changes
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Statistic, Value

_PRODUCTS = frozenset(["mul", "mul_", "__mul__", "__rmul__", "__imul__"])
_QUOTIENTS = frozenset(["div", "div_", "__truediv__", "__itruediv__"])
_SUMS = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])
_POWERS = frozenset(["pow", "__pow__", "square"])
_INVERSES = frozenset(["sqrt", "rsqrt", "reciprocal", "__rtruediv__", "__rdiv__"])
# of the mean of x^2, by which x is multiplied or divided
_POWER_OF_ROOT = {**dict.fromkeys(_PRODUCTS, -1.0), **dict.fromkeys(_QUOTIENTS, 1.0)}
STEPS = _PRODUCTS | _SUMS | _POWERS | _INVERSES | frozenset(movement.CASTS) | {"mean"}
"""Operations whose results may be on the way to a root mean square."""


def statistic_of(
    name: str, args: Sequence[Any], kwargs: Any, values: list[Value]
) -> Statistic | None:
    """Return the statistic that a function makes of an activation: a square, or a later step to the root."""
    x = values[0]
    if len(values) == 2:
        return Statistic(x, 2) if name in _PRODUCTS and _are_one(x, values[1]) else None
    in_place = name.endswith("_") and not name.endswith("__")
    if len(values) > 2 or in_place:
        return None
    # x may be a square itself, as a squared ReLU is
    if not _is_reduced(x.statistic) and _squares(x, name, args, kwargs):
        return Statistic(x, 2)
    if x.statistic is None:
        return None
    return _next_step(x.statistic, name, args, kwargs)


def _are_one(x: Value, y: Value) -> bool:
    """Return whether two factors are the same activation."""
    return x.kind == "hidden" and x.slot == y.slot and x.shape == y.shape


def _squares(x: Value, name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether an operation squares an activation."""
    return x.kind == "hidden" and name in _POWERS and _power(name, args, kwargs) == 2


def _next_step(
    statistic: Statistic, name: str, args: Sequence[Any], kwargs: Any
) -> Statistic | None:
    """Return the statistic after one more operation on it; None if that is no step to a root mean square."""
    if name in movement.CASTS or (name in _SUMS and _is_constant(args)):
        return statistic
    if name == "mean" and statistic.over == () and statistic.power == 2:
        return _mean(statistic, args, kwargs)
    power = _power(name, args, kwargs)
    if power is None or not statistic.over:
        return None
    return replace(statistic, power=statistic.power * power)


def _mean(statistic: Statistic, args: Sequence[Any], kwargs: Any) -> Statistic | None:
    """Return the mean of a square over dimensions that are kept; None for any other mean."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if dim is None or not keeps:
        return None
    n = len(statistic.of.shape)
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return replace(statistic, over=tuple(d % n for d in dims))


def _power(name: str, args: Sequence[Any], kwargs: Any) -> float | None:
    """Return the power to which an operation raises its argument; None for any other operation."""
    if name in _FIXED_POWERS:
        return _FIXED_POWERS[name]
    other = kwargs.get("exponent", args[1] if len(args) > 1 else None)
    if name in ("pow", "__pow__"):
        return float(other) if isinstance(other, (int, float)) else None
    if name in ("__rtruediv__", "__rdiv__") and other == 1:
        return -1.0
    return None


_FIXED_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}


def _is_constant(args: Sequence[Any]) -> bool:
    """Return whether the summand is a number that is not negative: the eps."""
    for summand in args:
        if isinstance(summand, Tensor) and summand.is_meta:
            continue
        is_number = isinstance(summand, (int, float, Tensor))
        return is_number and bool(torch.as_tensor(summand).ge(0).all())
    return False


def by_its_root(recorder: Recorder, args: Sequence[Any], kwargs: Any) -> Any:
    """Trace x / rms(x), or x times the inverse, as a normalization; return None for anything else."""
    name = recorder.name
    if name not in _POWER_OF_ROOT or kwargs or len(args) != 2:
        return None
    first = _value_of(recorder, args[0])
    second = _value_of(recorder, args[1])
    if first is None or second is None:
        return None
    if name in _PRODUCTS and _is_reduced(first.statistic):
        return _normalized(recorder, args, args[1], second, first.statistic)
    return _normalized(recorder, args, args[0], first, second.statistic)


def _normalized(
    recorder: Recorder, args: Sequence[Any], tensor: Tensor, x: Value, statistic: Statistic | None
) -> Any:
    """Trace the normalization of x by a statistic; return None if that is not the root mean square of x."""
    name = recorder.name
    if statistic is None or not _is_root(statistic, x, _POWER_OF_ROOT[name]):
        return None
    if x.batch in statistic.over:
        recorder.wrong_batch()
    created = normalized(recorder, tensor, x, x.shape, statistic.over)
    return recorder.write(args[0], created) if changes(name) else created


def _value_of(recorder: Recorder, operand: Any) -> Value | None:
    """Return the value of an operand; None for a number and for a constant."""
    return recorder.lookup(operand) if isinstance(operand, Tensor) else None


def _is_reduced(statistic: Statistic | None) -> bool:
    """Return whether a statistic is a mean over some dimensions, or a power of one."""
    return statistic is not None and bool(statistic.over)


def _is_root(statistic: Statistic, x: Value, power: float) -> bool:
    """Return whether a statistic is that power of the mean square of x."""
    if x.kind != "hidden" or x.slot != statistic.of.slot or x.shape != statistic.of.shape:
        return False
    return _is_reduced(statistic) and statistic.power == power
