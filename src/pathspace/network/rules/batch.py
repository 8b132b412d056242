"""Where the dimension that holds the batch goes when values are moved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value


def batch_after(
    recorder: Recorder,
    name: str,
    value: Value,
    after: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int | None:
    """Where the batch dimension is after a movement; None where that is not known."""
    batch, before = value.batch, value.shape
    if batch is None:
        return None
    n = len(before)
    arguments = [kwargs[k] for k in ("dim", "dim0", "dim1", "dims", "shape") if k in kwargs]
    arguments = [*args, *arguments]
    if name in (
        "contiguous",
        "clone",
        "flip",
        "roll",
        "unfold",
        "pixel_shuffle",
        "pixel_unshuffle",
        "interpolate",
        "upsample",
    ):
        return batch
    if name in ("transpose", "swapaxes", "swapdims", "t", "T.__get__", "mT.__get__"):
        if name == "T.__get__":
            return n - 1 - batch
        a, b = (arguments[0] % n, arguments[1] % n) if len(arguments) > 1 else (n - 2, n - 1)
        return {a: b, b: a}.get(batch, batch)
    if name == "permute":
        dims = arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments
        return [d % n for d in dims].index(batch)
    if name == "unsqueeze":
        return batch + (arguments[0] % (n + 1) <= batch)
    if name == "squeeze":
        dims = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
        gone = {d % n for d in dims if before[d % n] == 1}
        return None if batch in gone else batch - sum(d < batch for d in gone)
    if name in ("unbind", "select", "split", "chunk", "tensor_split", "narrow", "index_select"):
        position = 1 if name in ("split", "chunk", "tensor_split") else 0
        dim = kwargs.get("dim", args[position] if len(args) > position else 0) % n
        if dim == batch:
            recorder.wrong_batch(name)
        return batch - (dim < batch) if name in ("unbind", "select") else batch
    if name == "__getitem__":
        return _batch_after_getitem(recorder, batch, n, args[0])
    if name in ("view", "reshape", "flatten", "unflatten"):
        lead = math.prod(before[:batch])
        running = 1
        for d, size in enumerate(after):
            if running == lead:
                return d if size == 1 else None  # size > 1: the batch was merged with what follows it
            running *= size
        return None
    if name == "rot90":
        dims = kwargs.get("dims", args[1] if len(args) > 1 else (0, 1))
        return recorder.wrong_batch(name) if batch in [d % n for d in dims] else batch
    if name in ("expand", "broadcast_to"):
        return batch + len(after) - n
    return None


def _batch_after_getitem(recorder: Recorder, batch: int, n: int, index: Any) -> int | None:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, (Tensor, list)) for i in index):
        return None
    given = sum(i is not None and i is not Ellipsis for i in index)
    old = new = 0
    for item in index:
        if item is None:
            new += 1
        elif item is Ellipsis:
            skip = n - given
            if old <= batch < old + skip:
                return new + batch - old
            old, new = old + skip, new + skip
        else:
            whole = isinstance(item, slice) and item == slice(None)
            if old == batch:
                return new if whole else recorder.wrong_batch("indexing")
            old, new = old + 1, new + isinstance(item, slice)
    return new + batch - old
