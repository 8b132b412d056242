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
        name = parameter.name
        shape = self.shapes[name]
        column = _dimension_of(parameter.labels, target_dim, shape)
        target = self.scales.resolve(target)
        source = self.scales.resolve(source)
        index = parameter.labels
        order = _as_it_is(index, shape)
        if order is not None:  # as x @ W has it: turned back, its labels stay compact
            index = _permuted(index, order)
            target = _permuted(target, order)
            source = _permuted(source, order)
        uses = self.of.setdefault(name, [])
        same = next((old for old in uses if _same_index(old.index, index)), None)
        if same is None:
            new = ParameterUse(index, target, source, column, bias)
            self._compare(name, new)
            uses.append(new)
            return
        # what was read on zeros could not be compared with other views until now
        compare = len(uses) > 1 and (_has_wild(same.target) or _has_wild(same.source))
        self._tie(same, target, source, column)
        same.bias = same.bias or bias
        if compare:
            self._compare(name, same)

    def _compare(self, name: str, new: ParameterUse) -> None:
        """Tie a use of a parameter with the uses of other views where they overlap."""
        size = math.prod(self.shapes[name])
        if not self.is_whole(new, name):
            self._tie_repeats(new, size)
        for old in self.of[name]:
            if old is new:
                continue
            in_place = replace(
                old,
                target=_scattered(size, old.index, old.target),
                source=_scattered(size, old.index, old.source),
            )
            target = _scattered(size, new.index, new.target)
            source = _scattered(size, new.index, new.source)
            self._tie(in_place, target, source, new.column)

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
        order = _as_it_is(index, shape)
        if order is not None:
            index = _permuted(index, order)
        for old in self.of.get(parameter.name, []):
            if old.column != column or not _same_index(old.index, index):
                continue
            earlier = self.scales.resolve(old.source).flatten()
            wanted = self.scales.resolve(source).flatten()
            if earlier.numel() == wanted.numel() and bool((earlier == wanted).all()):
                return self.scales.resolve(old.target).reshape(-1)
        return None

    def _tie(self, old: ParameterUse, target: Tensor, source: Tensor, column: int | None) -> None:
        """Equate the ends of two uses; they are inverse if the uses run along different dimensions."""
        if old.column != column:
            target, source = _inverse(source), _inverse(target)
        old.target = self.scales.unify(old.target, target)
        old.source = self.scales.unify(old.source, source)


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
    if not index.is_meta or index.dim() != len(shape):
        return None
    if index.shape == shape and index.is_contiguous():
        return None
    order = sorted(range(index.dim()), key=lambda d: (-index.stride(d), -index.shape[d]))
    turned = index.permute(order)
    return order if turned.shape == shape and turned.is_contiguous() else None


def _permuted(labels: Tensor, order: Sequence[int]) -> Tensor:
    """Broadcast labels to a view and permute its dimensions."""
    return labels.reshape(*[1] * (len(order) - labels.dim()), *labels.shape).permute(*order)


def _same_index(a: Tensor, b: Tensor) -> bool:
    """Return whether two views show the same elements in the same places."""
    if a is b:
        return True
    if a.shape != b.shape:
        return False
    if not (a.is_meta and b.is_meta):
        return torch.equal(written_out(a), written_out(b))
    if a.storage_offset() != b.storage_offset():
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(of_a == of_b for size, of_a, of_b in strides if size > 1)


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


def _has_wild(labels: Tensor) -> bool:
    return bool((labels == WILD).any())


def _scattered(size: int, index: Tensor, labels: Tensor) -> Tensor:
    """Return labels at their places in the parameter, free elsewhere."""
    flat = torch.full((size,), WILD)
    flat[written_out(index).reshape(-1)] = labels.expand(index.shape).reshape(-1)
    return flat
