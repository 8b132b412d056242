"""Elements picked by indices that are inputs, such as the last valid step of each sequence.

Any of the elements may be picked, so the squared network adds them, like a maximum; they share one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.recorder import Recorder
from pathspace.network.rules.movement import move_one
from pathspace.network.rules.pooling import pooled_labels, reduce


def getitem(recorder: Recorder, name: str, func: Callable[..., Any], x: Tensor, index: Any) -> Any:
    """``x[index]``, where the index may be an input."""
    items = index if isinstance(index, tuple) else (index,)
    traced = [i for i in pytree.tree_leaves(items) if isinstance(i, Tensor) and recorder.known(i) is not None]
    if not traced:
        return move_one(recorder, name, func, x, index)
    value, indices = recorder.known(x), [recorder.value(i) for i in traced]
    if any(v.kind not in ("input", "buffer") for v in indices) or any(i.dtype == torch.bool for i in traced):
        recorder.refuse(
            name, "its indices or sizes depend on the data, so the network has no single graph", _MASK
        )
    if value is None or value.kind in ("input", "buffer"):
        return recorder.preprocess(func, (x, index), {}, [v for v in (value, *indices) if v is not None])
    if value.kind == "parameter" and len(items) == 1 and x.dim() == 2:
        return recorder.apply("embedding", F.embedding, traced[0], x)
    batch = value.batch
    if batch in (0, 1) and _one_of_each(items, traced, batch, x.shape[batch]):
        return reduce(recorder, "amax", func, x, 1 - batch)
    return recorder.refuse(name, "it picks elements by an input in a way that is not known", _PICK)


def _one_of_each(items: tuple[Any, ...], traced: list[Tensor], batch: int, examples: int) -> bool:
    """Whether it is ``x[arange(B), places]`` or ``x[places, arange(B)]``: one element of every example."""
    if len(items) < 2 or not all(isinstance(i, slice) and i == slice(None) for i in items[2:]):
        return False
    own, other = items[batch], items[1 - batch]
    if not isinstance(own, Tensor) or any(own is t for t in traced) or own.tolist() != list(range(examples)):
        return False
    return any(other is t for t in traced) and other.shape == (examples,)


def gather(
    recorder: Recorder, name: str, func: Callable[..., Any], input: Tensor, dim: int, index: Tensor, **_: Any
) -> Tensor:
    """``gather`` along one dimension."""
    known = recorder.known(index)
    if known is None:
        return move_one(recorder, name, func, input, dim, index)
    if known.kind not in ("input", "buffer"):
        recorder.refuse(name, "its indices depend on activations, so the network has no single graph")
    x = recorder.as_units(input)
    dim %= x.labels.dim()
    if x.batch == dim:
        recorder.wrong_batch(name)
    shape = index.shape
    part = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(shape))
    labels = pooled_labels(recorder, x.labels, (dim,), lambda t: t.amax(dim, keepdim=True))[part]

    def squared(h: Tensor) -> Tensor:
        return h.sum(dim, keepdim=True)[part].expand(shape)

    out = recorder.emit(squared, [x], labels.expand(shape), name=name, dtype=input.dtype, batch=x.batch)
    return recorder.note_unit(out)


_PICK = "Pick one element of every example, x[torch.arange(len(x)), places], or use gather"
_MASK = "Multiply by the mask, or use torch.where, which leave the shape as it is"

RULES: dict[str, Callable[..., Any]] = {"__getitem__": getitem, "gather": gather}
