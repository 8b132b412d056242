"""Sums and maxima at places: ``index_add``, ``scatter_add`` and ``scatter_reduce``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pathspace.graph.capture import Step
from pathspace.ops.family import GatedFamily, Gates, gates_of_linear
from pathspace.ops.listing import Listing


class AddAt(GatedFamily):
    """``index_add`` and ``scatter_add`` at places that are data."""

    names = frozenset(["index_add", "scatter_add"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether the places are data; sums at places that are not are affine."""
        if len(step.args) < 4 or listing.has_weight(step.tensors):
            return False
        return listing.is_data(step.args[2])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from every element, and from every summand to all places along a dimension."""
        del listing
        base, dim, index, source = step.args

        def add(target: Tensor, summands: Tensor) -> Tensor:
            return step.function(target, dim, index, summands, **step.kwargs)

        return (base, source), _added(add, base, dim, source, anywhere=True)


class ReduceAt(GatedFamily):
    """``scatter_reduce``: sums at places that are data, and maxima."""

    names = frozenset(["scatter_reduce"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether it is no sum at places that are known, which is affine."""
        if len(step.args) < 5 or listing.has_weight(step.tensors):
            return False
        affine = step.args[4] == "sum" and step.kwargs.get("include_self", True)
        return not affine or listing.is_data(step.args[2])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges of the sum; in a maximum, the edge from the first largest element is open."""
        base, dim, index, source, reduce = step.args[:5]

        def add(target: Tensor, summands: Tensor) -> Tensor:
            return target.scatter_add(dim, index, summands)

        gates = _added(add, base, dim, source, anywhere=listing.is_data(index))
        if not step.kwargs.get("include_self", True):
            gates.opened[: base.numel()] = _not_reached(add, base, source)
        if reduce == "sum":
            return (base, source), gates
        values = torch.cat([t.detach().double().flatten() for t in (base, source)])
        if reduce != "amax":
            values = -values
        opened = _first_largest(gates, values, base.numel())
        return (base, source), Gates(gates.target, gates.source, opened)


def _added(
    add: Callable[[Tensor, Tensor], Tensor],
    base: Tensor,
    dim: int,
    source: Tensor,
    *,
    anywhere: bool,
) -> Gates:
    """Return edges from every element, and from every summand to the place where it is added.

    With ``anywhere``, data say where: there are edges to all places along the dimension, of which
    that one is open.
    """
    zero = torch.zeros(base.shape, dtype=torch.float64)
    n = base.numel()

    def at_its_place(unit: Tensor) -> Tensor:
        return add(zero, unit.reshape(source.shape))

    def at_any(unit: Tensor) -> Tensor:
        return at_its_place(unit).sum(dim, keepdim=True).expand(base.shape)

    possible = at_any if anywhere else at_its_place
    summands = gates_of_linear(possible, at_its_place, source.numel())
    direct = torch.arange(n)
    ones = torch.ones(n, dtype=torch.float64)
    return Gates(
        torch.cat([direct, summands.target]),
        torch.cat([direct, summands.source + n]),
        torch.cat([ones, summands.opened]),
    )


def _not_reached(add: Callable[[Tensor, Tensor], Tensor], base: Tensor, source: Tensor) -> Tensor:
    """Return one for each element to which nothing is added, and zero for the others."""
    zero = torch.zeros(base.shape, dtype=torch.float64)
    counts = add(zero, torch.ones(source.shape, dtype=torch.float64))
    return (counts == 0).double().flatten()


def _first_largest(gates: Gates, values: Tensor, outputs: int) -> Tensor:
    """Return one for the open edge from the first largest value to each element, and zero for the others."""
    is_open = gates.opened > 0
    entering = torch.where(is_open, values[gates.source], -torch.inf)
    lowest = torch.full((outputs,), -torch.inf, dtype=torch.float64)
    largest = lowest.scatter_reduce(0, gates.target, entering, "amax")
    is_largest = (entering == largest[gates.target]) & is_open
    (winners,) = is_largest.nonzero(as_tuple=True)
    # the number of edges stands for none
    edges = len(gates.target)
    nothing = torch.full((outputs,), edges)
    first = nothing.scatter_reduce(0, gates.target[winners], winners, "amin")
    opened = torch.zeros_like(gates.opened)
    return opened.index_fill(0, first[first < edges], 1.0)
