"""x * rsqrt(mean(x^2) + eps), written by hand as in Llama and T5: an RMSNorm like any other.

Taken one by one, the square, the root and the product of two activations have no place in path geometry. So they are
kept back: a tensor that may become the root mean square of x is a tail (a function of outputs) of which it is known
what it is a statistic of. x, or what an activation made of it, times the inverse or divided by the root is one
normalization; if the statistic goes anywhere else, the network is cut at it as at any other function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network.errors import UntraceableError
from pathspace.network.rules import boundary, movement
from pathspace.network.rules.normalization import normalized
from pathspace.network.trace.reasons import BOUNDED
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Statistic, Value

_PRODUCTS = frozenset(["mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"])
_QUOTIENTS = frozenset(["div", "div_", "true_divide", "__truediv__", "__itruediv__"])
_SUMS = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])


def begun(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    values: list[Value],
    refusal: UntraceableError,
) -> Any:
    """The square of an activation, kept back; None for anything else."""
    x = values[0]
    twice = name in _PRODUCTS and len(values) == 2 and x.slot == values[1].slot and x.shape == values[1].shape
    if x.kind != "hidden" or (name.endswith("_") and not name.endswith("__")):
        return None
    if not twice and (len(values) != 1 or _power(name, args, kwargs) != 2):
        return None
    return _kept(recorder, name, func, args, kwargs, refusal, Statistic(x, 2))


def continued(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    values: list[Value],
) -> Any:
    """One more step to a root mean square, or the normalization by it; None where it is neither."""
    at = next(v for v in values if v.statistic is not None)
    known = at.statistic
    assert known is not None
    if name in _PRODUCTS | _QUOTIENTS:
        return _normalized(recorder, name, args, kwargs)
    if len(values) != 1:
        return None
    power = _power(name, args, kwargs)
    if name in movement.CASTS or (name in _SUMS and _is_constant(args)):
        result = known
    elif name == "mean" and known.over == () and known.power == 2:
        result = _mean(known, args, kwargs)
    elif power is not None and known.over:
        result = replace(known, power=known.power * power)
    else:
        result = None
    return None if result is None else _kept(recorder, name, func, args, kwargs, at.refusal, result)


def released(recorder: Recorder, tensor: Tensor) -> None:
    """What goes where no normalization comes of it is an input, as after any other cut."""
    value = recorder.known(tensor)
    if value is not None and value.statistic is not None:
        recorder.bind(tensor, replace(value, kind="tail" if value.refusal else "input", statistic=None))


def _kept(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    refusal: Exception | None,
    found: Statistic,
) -> Tensor:
    """The result of a function, kept back."""
    if not isinstance(refusal, UntraceableError):
        refusal = UntraceableError(name, recorder.path, BOUNDED)
    result = boundary.cut(recorder, name, func, args, kwargs, refusal)
    return recorder.bind(result, replace(recorder.value(result), kind="tail", statistic=found))


def _mean(known: Statistic, args: Sequence[Any], kwargs: Any) -> Statistic | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if dim is None or not keeps:
        return None
    n = len(known.of.shape)
    return replace(known, over=tuple(d % n for d in (dim if isinstance(dim, (tuple, list)) else (dim,))))


def _power(name: str, args: Sequence[Any], kwargs: Any) -> float | None:
    """The power that an operation takes of its argument; None for any other."""
    fixed = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
    if name in fixed:
        return fixed[name]
    other = kwargs.get("exponent", args[1] if len(args) > 1 else None)
    if name in ("pow", "__pow__") and isinstance(other, (int, float)):
        return float(other)
    return -1.0 if name in ("__rtruediv__", "__rdiv__") and other == 1 else None


def _is_constant(args: Sequence[Any]) -> bool:
    """Whether what is added is a number that is not negative: the eps."""
    eps = next((t for t in args if not isinstance(t, Tensor) or not t.is_meta), None)
    return isinstance(eps, (int, float, Tensor)) and bool(torch.as_tensor(eps).ge(0).all())


def _normalized(recorder: Recorder, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """X times the inverse of its root mean square, or divided by that."""
    if kwargs or len(args) != 2 or not all(isinstance(t, Tensor) for t in args):
        return None
    first, second = (recorder.known(t) for t in args)
    if first is None or second is None:
        return None
    turned = first.statistic is not None and name in _PRODUCTS
    x, by = (second, first) if turned else (first, second)
    known = by.statistic
    if known is None or x.kind != "hidden" or x.slot != known.of.slot or x.shape != known.of.shape:
        return None
    # x^2 to the power -1/2 in a product, 1/2 in a quotient
    if not known.over or known.power != (1.0 if name in _QUOTIENTS else -1.0):
        return None
    if x.batch in known.over:
        recorder.wrong_batch(name)
    tensor = args[1] if turned else args[0]
    created = normalized(recorder, name, tensor, x, x.shape, known.over)
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    return recorder.write(args[0], created) if in_place else created
