"""Which scale variables of a network are free: a union-find with signs.

Every unit has a scale s > 0 (the factor by which node-wise rescaling multiplies its value). Tracing gives each
unit a *label*, an integer that stands for a scale:

    0        fixed: s = 1 (network inputs, the bias node, outputs)
    WILD     the value is always zero, any scale fits (the first hidden state of a recurrent loop)
    +i, -i   scale variable i, or its inverse (a tied embedding's output side)

Labels travel in int64 tensors of the shape of the activation, so that an operation which only moves values moves
their labels in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIXED = 0
WILD = 1


class Scales:
    """Scale variables and the equalities between them found so far."""

    def __init__(self) -> None:
        self._parent: list[int] = [FIXED, WILD]  # signed parent of each variable; 0 is the fixed scale
        self._table = torch.tensor(
            [FIXED, WILD]
        )  # representative of each variable, but for those in _dropped
        self._dropped: list[int] = []  # representatives that are none any more
        self.origin: dict[int, tuple[str, int]] = {}  # variable -> (where it was made, its index there)

    def fresh(self, count: int, origin: str) -> Tensor:
        """``count`` new variables, made at ``origin`` (used in the names of unit classes)."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        for i in range(count):
            self.origin[first + i] = (origin, i)
        made = torch.arange(first, first + count)
        self._table = torch.cat([self._table, made])
        return made

    def _find(self, label: int) -> int:
        sign, node = (1, label) if label >= 0 else (-1, -label)
        trail = []
        while node > WILD and self._parent[node] != node:
            trail.append((node, sign))
            parent = self._parent[node]
            if parent < 0:
                sign, node = -sign, -parent
            else:
                node = parent
        root = sign * node
        for member, sign_there in trail:  # path compression
            self._parent[member] = root * sign_there
        return root

    def _union(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        if a == b or WILD in (a, b):
            return
        if abs(a) == abs(b):  # s = 1/s for s > 0 leaves s = 1
            drop, keep = a, FIXED
        else:
            # The older variable stays, so that classes are named after the place where they first appear.
            keep, drop = (a, b) if abs(a) < abs(b) else (b, a)
        self._parent[abs(drop)] = keep if drop > 0 else -keep
        self._dropped.append(abs(drop))

    def resolve(self, labels: Tensor) -> Tensor:
        """The labels with every variable replaced by its representative; same shape."""
        if self._dropped:
            renamed = torch.arange(len(self._table))
            renamed[self._dropped] = torch.tensor([self._find(d) for d in self._dropped])
            self._table = renamed[self._table.abs()] * self._table.sign()
            self._dropped.clear()
        small = without_repeats(labels)
        return (self._table[small.abs()] * small.sign()).expand(labels.shape)

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """Make two broadcastable arrays of labels equal, element by element; returns the common labels."""
        shape = torch.broadcast_shapes(a.shape, b.shape)
        a, b = (self.resolve(without_repeats(t)) for t in (a, b))
        a, b = torch.broadcast_tensors(a, b)
        clash = (a != b) & (a != WILD) & (b != WILD)
        if bool(clash.any()):
            n = len(self._table)  # a pair as one number: sorting numbers is far faster than sorting rows
            for pair in ((a[clash] + n) * (2 * n + 1) + b[clash] + n).unique().tolist():
                self._union(pair // (2 * n + 1) - n, pair % (2 * n + 1) - n)
            a, b = self.resolve(a), self.resolve(b)
        return torch.where(a == WILD, b, a).expand(shape)

    def unify_over(self, labels: Tensor, keep: tuple[int, ...]) -> Tensor:
        """Make labels equal along every dimension but those in ``keep``; returns them with shape ``[len] * keep``."""
        keep = tuple(d % labels.dim() for d in keep)
        rest = [d for d in range(labels.dim()) if d not in keep]
        shape = [labels.shape[d] for d in keep]
        small = self.resolve(without_repeats(labels))
        rows = small.permute(*rest, *keep).reshape(-1, *(small.shape[d] for d in keep))
        common = rows[0]
        if rows.shape[0] > 1 and not bool((rows == common).all()):
            for row in rows.reshape(rows.shape[0], -1).unique(
                dim=0
            ):  # few distinct rows, however many there are
                common = self.unify(common, row.reshape(common.shape))
        return self.resolve(common).expand(shape)


def without_repeats(labels: Tensor) -> Tensor:
    """One of each along expanded dimensions: a channel's label is stored once, not once a pixel."""
    for d, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if size > 1 and stride == 0:
            labels = labels.narrow(d, 0, 1)
    return labels


def compressed(labels: Tensor) -> Tensor:
    """The same labels, expanded along dimensions in which they are all alike."""
    shape = labels.shape
    for d in range(labels.dim()):
        first = labels.narrow(d, 0, 1)
        if labels.shape[d] > 1 and bool((labels == first).all()):
            labels = first
    return labels.expand(shape)
