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
        self._table: Tensor | None = None  # _find of every variable, rebuilt after a union
        self.origin: dict[int, tuple[str, int]] = {}  # variable -> (where it was made, its index there)

    def fresh(self, count: int, origin: str) -> Tensor:
        """``count`` new variables, made at ``origin`` (used in the names of unit classes)."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        for i in range(count):
            self.origin[first + i] = (origin, i)
        self._table = None
        return torch.arange(first, first + count)

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
            self._parent[abs(a)] = FIXED
        else:
            # The older variable stays, so that classes are named after the place where they first appear.
            keep, drop = (a, b) if abs(a) < abs(b) else (b, a)
            self._parent[abs(drop)] = keep if drop > 0 else -keep
        self._table = None

    def resolve(self, labels: Tensor) -> Tensor:
        """The labels with every variable replaced by its representative; same shape."""
        if self._table is None:
            self._table = torch.tensor([self._find(i) for i in range(len(self._parent))])
        return self._table[labels.abs()] * labels.sign()

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """Make two broadcastable arrays of labels equal, element by element; returns the common labels."""
        a, b = self.resolve(a), self.resolve(b)
        if a.shape != b.shape:
            a, b = torch.broadcast_tensors(a, b)
        differ = a != b
        if not bool(differ.any()):
            return a
        clash = differ & (a != WILD) & (b != WILD)
        if bool(clash.any()):
            for left, right in torch.stack([a[clash], b[clash]], 1).unique(dim=0).tolist():
                self._union(left, right)
            a, b = self.resolve(a), self.resolve(b)
        return torch.where(a == WILD, b, a)

    def unify_over(self, labels: Tensor, keep: tuple[int, ...]) -> Tensor:
        """Make labels equal along every dimension but those in ``keep``; returns them with shape ``[len] * keep``."""
        keep = tuple(d % labels.dim() for d in keep)
        rest = [d for d in range(labels.dim()) if d not in keep]
        rows = self.resolve(labels).permute(*rest, *keep).reshape(-1, *(labels.shape[d] for d in keep))
        common = rows[0]
        if rows.shape[0] == 1 or bool((rows == common).all()):
            return common
        for row in rows.reshape(rows.shape[0], -1).unique(dim=0):  # few distinct rows, however many there are
            common = self.unify(common, row.reshape(common.shape))
        return self.resolve(common)
