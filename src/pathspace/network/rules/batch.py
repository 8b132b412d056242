"""Follow the batch dimension through operations that move values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.examples import along
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value

_RESHAPED = frozenset(["view", "reshape", "flatten", "unflatten"])
_TURNED = frozenset(
    [
        "transpose",
        "swapaxes",
        "swapdims",
        "t",
        "T.__get__",
        "mT.__get__",
        "movedim",
        "moveaxis",
        "permute",
        "unsqueeze",
    ]
)
"""Movements after which dimensions stand in another order, whatever their sizes are."""
_IN_PLACE = frozenset(
    [
        "contiguous",
        "clone",
        "flip",
        "roll",
        "unfold",
        "pixel_shuffle",
        "pixel_unshuffle",
        "interpolate",
        "upsample",
    ]
)
"""Movements that leave the batch in its dimension."""
_ALONG_ONE = frozenset(
    ["unbind", "select", "split", "chunk", "tensor_split", "narrow", "index_select"]
)
"""Movements along one dimension, which must not be that of the batch."""
_REORDERED = _RESHAPED | {"flip", "roll", "rot90"}
"""Movements after which it takes a look at the examples to know where they are."""


def examples_after(
    recorder: Recorder,
    value: Value,
    move: Callable[[Tensor], Tensor],
    after: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int | None, Tensor | None]:
    """Return the batch dimension after a movement, and the pattern of the examples in it.

    ``move`` moves a tensor of the value's shape, and ``after`` is the shape that it gets.
    """
    examples = recorder.examples
    examples.moved.append((recorder.name, recorder.path, after))
    if value.batch is None:
        return None, None
    if examples.count == 1:
        return _batch_of_one(recorder, value, move, after, args, kwargs), None
    certain = value.examples is not None or value.shape[value.batch] == examples.count
    if value.examples is None and not (certain and recorder.name in _REORDERED):
        batch = batch_after(recorder, value, move, after, args, kwargs)
        if batch is not None or not certain:
            return batch, None
    return _examples_moved(recorder, value, move, after)


def _examples_moved(
    recorder: Recorder, value: Value, move: Callable[[Tensor], Tensor], after: torch.Size
) -> tuple[int | None, Tensor | None]:
    """Move the places of several examples; return their dimension and their pattern."""
    examples = recorder.examples
    places = examples.places(value)
    if places is None:
        return None, None
    single = examples.single()
    if 0 in after:
        return _examples_of_nothing(value, after, single)
    result = along(move(places))
    if result is None:
        return recorder.mixes()
    dim, pattern = result
    # the dimension in which they lie now has to be the one that grows with the batch
    if single is None or len(single) != len(after):
        return dim, examples.pattern(pattern)
    if after[dim] != examples.count * single[dim]:
        return recorder.mixes()
    return dim, examples.pattern(pattern)


def _examples_of_nothing(
    value: Value, after: torch.Size, single: torch.Size | None
) -> tuple[int | None, Tensor | None]:
    """Return where the examples would be in a tensor without elements: the dimension that grew with the batch."""
    if single is None or len(single) != len(after):
        return None, None
    grown = [d for d, n in enumerate(after) if n != single[d]]
    if len(grown) != 1:
        return None, None
    fits = value.examples is not None and len(value.examples) == after[grown[0]]
    return grown[0], value.examples if fits else None


def _batch_of_one(
    recorder: Recorder,
    value: Value,
    move: Callable[[Tensor], Tensor],
    after: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int | None:
    """Return the batch dimension after a movement of a single example, and note whether it is doubtful."""
    examples = recorder.examples
    assert value.batch is not None
    batch = batch_after(recorder, value, move, after, args, kwargs)
    doubtful = batch is None
    if batch is not None and recorder.name in _REORDERED:
        doubtful = after[: batch + 1] != value.shape[: value.batch + 1]
        # which of two dimensions of size 1 is left?
        doubtful |= value.shape[value.batch + 1 :][:1] == (1,) and after != value.shape
    examples.doubtful |= doubtful
    return None if doubtful and not examples.guessing else batch


def batch_after(
    recorder: Recorder,
    value: Value,
    move: Callable[[Tensor], Tensor],
    after: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int | None:
    """Return the batch dimension after a movement, or None if it is not known."""
    batch = value.batch
    if batch is None:
        return None
    n = len(value.shape)
    name = recorder.name
    if name in _IN_PLACE:
        return batch
    if name == "__getitem__":
        return _batch_after_getitem(recorder, batch, n, args[0])
    if name in _RESHAPED:
        return _batch_after_reshape(math.prod(value.shape[:batch]), after)
    if name in _TURNED:
        marked = torch.empty([1 + (d == batch) for d in range(n)], device="meta")
        return list(move(marked).shape).index(2)
    if name == "squeeze":
        return _batch_after_squeeze(
            value.shape, batch, kwargs["dim"] if "dim" in kwargs else args[0]
        )
    if name in _ALONG_ONE:
        return _batch_after_one(recorder, batch, n, args, kwargs)
    if name == "rot90":
        return _batch_after_rotation(recorder, batch, n, args, kwargs)
    if name in ("expand", "broadcast_to"):
        return batch + len(after) - n
    return None


def _batch_after_one(
    recorder: Recorder, batch: int, n: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Return the batch dimension after a movement along one other dimension of n."""
    name = recorder.name
    position = 1 if name in ("split", "chunk", "tensor_split") else 0
    dim = kwargs.get("dim", args[position] if len(args) > position else 0) % n
    if dim == batch:
        recorder.wrong_batch()
    return batch - (dim < batch) if name in ("unbind", "select") else batch


def _batch_after_rotation(
    recorder: Recorder, batch: int, n: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Return the batch dimension after ``rot90`` of two other dimensions of n."""
    dims = kwargs.get("dims", args[1] if len(args) > 1 else (0, 1))
    if batch in [d % n for d in dims]:
        recorder.wrong_batch()
    return batch


def _batch_after_squeeze(before: torch.Size, batch: int, dim: int | tuple[int, ...]) -> int | None:
    dims = dim if isinstance(dim, tuple) else (dim,)
    gone = {d % len(before) for d in dims if before[d % len(before)] == 1}
    return None if batch in gone else batch - sum(d < batch for d in gone)


def _batch_after_reshape(lead: int, after: torch.Size) -> int | None:
    """Return the dimension of size 1 that has ``lead`` elements in front of it."""
    running = 1
    for d, size in enumerate(after):
        if running == lead:
            return d if size == 1 else None  # size > 1: the batch was merged with what follows it
        running *= size
    return None


def _batch_after_getitem(recorder: Recorder, batch: int, n: int, index: Any) -> int | None:
    """Return the batch dimension of ``x[index]``, x of n dimensions; None if an index is a tensor or a list."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (Tensor, list)) for item in items):
        return None
    old = 0
    new = 0
    for item in _without_ellipsis(items, n):
        if item is None:
            new += 1
            continue
        if old == batch:
            whole = isinstance(item, slice) and item == slice(None)
            return new if whole else recorder.wrong_batch("indexing")
        old += 1
        new += isinstance(item, slice)
    return new + batch - old


def _without_ellipsis(items: Sequence[Any], n: int) -> list[Any]:
    """Return the items of an index of n dimensions, with ``:`` for each dimension that an ellipsis stands for."""
    indexed = sum(item is not None and item is not Ellipsis for item in items)
    result = []
    for item in items:
        result += [slice(None)] * (n - indexed) if item is Ellipsis else [item]
    return result
