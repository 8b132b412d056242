"""Elements picked by indices that are inputs, such as the last valid step of each sequence.

Any of the elements may be picked, so the squared network adds them, like a maximum; they share one
scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.rules.movement import move_one
from pathspace.network.rules.packed import in_order
from pathspace.network.trace.reasons import OF_INPUTS
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value


def getitem(recorder: Recorder, x: Tensor, index: Any) -> Any:
    """Trace ``x[index]``, where the index may be an input."""
    items = index if isinstance(index, tuple) else (index,)
    traced = [i for i in pytree.tree_leaves(items) if recorder.lookup(i) is not None]
    if not traced:
        return move_one(recorder, x, index)
    value = recorder.lookup(x)
    indices = [recorder.value(i) for i in traced]
    _check_indices(recorder, traced, indices)
    if value is None or value.kind in ("input", "buffer"):
        return recorder.preprocess(recorder.func, (x, index), {})
    if value.kind == "parameter" and len(items) == 1 and x.dim() == 2:
        return recorder.apply("embedding", F.embedding, traced[0], x)
    return _picked(recorder, x, value, items, traced)


def _picked(
    recorder: Recorder, x: Tensor, value: Value, items: tuple[Any, ...], traced: list[Tensor]
) -> Tensor:
    """Trace an index along one dimension, or one that picks one element of every example."""
    ids = {id(t) for t in traced}
    dims = [d for d, i in enumerate(items) if id(i) in ids]
    if len(dims) == len(traced) == 1 and _are_whole(items, without=dims[0]):
        return picked_along(recorder, x, dims[0], recorder.value(traced[0]), traced[0].shape)
    batch = value.batch
    if batch in (0, 1) and _one_of_each(items, traced, batch, x.shape[batch]):
        return recorder.apply("amax", torch.amax, x, 1 - batch)
    return recorder.no_rule("it picks elements by an input in a way that is not known", _PICK)


def _check_indices(recorder: Recorder, traced: list[Tensor], indices: list[Value]) -> None:
    """Refuse indices that depend on activations, and masks, which change the shape."""
    of_inputs = all(v.kind in ("input", "buffer") for v in indices)
    if of_inputs and all(i.dtype != torch.bool for i in traced):
        return
    advice = f"{_MASK}. {OF_INPUTS}" if of_inputs else _MASK
    recorder.no_rule(
        "its indices or sizes depend on the data, so the network has no single graph", advice
    )


def _are_whole(items: tuple[Any, ...], *, without: int) -> bool:
    """Return whether all items of an index but one are ``:``."""
    return all(_is_whole(item) for d, item in enumerate(items) if d != without)


def _is_whole(item: Any) -> bool:
    """Return whether an item of an index is ``:``."""
    return isinstance(item, slice) and item == slice(None)


def _one_of_each(items: tuple[Any, ...], traced: list[Tensor], batch: int, examples: int) -> bool:
    """Return whether it is ``x[arange(B), places]`` or ``x[places, arange(B)]``: one element of every example."""
    if len(items) < 2 or not all(map(_is_whole, items[2:])):
        return False
    rows = items[batch]
    other = items[1 - batch]
    if not isinstance(rows, Tensor) or any(rows is t for t in traced):
        return False
    if rows.tolist() != list(range(examples)):
        return False
    return any(other is t for t in traced) and other.shape == (examples,)


def picked_along(
    recorder: Recorder, x: Tensor, dim: int, index: Value, shape: torch.Size
) -> Tensor:
    """Trace ``x[:, index]``: each result can be any element along the dimension, the other indices being equal."""
    value = recorder.as_units(x)
    dim %= value.labels.dim()
    if value.batch == dim or index.batch is not None:
        recorder.wrong_batch()
    common = recorder.scales.unify_along(value.labels, (dim,)).squeeze(dim)
    size = torch.Size((*value.shape[:dim], *shape, *value.shape[dim + 1 :]))
    new = (1,) * len(shape)

    def spread(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:dim], *new, *t.shape[dim:]).expand(size)

    def squared(h: Tensor) -> Tensor:
        return spread(h.sum(dim))

    batch = value.batch
    if batch is not None and batch > dim:
        batch += len(shape) - 1
    out = recorder.emit(
        squared, [value], spread(common), dtype=x.dtype, batch=batch, kind=value.kind
    )
    return recorder.note_unit(out)


def index_select(recorder: Recorder, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Trace ``index_select`` along one dimension."""
    of_index = recorder.lookup(index)
    same = in_order(recorder, input, dim, index)
    if same is not None:
        return same
    if of_index is None:
        return move_one(recorder, input, dim, index)
    value = recorder.lookup(input)
    if of_index.kind not in ("input", "buffer"):
        recorder.no_rule("its indices depend on activations, so the network has no single graph")
    if value is None or value.kind in ("input", "buffer"):
        return recorder.preprocess(recorder.func, (input, dim, index), {})
    if value.kind == "parameter" and input.dim() == 2 and dim % 2 == 0:
        return recorder.apply("embedding", F.embedding, index, input)
    return picked_along(recorder, input, dim, of_index, index.shape)


def gather(recorder: Recorder, input: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    """Trace ``gather`` along one dimension."""
    of_index = recorder.lookup(index)
    if of_index is None:
        return move_one(recorder, input, dim, index)
    if of_index.kind not in ("input", "buffer"):
        recorder.no_rule("its indices depend on activations, so the network has no single graph")
    x = recorder.as_units(input)
    dim %= x.labels.dim()
    if x.batch == dim:
        recorder.wrong_batch()
    shape = index.shape
    part = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(shape))
    labels = recorder.scales.unify_along(x.labels, (dim,))[part]

    def squared(h: Tensor) -> Tensor:
        return h.sum(dim, keepdim=True)[part].expand(shape)

    out = recorder.emit(squared, [x], labels.expand(shape), dtype=input.dtype, batch=x.batch)
    return recorder.note_unit(out)


_PICK = (
    "Pick along one dimension, x[:, places], or one element of every example, x[torch.arange(len(x)), places], or use "
    "gather"
)
_MASK = "Multiply by the mask, or use torch.where, which leave the shape as it is"

RULES: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "gather": gather,
    "index_select": index_select,
}
