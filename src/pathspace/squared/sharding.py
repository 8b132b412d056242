"""Tensors that are sharded over processes along their first dimension (DTensor): the local shard and the full tensor.

Under FSDP a process keeps a few rows of every weight. Element-wise work is done on these rows. Sums
over paths need full weights. They are gathered one after the other while the squared network runs,
and again for the backward pass, so that only a few of them are in memory at a time. Each function
is the identity for a tensor that is not sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pathspace.torch_private import storage_id


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is sharded over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def to_local(tensor: Any) -> Tensor:
    """Return the rows of a tensor that are in this process, in the tensor's own memory."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def full_tensor(tensor: Any) -> Any:
    """Gather a sharded tensor (a collective call); return anything else unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_shard(full: Tensor, like: Any) -> Tensor:
    """Return the rows of a full tensor that this process holds of ``like``."""
    if not is_sharded(like):
        return full
    mesh = like.device_mesh
    rows = like.shape[0]
    # every process but the last ones has ceil(rows / processes) rows
    start = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return full.narrow(0, start, to_local(like).shape[0])


def local_rows(factor: Tensor, like: Any) -> Tensor:
    """Return the :func:`local_shard` of a factor with a row for each of ``like``; one row for all stays."""
    return factor if factor.shape[0] == 1 else local_shard(factor, like)


def local_factor(factor: Tensor, like: Any) -> Tensor:
    """Return the :func:`local_shard` of a factor that broadcasts to the full ``like``."""
    has_rows = factor.dim() > 0 and factor.dim() >= like.dim()
    return local_rows(factor, like) if has_rows else factor


def from_local(values: Tensor, like: Any) -> Any:
    """Return the tensor, sharded like ``like``, whose local shard these values are."""
    if not is_sharded(like) or is_sharded(values):
        return values
    return _from_rows(values, like, like.shape, like.stride())


def rows_from_local(values: Any, like: Any) -> Any:
    """Return the tensor, sharded like ``like``, whose local rows these are; return a number unchanged.

    It has as many rows as ``like``, of any shape.
    """
    if not is_sharded(like) or not isinstance(values, Tensor) or not values.dim():
        return values
    shape = torch.Size([like.shape[0], *values.shape[1:]])
    return _from_rows(values, like, shape, torch.empty(shape, device="meta").stride())


def _from_rows(rows: Tensor, like: Any, shape: torch.Size, stride: tuple[int, ...]) -> Any:
    """Return the tensor of some shape, sharded like ``like``, whose local rows these are."""
    return dtensor_class().from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def shard_rows(value: Any, like: Any) -> Any:
    """Shard a full tensor along dim 0 like ``like``; return anything else unchanged."""
    is_full = isinstance(value, Tensor) and value.dim() > 0 and not is_sharded(value)
    if not is_sharded(like) or not is_full:
        return value
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    rows = distribute(value, like.device_mesh, like.placements, src_data_rank=None)
    # the rows are a view of the full tensor
    return rows.clone()


def dtensor_class() -> Any:
    """Return the class of sharded tensors."""
    return sys.modules["torch.distributed.tensor"].DTensor


def totals(numbers: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Sum numbers over all processes.

    Args:
        numbers: a number for the local shard of each tensor, ``[n]``.
        tensors: the n tensors; the number of one that is not sharded counts once.
    """
    tensors = list(tensors)
    like = first_sharded(tensors)
    if like is None:
        return numbers
    if like.device_mesh.get_local_rank():
        numbers = numbers * numbers.new_tensor([is_sharded(t) for t in tensors])
    return _of_all_processes(numbers, like).sum(0)


def any_process(flag: bool, like: Any) -> bool:
    """Return whether a flag is set in any of the processes that have shards of a tensor."""
    return bool(totals(torch.tensor([float(flag)], device=to_local(like).device), [like]).sum())


def extremes(numbers: Tensor, like: Tensor | None) -> Tensor:
    """Return the smallest and the largest over all processes, ``[n, 2]``.

    Args:
        numbers: the smallest and the largest in this process, ``[n, 2]``.
        like: a tensor that is sharded over the processes; None if there is none.
    """
    if like is None:
        return numbers
    every = _of_all_processes(numbers, like)
    return torch.stack([every[..., 0].amin(0), every[..., 1].amax(0)], -1)


def _of_all_processes(numbers: Tensor, like: Any) -> Tensor:
    """Return the numbers of every process, one row each."""
    placements = like.placements
    rows = dtensor_class().from_local(numbers[None], like.device_mesh, placements, run_check=False)
    return rows.full_tensor()


class Gathering:
    """Gathers sharded weights without saving them for backward, and gathers them again when needed.

    Enter it as a context around the computation.
    """

    def __init__(self) -> None:
        # by the address of a gathered tensor's storage: that storage, and the sharded tensor
        self._sources: dict[int, tuple[StorageWeakRef, Any]] = {}
        # of the backward pass, where a recurrence asks for one weight many times
        self._last: tuple[Any, Tensor] | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def full(self, tensor: Any) -> Tensor:
        """Return the full tensor, differentiable with respect to its shards."""
        if not is_sharded(tensor):
            return tensor
        result = tensor.full_tensor()
        # the weak reference keeps the address from being used again
        storage = StorageWeakRef(result.untyped_storage())
        self._sources[storage.cdata] = storage, tensor.detach()
        return result

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, saved: Tensor) -> Any:
        """Save a view of a gathered tensor as the sharded tensor and the view's geometry."""
        if is_sharded(saved):
            return saved
        source = self._sources.get(storage_id(saved))
        if source is None:
            return saved
        return source[1], saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor; gather it again if it was a view of a gathered one."""
        if isinstance(saved, Tensor):
            return saved
        sharded, *geometry = saved
        if self._last is None or self._last[0] is not sharded:
            # free the one before, so that two are never in memory
            self._last = None
            with torch.no_grad():
                self._last = sharded, sharded.full_tensor()
        return self._last[1].as_strided(*geometry)


def first_sharded(tensors: Iterable[Tensor]) -> Any:
    """Return the first tensor that is sharded; None if none is."""
    return next(filter(is_sharded, tensors), None)


def layout_refused(tensor: Any, shape: Sequence[int]) -> str:
    """Return why the layout of a sharded tensor is not supported; an empty string if it is."""
    mesh = tensor.device_mesh
    placements = tensor.placements
    if mesh.ndim != 1:
        return (
            f"over a mesh of {mesh.ndim} dimensions (hybrid sharding, or FSDP with tensor parallelism): "
            "FSDP's fully_shard over a mesh of one dimension is followed"
        )
    if not placements[0].is_shard(0):
        return (
            f"as {placements[0]}: FSDP's fully_shard along the first dimension, Shard(0), is followed (no "
            "shard_placement_fn, no tensor parallelism)"
        )
    if tuple(tensor.shape) != tuple(shape):
        return f"with shape {tuple(tensor.shape)}, where {tuple(shape)} was traced: trace the model as it is trained"
    return ""
