"""Normalizations that a model writes itself, traced as the layers that they are.

    x * rsqrt(mean(x^2) + eps)              RMSNorm, as in Llama and T5
    x / norm(x)                             unit length, as in F.normalize
    (x - mean(x)) / sqrt(var(x) + eps)      LayerNorm, as in ConvNeXt
    g * (x - mean(x)) / (std(x) + eps)      the same, with the gain first

Taken one by one, the statistic would be a cut, and the last product one with an input. That would
lose the normalization. So tensors carry notes: which statistic of x a divisor is, and that a
numerator is x, perhaps without its mean or times a gain. Where both meet in a product or a quotient
it is traced as one normalization.

Letters: x an activation, S the set of its values that the statistic is over, n their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules import movement
from pathspace.network.rules.normalization import normalized
from pathspace.network.trace.functions import changes
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Mean, Numerator, Statistic, Value

_PRODUCTS = frozenset(["mul", "mul_"])
_QUOTIENTS = frozenset(["div", "div_"])
_SUMS = frozenset(["add", "add_"])
_DIFFERENCES = frozenset(["sub"])
_POWERS = frozenset(["pow", "square"])
_INVERSES = frozenset(["sqrt", "rsqrt", "reciprocal", "__rtruediv__"])
_BOUNDS = frozenset(["clamp", "clamp_min"])
_MEANS = frozenset(["mean", "sum"])
_SPREADS = {"var": 2.0, "std": 1.0}
_NORMS = frozenset(["norm", "linalg_norm", "linalg_vector_norm", "vector_norm"])
# of the statistic, by which x is multiplied or divided
_POWER_OF_ROOT = {**dict.fromkeys(_PRODUCTS, -1.0), **dict.fromkeys(_QUOTIENTS, 1.0)}
STEPS = (
    _PRODUCTS
    | _SUMS
    | _DIFFERENCES
    | _POWERS
    | _INVERSES
    | _BOUNDS
    | _MEANS
    | _SPREADS.keys()
    | _NORMS
    | frozenset(movement.CASTS)
)
"""Operations whose results may be on the way to a normalization."""


# -- notes -----------------------------------------------------------------------------------------


def note_of(
    recorder: Recorder, args: Sequence[Any], kwargs: Any, values: Sequence[Value]
) -> Statistic | Mean | Numerator | None:
    """Return the note on the result of an operation: a step to a divisor or a numerator; None for anything else."""
    name = recorder.name
    first = values[0]
    if len(values) == 2:
        return None if kwargs else _of_two(recorder, args, first, values[1])
    in_place = name.endswith("_") and not name.endswith("__")
    if len(values) > 2 or in_place:
        return None
    note = first.statistic
    if isinstance(note, Statistic):
        # x may be a square itself, as a squared ReLU is
        squares = not note.over and _squares(first, name, args, kwargs)
        return Statistic(first, 2) if squares else _next_step(note, name, args, kwargs)
    if name in movement.CASTS:
        return note
    return _first_step(first, name, args, kwargs)


def _of_two(
    recorder: Recorder, args: Sequence[Any], first: Value, second: Value
) -> Statistic | Numerator | None:
    """Return the note on a product or a difference of two values."""
    if recorder.name in _PRODUCTS:
        if _are_one(first, second):
            return Statistic(first, 2)
        gain, x = (first, second) if first.kind == "parameter" else (second, first)
        if gain.kind != "parameter" or x.kind != "hidden":
            return None
        numerator = _numerator(x)
        tensor = args[0] if gain is first else args[1]
        return replace(numerator, gain=tensor) if numerator.gain is None else None
    subtracted = second.statistic
    if recorder.name in _DIFFERENCES and isinstance(subtracted, Mean):
        return Numerator(first, subtracted.over) if _are_one(first, subtracted.of) else None
    return None


def _are_one(x: Value, y: Value) -> bool:
    """Return whether two values are the same activation."""
    return x.kind == "hidden" and x.slot == y.slot and x.shape == y.shape


def _numerator(x: Value) -> Numerator:
    """Return the note on a numerator; an activation without one is a numerator as it is."""
    return x.statistic if isinstance(x.statistic, Numerator) else Numerator(x)


def _squares(x: Value, name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether an operation squares an activation."""
    return x.kind == "hidden" and name in _POWERS and _power(name, args, kwargs) == 2


def _first_step(x: Value, name: str, args: Sequence[Any], kwargs: Any) -> Statistic | Mean | None:
    """Return the note on a statistic of an activation, or on its square."""
    if x.kind != "hidden":
        return None
    if _squares(x, name, args, kwargs):
        return Statistic(x, 2)
    if name == "mean":
        over = _kept_dimensions(x, args, kwargs, place=1)
        return Mean(x, over) if over else None
    if name in _SPREADS:
        return _spread(x, _SPREADS[name], args, kwargs)
    return _norm(x, args, kwargs) if name in _NORMS else None


def _kept_dimensions(
    x: Value, args: Sequence[Any], kwargs: Any, *, place: int, between: int = 0
) -> tuple[int, ...]:
    """Return the dimensions that an operation reduces to size one; none if it reduces others, or drops them.

    Args:
        x: what is reduced.
        args: arguments of the operation.
        kwargs: those by name.
        place: where the dimensions stand among the arguments.
        between: how many arguments stand between them and ``keepdim``.
    """
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    after = place + 1 + between
    keeps = kwargs.get("keepdim", args[after] if len(args) > after else False)
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not keeps or not all(type(d) is int for d in dims):
        return ()
    n = len(x.shape)
    return tuple(sorted(d % n for d in dims))


def _spread(x: Value, power: float, args: Sequence[Any], kwargs: Any) -> Statistic | None:
    """Return the note on a variance or a standard deviation; None if it is of one value, or drops dimensions."""
    over = _kept_dimensions(x, args, kwargs, place=1, between=1)
    n = math.prod(x.shape[d] for d in over)
    unbiased = kwargs.get("unbiased", args[2] if len(args) > 2 else True)
    correction = kwargs.get("correction", 1 if unbiased else 0)
    is_number = isinstance(correction, (int, float))
    if not over or not is_number or n <= correction:
        return None
    return Statistic(x, power, over, centred=True, factor=n / (n - correction))


def _norm(x: Value, args: Sequence[Any], kwargs: Any) -> Statistic | None:
    """Return the note on the lengths of vectors; None for other norms."""
    degree = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2))
    over = _kept_dimensions(x, args, kwargs, place=2)
    if len(over) != 1 or degree not in (2, None, "fro"):
        return None
    return Statistic(x, 1, over, factor=x.shape[over[0]])


def _next_step(
    statistic: Statistic, name: str, args: Sequence[Any], kwargs: Any
) -> Statistic | None:
    """Return the statistic after one more operation on it; None if that is no step to a divisor."""
    if _keeps_statistic(name, args, kwargs):
        return statistic
    if name in _MEANS and not statistic.over and statistic.power == 2:
        over = _kept_dimensions(statistic.of, args, kwargs, place=1)
        n = math.prod(statistic.of.shape[d] for d in over)
        return replace(statistic, over=over, factor=n if name == "sum" else 1.0) if over else None
    power = _power(name, args, kwargs)
    if power is None or not statistic.over:
        return None
    return replace(statistic, power=statistic.power * power)


def _keeps_statistic(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether an operation casts a statistic, or keeps it away from zero by a summand or a bound."""
    adds_constant = name in _SUMS and _is_constant(args)
    return name in movement.CASTS or adds_constant or _bounds_from_below(name, args, kwargs)


def _power(name: str, args: Sequence[Any], kwargs: Any) -> float | None:
    """Return the power to which an operation raises its argument; None for any other operation."""
    if name in _FIXED_POWERS:
        return _FIXED_POWERS[name]
    other = kwargs.get("exponent", args[1] if len(args) > 1 else None)
    if name == "pow":
        return float(other) if isinstance(other, (int, float)) else None
    if name == "__rtruediv__" and other == 1:
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


def _bounds_from_below(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether an operation keeps a divisor away from zero: ``clamp_min(eps)``, ``clamp(min=eps)``."""
    if name not in _BOUNDS or kwargs.get("max") is not None or len(args) > 2:
        return False
    least = kwargs.get("min", args[1] if len(args) > 1 else None)
    return isinstance(least, (int, float)) and least >= 0


# -- where a numerator meets its divisor -----------------------------------------------------------


def by_its_statistic(recorder: Recorder, args: Sequence[Any], kwargs: Any) -> Tensor | None:
    """Trace x / rms(x), or x times the inverse, and the like as a normalization; return None for anything else."""
    name = recorder.name
    if name not in _POWER_OF_ROOT or kwargs or len(args) != 2:
        return None
    first = _value_of(recorder, args[0])
    second = _value_of(recorder, args[1])
    if first is None or second is None:
        return None
    if name in _PRODUCTS and _divisor(first) is not None:
        return _normalized(recorder, args, args[1], second, _divisor(first))
    return _normalized(recorder, args, args[0], first, _divisor(second))


def _value_of(recorder: Recorder, operand: Any) -> Value | None:
    """Return the value of an operand; None for a number and for a constant."""
    return recorder.lookup(operand) if isinstance(operand, Tensor) else None


def _divisor(value: Value) -> Statistic | None:
    """Return the note on a divisor: a statistic over some dimensions, or a power of one."""
    note = value.statistic
    return note if isinstance(note, Statistic) and note.over else None


def _normalized(
    recorder: Recorder,
    args: Sequence[Any],
    tensor: Tensor,
    above: Value,
    statistic: Statistic | None,
) -> Tensor | None:
    """Trace the normalization of a numerator by a statistic; return None if that is none of its own."""
    name = recorder.name
    if statistic is None or above.kind != "hidden" or statistic.power != _POWER_OF_ROOT[name]:
        return None
    numerator = _match(above, statistic)
    if numerator is None:
        return None
    x = numerator.of
    if x.batch in statistic.over:
        recorder.wrong_batch()
    created = normalized(recorder, tensor, x, x.shape, statistic.over)
    if statistic.factor != 1:
        created = recorder.apply("mul", torch.mul, created, statistic.factor**-0.5)
    if numerator.gain is not None:
        created = recorder.apply("mul", torch.mul, created, numerator.gain)
    made = recorder.write(args[0], created) if changes(name) else created
    recorder.divided.add(recorder.value(made).slot)
    return made


def _match(above: Value, statistic: Statistic) -> Numerator | None:
    """Return the note on a numerator of which a divisor is the statistic; None if there is none."""
    x = statistic.of
    centred = statistic.over if statistic.centred else ()
    note = x.statistic
    if isinstance(note, Numerator) and note.gain is None and note.centred == statistic.over:
        x = note.of  # the mean square of x - mean(x)
        centred = note.centred
    for candidate in (Numerator(above), _numerator(above)):
        if _are_one(candidate.of, x) and candidate.centred == centred:
            return candidate
    return None
