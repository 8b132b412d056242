"""Guards against values that are not finite: ``if torch.isnan(h).any(): raise``.

Whether activations are finite does not change with the scales of units. A trace holds for finite ones, and answers such
a question as these do. A mask of this kind (``h[h.isnan()] = 0``) is followed as any other mask.

Where the model itself puts in a number that is not finite (``masked_fill(mask, -inf)``), or the given input has one,
inputs decide on the answer. There is none then for whatever is computed from it, and the question is refused as others
are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value

ASKS = frozenset(["__bool__", "is_nonzero", "item"])
"""What hands a single truth to Python."""

_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_KEEP = frozenset(
    [
        *("any", "all", "amax", "amin", "max", "min", "bool", "float", "double", "int", "long", "to", "type"),
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "detach", "cpu", "clone", "contiguous"),
    ]
)
"""Of a tensor of one value throughout, that value."""
_NOT = frozenset(["logical_not", "__invert__", "bitwise_not"])
_COUNTS = frozenset(["sum", "count_nonzero"])
_OR = frozenset(["logical_or", "bitwise_or", "__or__", "__ror__", "__ior__"])
_AND = frozenset(["logical_and", "bitwise_and", "__and__", "__rand__", "__iand__"])
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    **{
        f"{bar}{name}{bar}": getattr(operator, name)
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
        for bar in ("", "__")
    }
}
BEGINS = frozenset([*_OF_FINITE, *_COMPARED])
"""Where a guard may begin."""


def answer(recorder: Recorder, value: Value) -> bool | int | None:
    """Return what finite activations answer to a question about a value; None if that is not known."""
    known = recorder.if_finite.get(value.slot)
    if known is None or recorder.not_finite & recorder.reached([value.slot]):
        return None
    return known


def note_not_finite(
    recorder: Recorder, args: Any, kwargs: dict[str, Any], constants: Sequence[Tensor], result: Any
) -> None:
    """Remember the results of a function that is given a number that is not finite, or a constant with one."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, float) and not math.isfinite(a)]
    if given or any(not_finite(recorder, t) for t in constants):
        written = args[:1] if result is None else (result,)  # an assignment returns nothing
        recorder.not_finite.update(v.slot for v in recorder.values_in(written, {}))


def not_finite(recorder: Recorder, tensor: Tensor) -> bool:
    """Return whether a constant or a buffer holds a number that is not finite."""
    real = recorder.real.get(id(tensor), tensor)
    if real.is_meta or not real.is_floating_point() or real.layout is not torch.strided:
        return False
    return not bool(torch.isfinite(real).all())


def note_guard(recorder: Recorder, args: Sequence[Any], traced: Sequence[Value | None], result: Any) -> None:
    """Remember the value of a result that is the same throughout if all activations are finite."""
    if not isinstance(result, Tensor):
        return
    known = _known(recorder, args, traced)
    value = recorder.lookup(result)
    if known is not None and value is not None:
        recorder.if_finite[value.slot] = known


def _known(recorder: Recorder, args: Sequence[Any], traced: Sequence[Value | None]) -> bool | int | None:
    name = recorder.name
    if name in _OF_FINITE:
        return _OF_FINITE[name]
    if name in _COMPARED and len(args) == 2 and args[0] is args[1]:
        return _COMPARED[name](1, 1)  # h != h asks for numbers that are none
    values = [None if v is None else recorder.if_finite.get(v.slot) for v in traced]
    if not any(known is not None for known in values):
        return None
    first = values[0]
    if name in _OR or name in _AND:
        decides = name in _OR
        if decides in values:
            return decides
        return None if None in values or len(values) < 2 else not decides
    if len(values) > 1 or first is None:
        return None
    if name in _KEEP:
        return first
    if name in _NOT:
        return not first
    if name in _COUNTS:
        return None if first else 0
    if name in _COMPARED and len(args) == 2 and isinstance(args[1], (bool, int, float)):
        return _COMPARED[name](first, args[1])
    return None
