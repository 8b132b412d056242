"""Tensors that are split over processes along their first dimension (DTensor): the part here, and the whole.

A process of FSDP keeps a few rows of every weight. What is done to elements is done to its part.
Sums over paths need whole weights, which are gathered one after the other while the squared network
runs, and gathered again for the way back, so that never more than a few of them are in memory. All
is the identity for a tensor that is not split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def is_split(tensor: Any) -> bool:
    """Return whether a tensor is split over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is in this process, in the tensor's own memory."""
    if not is_split(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def cut(whole: Tensor, like: Any) -> Tensor:
    """Return the rows of a whole tensor that are in this process where ``like`` is split."""
    if not is_split(like):
        return whole
    mesh, rows = like.device_mesh, like.shape[0]
    start = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return whole.narrow(0, start, local(like).shape[0])


def cut_rows(factor: Tensor, like: Any) -> Tensor:
    """:func:`cut` of a factor with a row for each of ``like``, or one for all."""
    return factor if factor.shape[0] == 1 else cut(factor, like)


def cut_factor(factor: Tensor, like: Any) -> Tensor:
    """:func:`cut` of what is broadcast to the whole of ``like``."""
    return factor if factor.dim() < like.dim() or not factor.dim() else cut_rows(factor, like)


def joined(values: Tensor, like: Any) -> Any:
    """Return the tensor, split as ``like`` is, whose part in this process these values are."""
    if not is_split(like) or is_split(values):
        return values
    return type_of_split().from_local(
        values,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def joined_rows(values: Any, like: Any) -> Any:
    """Return the tensor whose rows in this process these are, split as ``like`` is; a number as it is.

    It has as many rows as ``like``, of any shape.
    """
    if not is_split(like) or not isinstance(values, Tensor) or not values.dim():
        return values
    shape = torch.Size([like.shape[0], *values.shape[1:]])
    return type_of_split().from_local(
        values,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def whole(tensor: Any) -> Any:
    """Gather a sharded tensor (a collective call); return anything else unchanged."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def dealt(value: Any, like: Any) -> Any:
    """Return a whole tensor of any shape, its rows dealt out to the processes of ``like``; anything else as it is."""
    if not is_split(like) or is_split(value) or not isinstance(value, Tensor) or not value.dim():
        return value
    deal, mesh = sys.modules["torch.distributed.tensor"].distribute_tensor, like.device_mesh
    return deal(
        value, mesh, like.placements, src_data_rank=None
    ).clone()  # the rows are a view of the whole


def type_of_split() -> Any:
    """Return the class of tensors that are split."""
    return sys.modules["torch.distributed.tensor"].DTensor


def totals(numbers: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Sum over all processes.

    Args:
        numbers: one for the part of each tensor, shape ``[n]``.
        tensors: whose parts they are; those that are not split count once.
    """
    tensors = list(tensors)
    if (like := first_split(tensors)) is None:
        return numbers
    if like.device_mesh.get_local_rank():
        numbers = numbers * numbers.new_tensor([is_split(t) for t in tensors])
    return _of_all(numbers, like).sum(0)


def extremes(numbers: Tensor, like: Tensor | None) -> Tensor:
    """Return the smallest and the largest of all processes, ``[n, 2]`` like those of each."""
    if like is None:
        return numbers
    every = _of_all(numbers, like)
    return torch.stack([every[..., 0].amin(0), every[..., 1].amax(0)], -1)


def _of_all(numbers: Tensor, like: Any) -> Tensor:
    """Return the numbers of every process, one row each."""
    placements = like.placements
    split = type_of_split().from_local(numbers[None], like.device_mesh, placements, run_check=False)
    return split.full_tensor()


class Gathering:
    """Whole tensors of which autograd keeps none: they are gathered again where the way back needs them.

    A context for what is computed of them.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[StorageWeakRef, Any]] = {}  # of the memory of the whole
        self._last: tuple[Any, Tensor] | None = (
            None  # on the way back; a recurrence asks for one many times
        )
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def whole(self, tensor: Any) -> Tensor:
        """Return the whole of a tensor, differentiable in its parts."""
        if not is_split(tensor):
            return tensor
        result = tensor.full_tensor()
        # while it lives, no other memory has this name
        memory = StorageWeakRef(result.untyped_storage())
        self._parts[memory.cdata] = memory, tensor.detach()
        return result

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, saved: Tensor) -> Any:
        if is_split(saved):
            return saved
        entry = self._parts.get(saved.untyped_storage()._cdata)
        if entry is None:
            return saved
        return entry[1], saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor, *view = saved
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # before the next one is there
            with torch.no_grad():
                self._last = tensor, tensor.full_tensor()
        return self._last[1].as_strided(*view)


def first_split(tensors: Iterable[Tensor]) -> Any:
    """Return a tensor that is split; None if none is."""
    return next(filter(is_split, tensors), None)


def layout_refused(tensor: Any, shape: Sequence[int]) -> str:
    """Return why a tensor that is split cannot be followed, if it cannot; else nothing."""
    mesh, placements = tensor.device_mesh, tensor.placements
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
