"""Dimensions of tensors as axes, of which some must run over the same units in the same order.

A dimension of a tensor is a list of segments, one after the other; a segment is a product of axes,
the last one running fastest. So the 768 features of twelve heads of 64 are one segment of two axes,
and what ``cat`` makes of two layers is two segments. Axes are found to be equal
(:meth:`Axes.unify`), or to be products or sums of others, as operations are read; an axis is
*fixed* as soon as an operation treats its places differently.

Letters: n the size of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor


class Axis:
    """Some units in some order.

    Attributes:
        size: how many.
        fixed: whether their order matters to an operation.
        parts: the axes that it turned out to be made of, as a product or one after the other; None
            so far.
        kind: which of both.
        divided: whether it is a factor of another one, as a reshape may have made it of sizes that
            happen to fit.
    """

    __slots__ = ("_parent", "divided", "fixed", "kind", "parts", "size")

    def __init__(self, size: int, *, fixed: bool = False) -> None:
        self.size = size
        self.fixed = fixed
        self.parts: tuple[Axis, ...] | None = None
        self.kind: Literal["product", "sum"] = "product"
        self.divided = False
        self._parent: Axis | None = None

    @property
    def root(self) -> Axis:
        """The axis that stands for all that are equal to it."""
        axis = self
        while axis._parent is not None:
            axis = axis._parent
        return axis

    def fix(self) -> None:
        """Note that the order matters."""
        root = self.root
        root.fixed = True
        for part in root.parts or ():
            part.fix()

    def divide(self, kind: Literal["product", "sum"], sizes: Sequence[int]) -> tuple[Axis, ...]:
        """Make it of new axes."""
        root = self.root
        root.kind = kind
        root.parts = tuple(Axis(size, fixed=root.fixed) for size in sizes)
        for part in root.parts:
            part.divided = root.divided or kind == "product"
        return root.parts

    def equate(self, other: Axis) -> None:
        """Note that another axis of its size, neither of which has parts, is the same."""
        first = self.root
        second = other.root
        if first is not second:
            second._parent = first
            first.fixed |= second.fixed
            first.divided |= second.divided


Segment = tuple[Axis, ...]
Dim = tuple[Segment, ...]


def dim_of(size: int, *, fixed: bool = False) -> Dim:
    """Return a dimension of its own."""
    return ((Axis(size, fixed=fixed),),)


def length(segment: Segment) -> int:
    """Return how many elements a segment has."""
    return math.prod(axis.size for axis in segment)


def size_of(dim: Dim) -> int:
    """Return how many elements a dimension has."""
    return sum(map(length, dim))


def fix(dim: Dim) -> None:
    """Note that the order along a dimension matters."""
    for segment in dim:
        for axis in segment:
            axis.fix()


def resolved(dim: Dim) -> Dim:
    """Return a dimension in axes that have no parts, without those of size 1."""
    return tuple(part for segment in dim for part in _resolved_segment(segment))


def _resolved_segment(segment: Segment) -> list[Segment]:
    roots = [axis.root for axis in segment if axis.size != 1]
    for place, axis in enumerate(roots):
        if axis.parts is None:
            continue
        before = roots[:place]
        after = roots[place + 1 :]
        if axis.kind == "product":
            return _resolved_segment((*before, *axis.parts, *after))
        for one in before:  # which would run over pieces of several kinds
            one.fix()
        times = math.prod(one.size for one in before)
        return [
            s
            for _ in range(times)
            for part in axis.parts
            for s in _resolved_segment((part, *after))
        ]
    return [tuple(roots)]


def unify(one: Dim, other: Dim) -> None:
    """Note that two dimensions run over the same units in the same order; those of other sizes are fixed."""
    while True:
        first = resolved(one)
        second = resolved(other)
        place = _first_difference(first, second)
        if place is None:
            break
        if size_of(first) != size_of(second):
            fix(one)
            fix(other)
            return
        a = first[place]
        b = second[place]
        longer, size = (a, length(b)) if length(a) > length(b) else (b, length(a))
        if not _cut(longer, size):
            fix(one)
            fix(other)
            return
    for a, b in zip(first, second, strict=True):
        _unify_segments(a, b)


def _first_difference(first: Dim, second: Dim) -> int | None:
    """Return the first segment whose length is another one."""
    for k, (a, b) in enumerate(zip(first, second, strict=False)):
        if length(a) != length(b):
            return k
    return None if len(first) == len(second) else min(len(first), len(second))


def _cut(segment: Segment, size: int) -> bool:
    """Cut a segment after so many elements; returns False if that is not between two places of its first axis."""
    rest = length(segment[1:])
    if size % rest:
        return False
    first = size // rest
    segment[0].divide("sum", [first, segment[0].size - first])
    return True


def _unify_segments(one: Segment, other: Segment) -> None:
    """Equate the axes of two products of one length, from the last axes on; those that do not fit are fixed."""
    a = _factors(one)
    b = _factors(other)
    while a and b:
        p = a[-1]
        q = b[-1]
        divides = p.size % q.size == 0 or q.size % p.size == 0
        is_sum = p.parts is not None or q.parts is not None
        if is_sum or not divides:
            fix((tuple(a), tuple(b)))
            return
        if p.size > q.size:
            p.divide("product", [p.size // q.size, q.size])
        elif q.size > p.size:
            q.divide("product", [q.size // p.size, p.size])
        else:
            p.equate(q)
            a.pop()
            b.pop()
        # an axis that was divided may stand in both products
        a = _factors(a)
        b = _factors(b)


def _factors(axes: Iterable[Axis]) -> list[Axis]:
    """Return the factors of a product of axes, none of which is a product itself."""
    found: list[Axis] = []
    for axis in axes:
        root = axis.root
        if root.parts is not None and root.kind == "product":
            found += _factors(root.parts)
        else:
            found.append(root)
    return found


def piece(dim: Dim, start: int, size: int) -> Dim:
    """Return a part of a dimension, from an element on; it is fixed where no cut is possible."""
    for edge in (start, start + size):
        before = 0
        for segment in resolved(dim):
            if before < edge < before + length(segment):
                if not _cut(segment, edge - before):
                    fix(dim)
                    return dim_of(size, fixed=True)
                break
            before += length(segment)
    found = []
    before = 0
    for segment in resolved(dim):
        if start <= before and before + length(segment) <= start + size:
            found.append(segment)
        before += length(segment)
    return tuple(found)


def regrouped(dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """Return the dimensions of a view: the axes of all dimensions in their order, in groups of other sizes.

    A dimension of several segments, or of none that fits, is fixed where it does not stay as it is.
    """
    result: list[Dim] = []
    left = [resolved(dim) for dim in dims if size_of(dim) != 1]
    for size in sizes:
        if size == 1:
            result.append(dim_of(1))
            continue
        if left and size_of(left[0]) == size:
            result.append(left.pop(0))
            continue
        result.append(_taken(left, size))
    return result


def _taken(left: list[Dim], size: int) -> Dim:
    """Take so many elements from the first dimensions."""
    taken: list[Axis] = []
    wanted = size
    while wanted > 1 and left:
        first = resolved(left.pop(0))
        if len(first) != 1:
            fix(first)
            first = dim_of(size_of(first), fixed=True)
        axis = first[0][0]
        rest = first[0][1:]
        if wanted % axis.size == 0:
            taken.append(axis)
            wanted //= axis.size
        elif axis.size % wanted == 0:
            outer, inner = axis.divide("product", [wanted, axis.size // wanted])
            taken.append(outer)
            rest = (inner, *rest)
            wanted = 1
        else:  # neither divides the other
            return _all_fixed(left, first, taken, size)
        if rest:
            left.insert(0, (rest,))
    return (tuple(taken),)


def _all_fixed(left: list[Dim], first: Dim, taken: Sequence[Axis], size: int) -> Dim:
    """Give up: fix all that is left, which then has the elements that are not taken."""
    for dim in (first, (tuple(taken),), *left):
        fix(dim)
    total = math.prod(axis.size for axis in taken) * size_of(first) * math.prod(map(size_of, left))
    left[:] = [dim_of(total // size, fixed=True)] if total != size else []
    return dim_of(size, fixed=True)


def places_of(axis: Axis, dim: Dim) -> Tensor | None:
    """Return which elements of a dimension belong to each place of an axis, ``[n, elements]``; None if none does."""
    root = axis.root
    found = []
    before = 0
    for segment in resolved(dim):
        sizes = [one.size for one in segment]
        index = torch.arange(math.prod(sizes)).reshape(sizes) + before
        before += math.prod(sizes)
        positions = [k for k, one in enumerate(segment) if one.root is root]
        if len(positions) == 1:
            found.append(index.movedim(positions[0], 0).reshape(root.size, -1))
        elif positions:
            root.fix()
    return torch.cat(found, 1) if found else None
