"""The edges that the elements of each parameter are, and the constraints on scales from several uses of a parameter.

The labels of a (view of a) parameter hold the flat index of every element. As long as the model
only takes views, strides and offset encode the index, on the meta device, without memory.
Operations that copy elements (``cat``, indices, ``flip``) copy an explicit index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.trace.scales import WILD, Scales
from pathspace.network.trace.values import Value


@dataclass
class ParameterUse:
    """One use of (a view of) a parameter as edges: their target and source scales."""

    # flat index in the parameter of every element used, on the meta device where strides tell it
    index: Tensor
    target: Tensor  # labels, broadcastable to index.shape
    source: Tensor
    # dimension of the parameter along which the target varies; None if that means nothing
    column: int | None
    bias: bool  # its edges come from the bias node


class ParameterUses:
    """All uses of all parameters seen so far."""

    def __init__(self, scales: Scales) -> None:
        self.scales = scales
        self.of: dict[str, list[ParameterUse]] = {}
        self.shapes: dict[str, torch.Size] = {}

    def is_whole(self, use: ParameterUse, name: str) -> bool:
        """Return whether a use is of the whole parameter, every element once and in its place."""
        return _same_index(use.index, index_of(self.shapes[name]))

    def add(
        self,
        parameter: Value,
        target: Tensor,
        source: Tensor,
        target_dim: int | None = None,
        *,
        bias: bool = False,
    ) -> None:
        """Record that elements of a parameter are edges from ``source`` to ``target`` scales.

        A tied parameter has one rescaling factor s_target / s_source, whichever of its uses is
        looked at. Two uses with the target along the same dimension get equal targets and equal
        sources; a parameter used both ways round (tied input and output embeddings) gets target' =
        1/source and source' = 1/target.
        """
        shape = self.shapes[parameter.name]
        column = _dimension_of(parameter.labels, target_dim, shape)
        target = self.scales.resolve(target)
        source = self.scales.resolve(source)
        index = parameter.labels
        # as x @ W has it: turned back, its labels stay compact
        if (order := _as_it_is(index, shape)) is not None:
            index, target, source = (_permuted(t, order) for t in (index, target, source))
        new = ParameterUse(index, target, source, column, bias)
        uses = self.of.setdefault(parameter.name, [])
        same = next((old for old in uses if _same_index(old.index, new.index)), None)
        if same is not None:
            # what was read on zeros could not be compared with other views until now
            compare = len(uses) > 1 and any(
                bool((ends == WILD).any()) for ends in (same.target, same.source)
            )
            self._tie(same, new.target, new.source, new.column)
            same.bias = same.bias or bias
            if not compare:
                return
            new = same
        size = math.prod(self.shapes[parameter.name])
        if not self.is_whole(new, parameter.name):
            self._tie_repeats(new, size)
        for old in uses:  # another view of the same parameter: compare where they overlap
            if old is not new:
                places = [_scatter(size, use.index, use.target, use.source) for use in (old, new)]
                (t_old, s_old), (t_new, s_new) = places
                self._tie(replace(old, target=t_old, source=s_old), t_new, s_new, new.column)
        if same is None:
            uses.append(new)

    def _tie_repeats(self, use: ParameterUse, size: int) -> None:
        """Give an element that a view shows several times (repeat, expand, indexing) one target and one source."""
        flat = written_out(use.index).reshape(-1)
        if flat.numel() == 0 or int(torch.bincount(flat, minlength=size).max()) < 2:
            return
        for labels in (use.target, use.source):
            wide = labels.expand(use.index.shape).reshape(-1)
            one_of_them = torch.full((size,), WILD)
            one_of_them[flat] = self.scales.resolve(wide)
            self.scales.unify(wide, one_of_them[flat])

    def earlier_target(self, parameter: Value, source: Tensor) -> Tensor | None:
        """Return the target labels of an earlier use of the matrix on units of the same scales, if there was one.

        It lets a loop of many steps find its labels at once instead of making and merging new ones
        at every step.
        """
        shape = self.shapes[parameter.name]
        index = parameter.labels
        column = _dimension_of(index, 0, shape)
        if (order := _as_it_is(index, shape)) is not None:
            index = _permuted(index, order)
        for old in self.of.get(parameter.name, []):
            if old.column == column and _same_index(old.index, index):
                earlier = self.scales.resolve(old.source)
                wanted = self.scales.resolve(source)
                if earlier.numel() == wanted.numel() and bool(
                    (earlier.flatten() == wanted.flatten()).all()
                ):
                    return self.scales.resolve(old.target).reshape(-1)
        return None

    def _tie(self, old: ParameterUse, target: Tensor, source: Tensor, column: int | None) -> None:
        unify = self.scales.unify
        if old.column == column:
            old.target, old.source = unify(old.target, target), unify(old.source, source)
        else:
            old.target, old.source = (
                unify(old.target, _inverse(source)),
                unify(old.source, _inverse(target)),
            )


def index_of(shape: torch.Size) -> Tensor:
    """Return the flat index of every element of a parameter, encoded by strides."""
    return torch.empty(shape, dtype=torch.long, device="meta")


def moved_index(function: Callable[[Tensor], Any], index: Tensor) -> Any:
    """Apply a movement of the elements of a parameter to their index."""
    with suppress(RuntimeError, NotImplementedError):
        moved = function(index)
        memory = index.untyped_storage()._cdata
        if all(t.untyped_storage()._cdata == memory for t in pytree.tree_leaves(moved)):
            return moved
    return function(written_out(index))


def written_out(index: Tensor) -> Tensor:
    """Return an index with explicit values."""
    if not index.is_meta:
        return index
    result = torch.tensor(index.storage_offset())
    for size, stride in zip(index.shape, index.stride(), strict=True):
        result = result[..., None] + stride * torch.arange(size)
    return result


def repeats(index: Tensor, dim: int) -> bool:
    """Return whether a view repeats the same elements along a dimension."""
    if index.is_meta:
        return index.stride(dim) == 0
    return bool((index == index.narrow(dim, 0, 1)).all())


def _as_it_is(index: Tensor, shape: torch.Size) -> list[int] | None:
    """Return the permutation that makes a view the whole parameter again; None if none exists, or none is needed."""
    if (
        not index.is_meta
        or index.dim() != len(shape)
        or (index.shape == shape and index.is_contiguous())
    ):
        return None
    order = sorted(range(index.dim()), key=lambda d: (-index.stride(d), -index.shape[d]))
    turned = index.permute(order)
    return order if turned.shape == shape and turned.is_contiguous() else None


def _permuted(labels: Tensor, order: Sequence[int]) -> Tensor:
    """Broadcast labels to a view and permute its dimensions."""
    return labels.reshape(*[1] * (len(order) - labels.dim()), *labels.shape).permute(*order)


def _same_index(a: Tensor, b: Tensor) -> bool:
    if a is b or a.shape != b.shape:
        return a is b
    if not (a.is_meta and b.is_meta):
        return torch.equal(written_out(a), written_out(b))
    steps = [
        tuple(step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in (a, b)
    ]
    return a.storage_offset() == b.storage_offset() and steps[0] == steps[1]


def _inverse(labels: Tensor) -> Tensor:
    return torch.where(labels == WILD, labels, -labels)


def _dimension_of(index: Tensor, dim: int | None, shape: torch.Size) -> int | None:
    """Return the dimension of the parameter along which dimension ``dim`` of a view runs."""
    if dim is None or len(shape) < 2:
        return None
    dim %= index.dim()
    if index.shape[dim] < 2:  # one row: nothing varies; take the view as untransposed
        return dim if index.shape == shape else None
    step = index.stride(dim)
    if not index.is_meta:
        step = int((index.select(dim, 1) - index.select(dim, 0)).flatten()[0])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return next((d for d, stride in enumerate(strides) if step >= stride), None)


def _scatter(size: int, index: Tensor, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    result = []
    for labels in (target, source):
        flat = torch.full((size,), WILD)
        flat[written_out(index).reshape(-1)] = labels.expand(index.shape).reshape(-1)
        result.append(flat)
    return result[0], result[1]
