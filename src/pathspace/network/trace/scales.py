"""Free scale variables of a network: classes of equal ones, with signs.

Every unit has a scale s > 0 (the factor by which node-wise rescaling multiplies its value). Tracing
gives each unit a *label*, an integer that stands for a scale:

    0        fixed: s = 1 (network inputs, the bias node, outputs)
    WILD     the value is always zero, any scale fits (the first hidden state of a recurrent loop)
    +i, -i   scale variable i, or its inverse (a tied embedding's output side)

Labels travel in int64 tensors of the shape of the activation, so that an operation which only moves
values moves their labels in the same way.

A product of two values has a variable of its own, and the equation that says of what: its scale is
the product of theirs. What the equations leave free is found when all are there (see ``lattice``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pathspace.network.trace.lattice import Monomial, solved

FIXED = 0
WILD = 1


class Scales:
    """Scale variables and the equalities between them found so far.

    Every variable points to an older one of its class, and the oldest, its *representative*, to
    itself. A merge goes through those that it is given; all of them are pointed to their
    representatives when as many labels have been looked up since.
    """

    def __init__(self) -> None:
        self._count = 2  # FIXED and WILD point to themselves
        # of labels of both signs: negative ones look for theirs at the end
        self._older = _to_themselves(2)
        # labels to look up before all point to their representatives; 0 if they do
        self._detours = 0
        # the first variable of each batch of fresh ones, and the place where the batch was made
        self._firsts: list[int] = []
        self._origins: list[str] = []
        # columns v, a, b: the scales of a product and of its factors
        self._equations: list[Tensor] = []
        # by factors: a loop multiplies the same ones at every step
        self._products: dict[bytes, Tensor] = {}

    def fresh(self, count: int, origin: str) -> Tensor:
        """Return ``count`` new variables, made at ``origin`` (used in the names of unit classes)."""
        first = self._count
        self._firsts.append(first)
        self._origins.append(origin)
        self._count += count
        if 2 * self._count > len(self._older):
            larger = _to_themselves(2 * self._count)
            larger[:first] = self._older[:first]
            larger[1 - first :] = self._older[1 - first :]
            self._older = larger
        return torch.arange(first, self._count)

    def origin(self, variable: int) -> tuple[str, int]:
        """Return the place where a variable was made, and its index there."""
        batch = bisect_right(self._firsts, variable) - 1
        return self._origins[batch], variable - self._firsts[batch]

    def resolve(self, labels: Tensor) -> Tensor:
        """Replace every variable by its representative; the shape stays the same."""
        small = without_repeats(labels)
        result = self._older[small]
        if self._detours:
            while not torch.equal(further := self._older[result], result):
                result = further
            self._detours -= result.numel()
            if self._detours <= 0:
                self.representatives()
        return result if small is labels else result.expand(labels.shape)

    def representatives(self) -> Tensor:
        """Return the representatives of all variables and, from the end, of their inverses.

        Variables point to them afterwards.
        """
        while not torch.equal(further := self._older[self._older], self._older):
            self._older = further
        self._detours = 0
        return self._older

    def _point(self, labels: Tensor, to: Tensor) -> None:
        variables = labels.abs()
        self._older[variables] = to * labels.sign()
        self._older[-variables] = -self._older[variables]

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """Make two broadcastable arrays of labels equal, element by element; returns the common labels."""
        shape = a.shape if a.shape == b.shape else torch.broadcast_shapes(a.shape, b.shape)
        a = self.resolve(without_repeats(a))
        b = self.resolve(without_repeats(b))
        if torch.equal(a, b):
            return a.expand(shape)
        a, b = torch.broadcast_tensors(a, b)
        clash = (a != b) & (a != WILD) & (b != WILD)
        if bool(clash.any()):
            self._merge(a[clash], b[clash])
            a = self.resolve(a)
            b = self.resolve(b)
        return torch.where(a == WILD, b, a).expand(shape)

    def product(self, a: Tensor, b: Tensor, origin: str) -> Tensor:
        """Return the labels of the product of two values whose labels broadcast."""
        shape = a.shape if a.shape == b.shape else torch.broadcast_shapes(a.shape, b.shape)
        a = self.resolve(without_repeats(a))
        b = self.resolve(without_repeats(b))
        a, b = torch.broadcast_tensors(a, b)
        of_one = torch.where(b == FIXED, a, FIXED)
        result = torch.where(a == FIXED, b, of_one)
        result = result.masked_fill((a == WILD) | (b == WILD), WILD)
        both = (result == FIXED) & (a != -b)
        if bool(both.any()):
            result[both] = self._multiplied(a[both], b[both], origin)
        return result.expand(shape)

    def distinct(self, labels: Tensor) -> Tensor:
        """Return the same labels, one of each along dimensions in which they are all equal."""
        return without_repeats(compressed(self.resolve(without_repeats(labels))))

    def _multiplied(self, a: Tensor, b: Tensor, origin: str) -> Tensor:
        """Return variables for the products of representatives, one for each pair of them."""
        # pairs as numbers, which are sorted faster
        size = 2 * self._count
        coded = torch.minimum(a, b) * size + torch.maximum(a, b)
        numbers, place = coded.unique(return_inverse=True)
        larger = (numbers + size // 2).remainder(size) - size // 2
        smaller = (numbers - larger) // size
        pairs = torch.stack([smaller, larger])
        key = pairs.numpy().tobytes()
        if key not in self._products:
            products = self.fresh(pairs.shape[1], origin)
            self._products[key] = products
            self._equations.append(torch.cat([products[None], pairs]))
        return self.resolve(self._products[key])[place]

    def solve(self) -> dict[int, Monomial]:
        """Solve the equations of products: express each representative that is not free by those that are.

        The others are generators: their scales may be anything, and with them every scale has a
        value.
        """
        if not self._equations:
            return {}
        equations = torch.cat(self._equations, 1)
        now = self.resolve(equations)
        while True:  # an equation with a one in it is one of two variables, like any other
            v, a, b = now
            self.unify(a, torch.where(v == FIXED, -b, a))
            of_one = torch.where(b == FIXED, a, v)
            self.unify(v, torch.where(a == FIXED, b, of_one))
            further = self.resolve(equations)
            if torch.equal(further, now):
                break
            now = further
        is_product = (now != FIXED).all(0)
        return solved(now[:, is_product].t().tolist())

    def _merge(self, a: Tensor, b: Tensor) -> None:
        """Make each pair of representatives equal, none of them WILD: all pairs at once, until none is left."""
        while len(a):
            # the older variable stays, so that classes are named after the place where they first
            # appear
            older = a.abs() < b.abs()
            keep = torch.where(older, a, b)
            drop = torch.where(older, b, a)
            # s = 1/s for s > 0 leaves s = 1
            keep = torch.where(keep == -drop, FIXED, keep)
            # a variable in several pairs follows the oldest partner now, the others in the next round
            self._older.scatter_reduce_(0, drop.abs(), keep.abs(), "amin")
            first = keep.abs() == self._older[drop.abs()]
            self._point(drop[first], keep[first])
            self._detours = self._count
            a = self.resolve(a)
            b = self.resolve(b)
            left = a != b
            a = a[left]
            b = b[left]

    def unify_along(self, labels: Tensor, dims: Iterable[int]) -> Tensor:
        """Make labels equal along some dimensions; returns them, of size one there."""
        small = self.resolve(without_repeats(labels))
        shape = list(labels.shape)
        dims = [d % labels.dim() for d in dims]
        for d in dims:
            shape[d] = min(shape[d], 1)
        differing = [d for d in dims if small.shape[d] > 1]
        if differing:
            largest = small.where(small != WILD, -self._count).amax(differing, keepdim=True)
            common = largest.where(largest > -self._count, WILD)
            self.unify(small, common)
            small = self.resolve(common)
        return small.expand(shape)

    def unify_over(self, labels: Tensor, keep: tuple[int, ...]) -> Tensor:
        """Make labels equal along every dimension but those in ``keep``; returns them with shape ``[len] * keep``."""
        keep = tuple(d % labels.dim() for d in keep)
        shape = [labels.shape[d] for d in keep]
        rest = [d for d in range(labels.dim()) if d not in keep]
        if not all(labels.shape[d] for d in rest):  # nothing is there to have a scale
            return torch.full(shape, WILD)
        unified = self.unify_along(labels, rest)
        return unified.permute((*rest, *keep)).reshape(shape)

    def unify_groups(self, labels: Tensor, largest: Callable[[Tensor], Tensor]) -> Tensor:
        """Make labels equal in groups, and return one of each; ``largest`` takes the maximum of each group."""
        while True:
            labels = self.resolve(labels)
            wild = labels == WILD
            numbers = labels.double()
            high = largest(numbers.masked_fill(wild, -math.inf))
            low = -largest((-numbers).masked_fill(wild, -math.inf))
            empty = torch.isinf(high)
            high = high.masked_fill(empty, WILD).long()
            low = low.masked_fill(empty, WILD).long()
            if bool((high == low).all()):
                return high
            self.unify(high, low)


def _to_themselves(count: int) -> Tensor:
    """Return two times ``count`` labels of both signs, in the order of lookups."""
    return torch.cat([torch.arange(count), torch.arange(-count, 0)])


def without_repeats(labels: Tensor) -> Tensor:
    """Keep one label of each along expanded dimensions: a channel's label is stored once, not once a pixel."""
    if 0 not in labels.stride():
        return labels
    for d, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if size > 1 and stride == 0:
            labels = labels.narrow(d, 0, 1)
    return labels


def compressed(labels: Tensor) -> Tensor:
    """Return the same labels, expanded along dimensions in which they are all equal."""
    shape = labels.shape
    for d in range(labels.dim()):
        first = labels.narrow(d, 0, 1)
        if labels.shape[d] > 1 and bool((labels == first).all()):
            labels = first
    return labels.expand(shape)
