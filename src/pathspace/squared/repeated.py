"""Values of the squared network that are alike at most positions in space, and windows that slide over them.

Ones enter a network, so a convolution without padding makes the same of them everywhere, and one with padding the same
everywhere but near the borders; its gradients are alike in the same way. Along each axis positions fall into classes,
and windows that read positions of the same classes hold the same: one of them is computed, and counted as often as it
occurs. Which classes there are depends on sizes alone, so the tables are made once.

Letters: C channels, M classes of positions, n classes of windows, t taps of a window.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_FEW = 2  # so many positions must there be for each class


@dataclass(frozen=True, eq=False)
class Axis:
    """Classes of positions along an axis; equal ones are one object (see :func:`axis`), so tables are found by it.

    Attributes:
        classes: of each position, counted from zero.
        count: how many there are.
        often: how many positions are of each.
    """

    classes: tuple[int, ...]
    count: int
    often: tuple[int, ...]


@lru_cache(maxsize=1024)
def axis(classes: tuple[int, ...]) -> Axis:
    """The axis with these classes."""
    met = Counter(classes)
    return Axis(classes, len(met), tuple(met[c] for c in range(len(met))))


@lru_cache(maxsize=1024)
def _alike(size: int) -> Axis:
    return axis((0,) * size)


@lru_cache(maxsize=1024)
def _different(size: int) -> Axis:
    return axis(tuple(range(size)))


@dataclass(frozen=True)
class Repeated:
    """A tensor ``[*lead, C, *space]`` of one example, with one value for each class of positions.

    Attributes:
        values: ``[C, M]``, M the product of the numbers of classes.
        axes: the classes along each axis of space.
        lead: dimensions of size one before the others.
    """

    values: Tensor
    axes: tuple[Axis, ...]
    lead: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """The tensor's."""
        return torch.Size((*self.lead, len(self.values), *(len(own.classes) for own in self.axes)))

    def dense(self) -> Tensor:
        """The tensor."""
        result = self.values.reshape(*self.lead, len(self.values), *(own.count for own in self.axes))
        for d, own in enumerate(self.axes, -len(self.axes)):
            result = result.index_select(d, _index(own, result.device))
        return result

    def total(self) -> Tensor:
        """The sum over space, ``[C]``."""
        return torch.mv(self.values, often(self.axes, self.values.dtype, self.values.device))


def spread(value: Tensor | Repeated) -> Tensor:
    """All of a value, for those who want a tensor."""
    return value.dense() if isinstance(value, Repeated) else value


def repeated(value: Tensor | Repeated, space: int) -> Repeated | None:
    """A value with one number for each class, if it is known to be alike along an axis of space; for one example."""
    if isinstance(value, Repeated):
        return value
    if value.dim() < space + 1 or 0 not in value.stride()[-space:]:
        return None
    shape, stride = value.shape[-space - 1 :], value.stride()[-space:]
    if value.numel() != shape.numel() or not value.numel():
        return None
    axes, few = [], value
    for d, (size, step) in enumerate(zip(shape[1:], stride, strict=True), -space):
        few = few.narrow(d, 0, 1) if step == 0 else few
        axes.append(_alike(size) if step == 0 else _different(size))
    return Repeated(few.reshape(shape[0], -1), tuple(axes), tuple(value.shape[: -space - 1]))


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows that slide over space: position o s - p + t d is read by tap t of window o, if there is one.

    Attributes:
        size: how many positions there are, along each axis.
        out: how many windows.
        kernel: how many taps.
        stride: s.
        padding: p.
        dilation: d.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def read(self, d: int) -> list[list[int]]:
        """The positions along an axis that each window reads, by tap; -1 for none."""
        first = [o * self.stride[d] - self.padding[d] for o in range(self.out[d])]
        taps = [t * self.dilation[d] for t in range(self.kernel[d])]
        return [[i + t if 0 <= i + t < self.size[d] else -1 for t in taps] for i in first]

    def read_by(self, d: int) -> list[list[int]]:
        """The windows that read each position along an axis, by tap; -1 for none."""
        result = [[-1] * self.kernel[d] for _ in range(self.size[d])]
        for o, positions in enumerate(self.read(d)):
            for t, i in enumerate(positions):
                if i >= 0:
                    result[i][t] = o
        return result


@dataclass(frozen=True)
class Gather:
    """What windows take from values ``[C, M]``.

    Attributes:
        index: ``[t * n]`` columns; the last of them stands for zero, if ``padded``.
        taps: t.
        padded: whether some window takes less than others.
        axes: the classes of the windows.
        beside: ``[n]`` columns of what the windows meet at their own place.
    """

    index: Tensor
    taps: int
    padded: bool
    axes: tuple[Axis, ...]
    beside: Tensor

    def take(self, values: Tensor) -> Tensor:
        """``[C, t * n]``, from values ``[C, M]``."""
        values = torch.constant_pad_nd(values, (0, 1)) if self.padded else values
        return values.index_select(1, self.index)

    def sum(self, values: Tensor) -> Tensor:
        """``[C, n]``, summed over taps."""
        taken = self.take(values)
        return taken if self.taps == 1 else taken.view(values.shape[0], self.taps, -1).sum(1)


@lru_cache(maxsize=1024)
def columns(
    windows: Windows, axes: tuple[Axis, ...], device: torch.device, beside: tuple[Axis, ...] | None = None
) -> Gather | None:
    """What windows read of values with these classes, tap by tap; None if too few are alike for that to pay.

    Args:
        windows: where they are.
        axes: classes of the values.
        device: for the tables.
        beside: classes of other values, one for each window, that the windows are to meet.
    """
    taken = [[[(0, i) for i in read] for read in windows.read(d)] for d in range(len(axes))]
    return _gather(taken, axes, device, beside)


@lru_cache(maxsize=1024)
def summed(windows: Windows, axes: tuple[Axis, ...], device: torch.device) -> Gather | None:
    """What windows sum; see :func:`columns`."""
    taken = [[[(0, i) for i in read] for read in windows.read(d)] for d in range(len(axes))]
    return _gather(_sorted(taken, axes), axes, device)


@lru_cache(maxsize=1024)
def summed_back(
    windows: Windows, axes: tuple[Axis, ...], device: torch.device, *, by_tap: bool = False
) -> Gather | None:
    """What positions sum over the windows that read them, from values of windows with these classes.

    Args:
        windows: where they are.
        axes: classes of the values.
        device: for the tables.
        by_tap: the values are ``[C, t M]``, others for each tap.
    """
    taken = [
        [[(by_tap * t, o) for t, o in enumerate(read)] for read in windows.read_by(d)]
        for d in range(len(axes))
    ]
    return _gather(_sorted(taken, axes), axes, device, kernel=windows.kernel if by_tap else None)


_Taken = list[list[list[tuple[int, int]]]]
"""Along each axis, (tap, position) of whatever each window takes; position -1 for nothing."""


def _sorted(taken: _Taken, axes: tuple[Axis, ...]) -> _Taken:
    """What windows take without the nothings, in the order of classes: their sums do not depend on it."""
    return [
        [
            sorted(((t, i) for t, i in window if i >= 0), key=lambda x: (x[0], own.classes[x[1]]))
            for window in each
        ]
        for each, own in zip(taken, axes, strict=True)
    ]


def _gather(
    taken: _Taken,
    axes: tuple[Axis, ...],
    device: torch.device,
    beside: tuple[Axis, ...] | None = None,
    kernel: tuple[int, ...] | None = None,
) -> Gather | None:
    at, tap, nothing = torch.zeros(3, 1, 1, dtype=torch.long, device="cpu")
    met, found = torch.zeros(1, dtype=torch.long, device="cpu"), []
    for d, values in enumerate(axes):
        other = _alike(len(taken[d])) if beside is None else beside[d]
        most = max(1, *(len(window) for window in taken[d]))
        known: dict[tuple[tuple[tuple[int, int], ...], int], int] = {}
        own = []
        for window, there in zip(taken[d], other.classes, strict=True):
            key = tuple((t, -1 if i < 0 else values.classes[i]) for t, i in window)
            key += ((0, -1),) * (most - len(key))
            own.append(known.setdefault((key, there), len(known)))
        found.append(axis(tuple(own)))
        taps, classes = torch.tensor([key for key, _ in known], device="cpu").permute(2, 1, 0)
        at = _product(at * values.count, classes.clamp(min=0))
        tap = _product(tap * (1 if kernel is None else kernel[d]), taps)
        nothing = _product(nothing, (classes < 0).long())
        meets = torch.tensor([there for _, there in known], device="cpu")
        met = (met[:, None] * other.count + meets).reshape(-1)
    if _FEW * at.shape[1] > math.prod(len(own.classes) for own in found):
        return None
    count = math.prod(own.count for own in axes)
    index = at + count * tap
    count *= 1 if kernel is None else math.prod(kernel)
    index = index.masked_fill(nothing > 0, count).reshape(-1).int()
    padded = bool(nothing.any())
    return Gather(index.to(device), at.shape[0], padded, tuple(found), met.int().to(device))


def _product(lead: Tensor, axis: Tensor) -> Tensor:
    """Sums of all pairs of rows and of all pairs of columns."""
    pairs = lead[:, None, :, None] + axis[None, :, None, :]
    return pairs.reshape(lead.shape[0] * axis.shape[0], -1)


@lru_cache(maxsize=1024)
def often(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """How many positions are of each class, ``[product of the counts]``."""
    counts = torch.ones(1, dtype=dtype, device="cpu")
    for own in axes:
        counts = (counts[:, None] * torch.tensor(own.often, dtype=dtype, device="cpu")).reshape(-1)
    return counts.to(device)


@lru_cache(maxsize=1024)
def _index(own: Axis, device: torch.device) -> Tensor:
    return torch.tensor(own.classes, device=device)
