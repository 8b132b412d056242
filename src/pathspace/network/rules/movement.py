"""Operations that only move values: views, slices, joins, padding.

They act on scale labels, on parameter indices and in the squared network exactly as on values, so
each rule applies the same torch function everywhere. Only the position of the batch dimension needs
thought.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.rules.batch import examples_after
from pathspace.network.trace.parameter_uses import moved_index
from pathspace.network.trace.reasons import ROUNDED
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import WILD, without_repeats
from pathspace.network.trace.values import Value, apart, common_kind


def _reads_traced(recorder: Recorder, rest: Any) -> bool:
    return any(
        recorder.lookup(x) is not None for x in pytree.tree_leaves(rest) if isinstance(x, Tensor)
    )


def _on_labels(function: Callable[[Tensor], Any], labels: Tensor) -> Any:
    if labels.is_meta:
        return moved_index(function, labels)
    try:
        return function(labels)
    except (RuntimeError, NotImplementedError):  # e.g. reflection padding knows no integers
        moved = function(labels.double())
        return pytree.tree_map(lambda t: t.round().long(), moved)


def as_now(arguments: Any) -> Any:
    """Copy the arguments: the squared network runs later, when the model may have changed its indices."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), arguments)


def move_one(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace a movement of one tensor, with one result or a tuple of results."""
    value = recorder.value(x)
    name = recorder.name
    func = recorder.func
    _expect_constants(recorder, (args, kwargs))
    if name == "view":
        func = torch.Tensor.reshape  # labels are not laid out in memory as the values are
        args = _size_of_view(recorder, args, kwargs)
    args, kwargs = as_now((args, kwargs))
    if name == "squeeze" and not args and not kwargs:
        args = (_ones_without_batch(value),)

    def move(t: Tensor) -> Any:
        return func(t, *args, **kwargs)

    if value.kind == "hidden" and name in RESHAPED:
        value = replace(value, labels=_as_mixed(recorder, value, move))
    pads = func is F.unfold and value.kind != "parameter"
    moved = _on_padded(recorder, move, value.labels) if pads else _on_labels(move, value.labels)
    if isinstance(moved, Tensor):
        results = [_moved(recorder, value, move, None, moved, args, kwargs)]
        return recorder.emit_many(move, [value], results, dtype=x.dtype, form="movement")[0]
    results = [
        _moved(recorder, value, move, part, labels, args, kwargs)
        for part, labels in enumerate(moved)
    ]

    def move_to_tuple(t: Tensor) -> tuple[Tensor, ...]:
        return tuple(move(t))

    out = recorder.emit_many(move_to_tuple, [value], results, dtype=x.dtype, form="movement")
    return list(out) if isinstance(moved, list) else out


def _expect_constants(recorder: Recorder, rest: Any) -> None:
    """Refuse indices and sizes that are computed from traced tensors."""
    if _reads_traced(recorder, rest):
        recorder.no_rule(
            "its indices or sizes depend on the data, so the network has no single graph"
        )


def _ones_without_batch(value: Value) -> tuple[int, ...]:
    """Return the dimensions of size one, but for the batch, which may have other sizes than one."""
    return tuple(d for d, n in enumerate(value.shape) if n == 1 and d != value.batch)


def _on_padded(recorder: Recorder, move: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    """Move labels by a function that pads with zeros, which fit every scale."""
    return _on_labels(move, recorder.scales.resolve(labels) - WILD) + WILD


def _size_of_view(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of ``view`` by position, and refuse a view as another type."""
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        recorder.no_rule("it reads the bits of a number as another type")
    return (*args, kwargs.pop("size")) if "size" in kwargs else args


def _moved(
    recorder: Recorder,
    value: Value,
    move: Callable[[Tensor], Any],
    part: int | None,
    labels: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Value:
    """Return the value of a movement's result, or of one part of several."""

    def one(t: Tensor) -> Tensor:
        result = _on_labels(move, t)
        return result if part is None else result[part]

    batch, examples = examples_after(recorder, value, one, labels.shape, args, kwargs)
    created = Value(
        recorder.new_slot(), labels, value.kind, value.name, batch, value.state, examples=examples
    )
    return _shown(created, value, recorder.name, move, part, args)


def _as_mixed(recorder: Recorder, value: Value, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the labels of what is reshaped, and remember if units come to places that the sizes of dimensions decide.

    ``[positions, channels]`` read as ``[channels, height, width]`` is one. If the trace ties such
    units, all units in the dimensions that are mixed share one scale, and so do zeros among them.
    """
    result = value.labels
    labels = without_repeats(recorder.scales.resolve(result))
    if 0 in value.shape or labels.numel() == 1:
        return result
    after = move(torch.empty(value.shape, device="meta")).shape
    for dims in _mixed(value, labels, after):
        recorder.mixing.append(recorder.where())
        if recorder.tie_mixed:
            result = recorder.scales.unify_along(result, dims).expand(value.shape)
    return result


def _mixed(value: Value, labels: Tensor, after: torch.Size) -> list[tuple[int, ...]]:
    """Return groups of dimensions whose units a reshape to ``after`` puts into places that sizes decide."""
    result: list[tuple[int, ...]] = []
    sizes = [n for d, n in enumerate(value.shape) if n > 1 and d != value.batch]
    if len(set(sizes)) < len(sizes):  # as [3, 3] read as [3, 3]: which is which cannot be told
        result.append(tuple(range(len(value.shape))))
    for dims, parts in groups(value.shape, after):
        varied = any(labels.shape[d] > 1 for d in dims)
        if parts > 1 and varied and (len(dims) > 1 or _has_runs(labels, dims[0])):
            result.append(tuple(dims))
    return result


def groups(before: torch.Size, after: torch.Size) -> list[tuple[list[int], int]]:
    """Split a reshape into the smallest reshapes side by side.

    Returns:
        Of each, its dimensions before, and how many dimensions there are after; dimensions of size
        1 do not count.
    """
    result: list[tuple[list[int], int]] = []
    old = [(d, n) for d, n in enumerate(before) if n != 1]
    new = [n for n in after if n != 1]
    while old and new:
        first, left = old.pop(0)
        right = new.pop(0)
        dims = [first]
        parts = 1
        while left != right:
            if left < right:
                d, n = old.pop(0)
                dims.append(d)
                left *= n
            else:
                right *= new.pop(0)
                parts += 1
        result.append((dims, parts))
    return result


def _has_runs(labels: Tensor, dim: int) -> bool:
    """Return whether classes occur several times along a dimension, as after channels and positions were merged."""
    rows = labels.movedim(dim, -1).reshape(-1, labels.shape[dim])
    ordered = rows.sort(-1).values
    repeats = ordered[:, 1:] == ordered[:, :-1]
    return bool((repeats.any(-1) & ~repeats.all(-1)).any())


def _shown(
    value: Value, of: Value, name: str, move: Any, number: int | None, args: tuple[Any, ...]
) -> Value:
    """Return the result of a movement, as a view of the moved value where torch returns a view."""
    if name in _COPIES or (name == "__getitem__" and _picks_elements(args[0])):
        return value
    before = of.view

    def view(t: Tensor) -> Tensor:
        assert before is not None
        moved = move(before(t))
        return moved if number is None else moved[number]

    of.memory.share(of)
    certain = name in _VIEWS and before is not None
    return replace(value, memory=of.memory, view=view if certain else None, version=of.version)


def _picks_elements(index: Any) -> bool:
    """Return whether an index picks elements one by one, so that the result is a copy."""
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, (Tensor, list)) for item in items)


def join(recorder: Recorder, tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Trace concatenation and stacking."""
    values = [recorder.as_units(t) for t in tensors]
    func = recorder.func

    def move(*parts: Tensor) -> Tensor:
        return func(parts, *args, **kwargs)

    labels = move(*(value.labels for value in values))
    batches = [value.batch for value in values if value.batch is not None]
    batch = batches[0] if batches else None
    if recorder.examples.count > 1 and any(other != batch for other in batches):
        recorder.mixes()
    if batch is not None:
        dim = kwargs.get("dim", args[0] if args else 0)
        batch = _batch_after_join(recorder, batch, dim, labels.dim())
    dtype = _type_of(tensors)
    return recorder.emit(move, values, labels, dtype=dtype, batch=batch, kind=common_kind(values))


def _type_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type of the first tensor that holds no whole numbers; else of the first one."""
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor.dtype
    return tensors[0].dtype


def _batch_after_join(recorder: Recorder, batch: int, dim: int, dims: int) -> int | None:
    """Return the batch dimension of tensors that were joined along ``dim`` to one of ``dims`` dimensions."""
    name = recorder.name
    if name == "stack":
        return batch + int((dim % dims) <= batch)
    if name in ("hstack", "vstack"):
        return None
    if name in ("cat", "concat", "concatenate") and dim % dims == batch:
        recorder.wrong_batch()
    return batch


_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_TYPES |= {"long": torch.int64, "int": torch.int32}


def cast(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | str:
    """Trace changes of type or device, and copies, which do not change the value."""
    value = recorder.value(x)
    name = recorder.name
    # torch.float32, "torch.FloatTensor" or torch.FloatTensor; without any it names the type
    if name == "type":
        created = torch.empty(0, dtype=x.dtype, device="cpu").type(*args, **kwargs)
        if isinstance(created, str):
            return created
        dtype = created.dtype
    else:
        dtype = _type_given((*args, *kwargs.values()), _TYPES.get(name, x.dtype))
    if value.kind != "input" and not dtype.is_floating_point:
        recorder.no_rule(ROUNDED)
    if name == "clone" or dtype != x.dtype:
        value = apart(value)
    else:
        value.memory.share(value)
        if name in ("contiguous", "cpu", "cuda", "to"):
            value = replace(value, view=None)
    return recorder.bind(torch.empty(value.shape, dtype=dtype, device="meta"), value)


def _type_given(arguments: Iterable[Any], dtype: torch.dtype) -> torch.dtype:
    """Return the type that arguments name, or that of a tensor among them; else ``dtype``."""
    for argument in arguments:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, Tensor):
            dtype = argument.dtype
    return dtype


def like_other(recorder: Recorder, x: Tensor, other: Tensor) -> Tensor:
    """Trace ``view_as``, ``expand_as`` and ``reshape_as``, which read only the shape of the other tensor."""
    plain = {"view_as": "reshape", "expand_as": "expand", "reshape_as": "reshape"}[recorder.name]
    return recorder.apply(plain, getattr(torch.Tensor, plain), x, tuple(other.shape))


def pad(
    recorder: Recorder, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor:
    """Trace padding.

    Zeros fit every scale, as do infinities that a maximum passes over; copied values keep their
    scale.
    """
    if value and not math.isinf(value):
        recorder.no_rule(
            f"it pads with the constant {value}, which does not scale with the units beside it"
        )
    padded = recorder.as_units(input)

    fill = mode == "constant"

    def move(t: Tensor) -> Tensor:
        return F.pad(t, pad, mode, 0.0 if fill else None)

    labels = F.pad(padded.labels, pad, mode, WILD) if fill else _on_labels(move, padded.labels)
    if padded.batch is not None:
        from_last = 2 * (padded.labels.dim() - 1 - padded.batch)
        if any(pad[from_last : from_last + 2]):
            recorder.wrong_batch()
    return recorder.emit(
        move, [padded], labels, dtype=input.dtype, batch=padded.batch, kind=padded.kind
    )


def write(recorder: Recorder, x: Tensor, index: Any, item: Any) -> None:
    """Trace ``x[index] = item`` as a copy of x with some elements replaced."""
    base = recorder.value(x)
    if _reads_traced(recorder, index):
        _write_masked(recorder, x, index, item)
        return
    index = as_now(index)
    # a parameter that is written among activations is made of edges from the bias node
    source = (
        recorder.as_units(item)
        if isinstance(item, Tensor)
        else recorder.value(torch.tensor(float(item)))
    )
    recorder.check_type(x, source)
    if base.memory.members > 1:
        recorder.write_elements(x, lambda t: t[index], source)
        return
    labels = recorder.scales.resolve(base.labels).clone()
    labels[index] = recorder.scales.resolve(source.labels)

    def put(old: Tensor, new: Tensor) -> Tensor:
        result = old.clone()
        result[index] = new
        return result

    slot = recorder.new_slot()
    elements = torch.arange(labels.numel()).reshape(labels.shape)[index]
    batch, examples = recorder.examples.written(base, elements, source)
    created = Value(slot, labels, common_kind((base, source)), batch=batch, examples=examples)
    recorder.emit_many(put, [base, source], [created], name="item assignment", dtype=x.dtype)
    recorder.bind(x, created)


def copy(recorder: Recorder, x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Trace ``x.copy_(src)``: all elements of x are replaced."""
    del non_blocking
    write(recorder, x, ..., src)
    return x


def _write_masked(recorder: Recorder, x: Tensor, mask: Any, item: Any) -> None:
    """Trace ``x[mask] = number`` with a mask that is an input or a comparison."""
    single = not isinstance(item, Tensor) or (item.dim() == 0 and recorder.lookup(item) is None)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not single:
        recorder.no_rule(
            "its indices depend on the data, so the network has no single graph",
            "Write torch.where(mask, a, b) for a mask, F.one_hot or scatter for ones at places, or leave that module "
            "outside",
        )
    wide = mask
    for _ in range(x.dim() - mask.dim()):
        wide = recorder.apply("unsqueeze", torch.Tensor.unsqueeze, wide, -1)
    recorder.write(x, recorder.apply("where", torch.where, wide, item, x))


RESHAPED = frozenset(["view", "reshape", "flatten", "unflatten"])
_VIEWS = frozenset(
    [
        "view",
        "permute",
        "transpose",
        "t",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "squeeze",
        "unsqueeze",
        "unflatten",
        "expand",
        "broadcast_to",
        "narrow",
        "select",
        "__getitem__",
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "T.__get__",
        "mT.__get__",
        "diagonal",
    ]
)
"""Movements whose results share memory for certain; reshape and its kin may."""
_COPIES = frozenset(
    [
        "flip",
        "rot90",
        "roll",
        "repeat",
        "repeat_interleave",
        "tile",
        "index_select",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "interpolate",
        "upsample",
    ]
)
"""Movements whose results have memory of their own."""
_OF_ONE = _VIEWS | RESHAPED | {"unfold"} | (_COPIES - {"interpolate", "upsample"})
"""Movements of one tensor; interpolation has rules of its own."""
CASTS = frozenset(
    [
        "contiguous",
        "clone",
        "detach",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "long",
        "int",
        "cpu",
        "cuda",
        "data.__get__",
    ]
)
"""Changes of type or device, and copies."""
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_OF_ONE, move_one),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack", "hstack", "vstack"], join),
    **dict.fromkeys(CASTS, cast),
    **dict.fromkeys(["view_as", "expand_as", "reshape_as"], like_other),
    "pad": pad,
    "__setitem__": write,
    "copy_": copy,
}
