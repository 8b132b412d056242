"""Guards against values that are not finite: ``if torch.isnan(h).any(): raise``.

Rescaling does not change whether activations are finite. A trace assumes finite activations and
answers such questions accordingly. A mask of this kind (``h[h.isnan()] = 0``) is traced like any
other mask.

If the model itself writes a number that is not finite (``masked_fill(mask, -inf)``), or the given
input holds one, the answer depends on the inputs. Questions about values that are computed from it
are refused.

If constants alone decide where such numbers are (a causal mask), the trace knows their positions,
and also where they disappear: a softmax over a row with one finite entry is finite.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.trace.drawn import draws_in_training
from pathspace.network.trace.functions import changes, tensors_in
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value

ASKS = frozenset(["__bool__", "is_nonzero", "item"])
"""Functions that turn a tensor of one element into a Python value."""

_OF_FINITE = {
    "isfinite": True,
    "isnan": False,
    "isinf": False,
    "isposinf": False,
    "isneginf": False,
}
_KEEP = frozenset(
    [
        "any",
        "all",
        "amax",
        "amin",
        "max",
        "min",
        "bool",
        "float",
        "double",
        "int",
        "long",
        "to",
        "type",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "detach",
        "cpu",
        "clone",
        "contiguous",
    ]
)
"""Of a tensor of one value throughout, that value."""
_NOT = frozenset(["logical_not", "bitwise_not"])
_COUNTS = frozenset(["sum", "count_nonzero"])
_OR = frozenset(["logical_or", "bitwise_or", "bitwise_or_"])
_AND = frozenset(["logical_and", "bitwise_and", "bitwise_and_"])
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")
}
BEGINS = frozenset([*_OF_FINITE, *_COMPARED])
"""Functions with which a guard against non-finite values may begin."""

_LARGEST = torch.finfo(torch.float64).max
_OTHER_NUMBERS = frozenset(
    [
        "norm",
        "vector_norm",
        "linalg_vector_norm",
        "linalg_norm",
        "cdist",
        "normalize",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
        "clamp_min_",
        "clamp_max_",
    ]
)
"""Orders and bounds may be infinite."""
_BY_PLACES = frozenset(
    [
        "add",
        "add_",
        "sub",
        "sub_",
        "masked_fill",
        "masked_fill_",
        "where",
        "maximum",
        "amax",
        "max",
        "relu",
        "relu_",
        "nan_to_num",
        "softmax",
        "logsumexp",
        "scaled_dot_product_attention",
        "dropout",
        "__getitem__",
        "__setitem__",
        "view",
        "view_as",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "t",
        "expand",
        "expand_as",
        "contiguous",
        "clone",
        "detach",
        "chunk",
        "split",
        "unbind",
        "cat",
        "float",
        "double",
        "half",
        "bfloat16",
        "type_as",
    ]
)
"""See :func:`_goes_by_places`."""
_SCALED = frozenset(["mul", "mul_", "div", "div_"])
"""The same, where the other argument is a number."""
_ADVICE = "Use torch.finfo(dtype).min in the place of -inf, or leave the check out of the forward pass while tracing"


@dataclass(frozen=True)
class NotFinite:
    """Facts about a value that holds, or may hold, numbers that are not finite.

    Attributes:
        where: where the first of them was put in; empty for the given input.
        shown: zeros in the place of all finite numbers; None where inputs have a part in where the
            others are.
        names: the buffers that ``shown`` was made of.
    """

    where: str
    shown: Tensor | None = None
    names: frozenset[str] = frozenset()


def answer(recorder: Recorder, value: Value) -> bool | int | None:
    """Return what finite activations answer to a question about a value; None if that is not known."""
    known = recorder.if_finite.get(value.slot)
    if known is None or _cause(recorder, value) is not None:
        return None
    for slot in recorder.finite_again.keys() & recorder.reached([value.slot]):
        recorder.constants.update(recorder.finite_again[slot])
    return known


def refused(recorder: Recorder, value: Value) -> tuple[str, str] | None:
    """Return why a question about finite activations has no answer, and what to do; None for other questions."""
    cause = _cause(recorder, value) if value.slot in recorder.if_finite else None
    if cause is None:
        return None
    begins = f"the model puts in a number that is not finite at {cause.where}, and"
    if not cause.where:
        begins = "the given input holds a number that is not finite, and the model"
    return (
        f"{begins} asks whether activations are finite, which depends on the inputs then",
        _ADVICE,
    )


def _cause(recorder: Recorder, value: Value) -> NotFinite | None:
    """Return the first number that is not finite and that a value was computed from."""
    found = recorder.not_finite.keys() & recorder.reached(
        [value.slot], recorder.finite_again.keys()
    )
    return recorder.not_finite[min(found)] if found else None


@dataclass(frozen=True)
class Given:
    """Arguments of the function that is running.

    Attributes:
        args: by position.
        kwargs: by name.
        tensors: those among both, in their order.
        traced: the value of each tensor; None for a constant.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]
    traced: Sequence[Value | None]


def note_not_finite(recorder: Recorder, given: Given, result: Any) -> None:
    """Remember the results of a function that is given a number that is not finite, or a tensor with one."""
    where = _where(recorder, given)
    if where is None:
        return
    # an assignment returns nothing
    written = tensors_in(given.args[:1] if result is None else [result], {})
    shown, names = _shown_results(recorder, given)
    if len(shown) != len(written):
        shown = [None] * len(written)
    for tensor, its in zip(written, shown, strict=True):
        value = recorder.lookup(tensor)
        if value is None:
            continue
        if its is not None and bool(torch.isfinite(its).all()):
            recorder.finite_again[value.slot] = names
            continue
        recorder.not_finite[value.slot] = NotFinite(where, its, names)
        if result is None or changes(recorder.name):
            for slot in _in_memory_of(value):
                recorder.not_finite.setdefault(slot, NotFinite(where))


def _in_memory_of(value: Value) -> list[int]:
    """Return the slots of the tensors that share memory with a value that was written."""
    memory = value.memory
    if memory.pending:
        return [new.slot for _, new in memory.pending]
    return [] if memory.owner is None else [memory.owner.slot]


def _where(recorder: Recorder, given: Given) -> str | None:
    """Return where the first number that is not finite was put in; None if all arguments are finite."""
    if recorder.not_finite:
        found = [v.slot for v in given.traced if v is not None and v.slot in recorder.not_finite]
        if found:
            return recorder.not_finite[min(found)].where
    if recorder.name not in _OTHER_NUMBERS and _has_number_not_finite(given):
        return _here(recorder)
    for tensor, value in zip(given.tensors, given.traced, strict=True):
        if (value is None or value.kind == "buffer") and not_finite(recorder, tensor):
            return _here(recorder)
    return None


def _has_number_not_finite(given: Given) -> bool:
    """Return whether an argument is a number that is not finite."""
    for argument in (*given.args, *given.kwargs.values()):
        if isinstance(argument, (Tensor, int, str)):  # most arguments, without a call
            continue
        if _is_number(argument) and not _is_finite(argument, given.tensors):
            return True
    return False


def _here(recorder: Recorder) -> str:
    return f"'{recorder.name}'" + (f" in module '{recorder.path}'" if recorder.path else "")


def _is_number(argument: Any) -> bool:
    """Return whether an argument is a number with a point, of Python or NumPy."""
    if isinstance(argument, float):
        return True
    return getattr(getattr(argument, "dtype", None), "kind", "") == "f"


def _is_finite(number: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether a number is finite, also in the type of the tensors that it meets."""
    largest = max(
        (torch.finfo(t.dtype).max for t in tensors if t.is_floating_point()), default=_LARGEST
    )
    return bool((torch.as_tensor(number, dtype=torch.float64).abs() <= largest).all())  # NaN is not


def _shown_results(recorder: Recorder, given: Given) -> tuple[list[Tensor | None], frozenset[str]]:
    """Run the function with zeros in the place of finite activations: its results show where they are not finite.

    Returns:
        The results, in their order, and the names of the buffers that decided on them; nothing
        where this shows nothing, see :func:`_stand_ins`.
    """
    known = _stand_ins(recorder, given)
    if known is None:
        return [], frozenset()
    stand_ins, names = known
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: stand_ins[id(t)], (given.args, given.kwargs)
    )
    made = recorder.func(*args, **kwargs)
    return [*tensors_in(args[:1] if made is None else [made], {})], names


def _stand_ins(recorder: Recorder, given: Given) -> tuple[dict[int, Tensor], frozenset[str]] | None:
    """Return tensors to run a function with instead of its own: zeros in the place of finite activations.

    Returns:
        The tensors, by the ids of those that they stand for, and the names of the buffers that they
        were made of. None if inputs decide where numbers are not finite, or if the activations'
        numbers decide what becomes of them.
    """
    if not _goes_by_places(recorder.name, given.args, given.kwargs):
        return None
    found: dict[int, Tensor] = {}
    names = frozenset[str]()
    for tensor, value in zip(given.tensors, given.traced, strict=True):
        known = recorder.not_finite.get(value.slot) if value is not None else None
        shown = known.shown if known is not None else _known(recorder, tensor, value)
        if shown is None or recorder.buffers_in(shown, "drawn"):
            return None
        names |= recorder.buffers_in(shown, "mask", "indices", "numbers", "single")
        names |= known.names if known is not None else frozenset()
        found[id(tensor)] = shown.clone() if changes(recorder.name) else shown
    return found, names


def _known(recorder: Recorder, tensor: Tensor, value: Value | None) -> Tensor | None:
    """Return a constant as it is, and zeros for activations that are finite; None for anything else."""
    if value is None or id(tensor) in recorder.real:
        return recorder.real.get(id(tensor), tensor)
    if (
        value.kind == "buffer"
        or not tensor.is_floating_point()
        or _cause(recorder, value) is not None
    ):
        return None
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _goes_by_places(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the places of the infinities in its arguments decide where a function's results are finite.

    A sum does so: it is finite where all its terms are, whatever finite numbers these are.
    """
    others = [*args[1:], *kwargs.values()]
    if name in _SCALED:
        return (
            len(others) == 1
            and isinstance(others[0], (int, float))
            and 0 < abs(others[0]) < math.inf
        )
    if name == "to":
        return all(isinstance(other, torch.dtype) for other in others)
    return name in _BY_PLACES and not draws_in_training(name, args, kwargs)


def not_finite(recorder: Recorder, tensor: Tensor) -> bool:
    """Return whether a constant or a buffer holds a number that is not finite."""
    real = recorder.real.get(id(tensor), tensor)
    if real.is_meta or not real.is_floating_point() or real.layout is not torch.strided:
        return False
    return not bool(torch.isfinite(real).all())


def note_guard(
    recorder: Recorder, args: Sequence[Any], traced: Sequence[Value | None], result: Any
) -> None:
    """Remember the value of a result that is the same throughout if all activations are finite."""
    if not isinstance(result, Tensor):
        return
    known = _if_finite(recorder, args, traced)
    value = recorder.lookup(result)
    if known is not None and value is not None:
        recorder.if_finite[value.slot] = known


def _if_finite(
    recorder: Recorder, args: Sequence[Any], traced: Sequence[Value | None]
) -> bool | int | None:
    """Return the value that a result has throughout if all activations are finite; None if it is unknown."""
    name = recorder.name
    if name in _OF_FINITE:
        return _OF_FINITE[name]
    if name in _COMPARED and len(args) == 2 and args[0] is args[1]:
        return _COMPARED[name](1, 1)  # h != h asks for numbers that are none
    known = [None if v is None else recorder.if_finite.get(v.slot) for v in traced]
    if name in _OR:
        return _of_two(known, decides=True)
    if name in _AND:
        return _of_two(known, decides=False)
    if len(known) != 1 or known[0] is None:
        return None
    return _of_one(name, args, known[0])


def _of_two(known: Sequence[bool | int | None], *, decides: bool) -> bool | None:
    """Return the value of a logical operation; one operand that equals `decides` decides it."""
    if decides in known:
        return decides
    if len(known) < 2 or None in known:
        return None
    return not decides


def _of_one(name: str, args: Sequence[Any], known: bool | int) -> bool | int | None:
    """Return the value of a function of one tensor that has the value `known` throughout."""
    if name in _KEEP:
        return known
    if name in _NOT:
        return not known
    if name in _COUNTS:
        return None if known else 0
    if name in _COMPARED and len(args) == 2 and isinstance(args[1], (bool, int, float)):
        return _COMPARED[name](known, args[1])
    return None
