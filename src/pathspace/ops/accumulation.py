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
        """Return whether the index is data. With a known index the operation is affine."""
        if len(step.args) < 4 or listing.has_weight(step.tensors):
            return False
        return listing.is_data(step.args[2])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return an edge from every element of the base, and edges from every summand to all positions along ``dim``.

        Of the edges from a summand only that to its index is open.
        """
        del listing
        base, dim, index, source = step.args

        def add(target: Tensor, summands: Tensor) -> Tensor:
            return step.function(target, dim, index, summands, **step.kwargs)

        return (base, source), _edges_of_sum(add, base, dim, source, index_is_data=True)


class ReduceAt(GatedFamily):
    """``scatter_reduce``: sums at places that are data, and maxima."""

    names = frozenset(["scatter_reduce"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether it is a maximum, or a sum with an index that is data. Other sums are affine."""
        if len(step.args) < 5 or listing.has_weight(step.tensors):
            return False
        index = step.args[2]
        reduce = step.args[4]
        is_sum = reduce == "sum" and step.kwargs.get("include_self", True)
        return not is_sum or listing.is_data(index)

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return the edges of a sum; for a maximum, one open edge to each element, from the first largest value."""
        base, dim, index, source, reduce = step.args[:5]

        def add(target: Tensor, summands: Tensor) -> Tensor:
            return target.scatter_add(dim, index, summands)

        gates = _edges_of_sum(add, base, dim, source, index_is_data=listing.is_data(index))
        if not step.kwargs.get("include_self", True):
            # an element of the base stays only where nothing is added
            gates.opened[: base.numel()] = _keeps_base(add, base, source)
        if reduce == "sum":
            return (base, source), gates
        values = torch.cat([t.detach().double().flatten() for t in (base, source)])
        if reduce == "amin":
            values = -values
        opened = _open_from_largest(gates, values, base.numel())
        return (base, source), Gates(gates.target, gates.source, opened)


def _edges_of_sum(
    add: Callable[[Tensor, Tensor], Tensor],
    base: Tensor,
    dim: int,
    source: Tensor,
    *,
    index_is_data: bool,
) -> Gates:
    """Return the edges of ``base`` plus summands at an index along ``dim``.

    Args:
        add: adds summands of the shape of ``source`` to a base.
        base: elements of the result before the sum; each has an open edge to its own position.
        dim: the dimension that is indexed.
        source: the summands.
        index_is_data: whether other data might add a summand elsewhere. If so there are edges from
            it to all positions along ``dim``, and only that to its index is open; else it has that
            edge alone.
    """
    zero = torch.zeros(base.shape, dtype=torch.float64)
    n = base.numel()

    def at_index(unit: Tensor) -> Tensor:
        return add(zero, unit.reshape(source.shape))

    def anywhere(unit: Tensor) -> Tensor:
        return at_index(unit).sum(dim, keepdim=True).expand(base.shape)

    possible = anywhere if index_is_data else at_index
    summands = gates_of_linear(possible, at_index, source.numel())
    direct = torch.arange(n)
    ones = torch.ones(n, dtype=torch.float64)
    return Gates(
        torch.cat([direct, summands.target]),
        torch.cat([direct, summands.source + n]),
        torch.cat([ones, summands.opened]),
    )


def _keeps_base(add: Callable[[Tensor, Tensor], Tensor], base: Tensor, source: Tensor) -> Tensor:
    """Return 1 for each element of the base to which nothing is added, else 0."""
    zero = torch.zeros(base.shape, dtype=torch.float64)
    counts = add(zero, torch.ones(source.shape, dtype=torch.float64))
    return (counts == 0).double().flatten()


def _open_from_largest(gates: Gates, values: Tensor, outputs: int) -> Tensor:
    """Return gates of a maximum: 1 for the first open edge with the largest value that enters an output, else 0.

    Args:
        gates: the edges, and which of them are open for a sum.
        values: the value of each source.
        outputs: the number of outputs.
    """
    is_open = gates.opened > 0
    entering = torch.where(is_open, values[gates.source], -torch.inf)
    lowest = torch.full((outputs,), -torch.inf, dtype=torch.float64)
    largest = lowest.scatter_reduce(0, gates.target, entering, "amax")
    is_largest = (entering == largest[gates.target]) & is_open
    (candidates,) = is_largest.nonzero(as_tuple=True)
    # an output that no open edge enters keeps the number `edges`
    edges = len(gates.target)
    none = torch.full((outputs,), edges)
    first = none.scatter_reduce(0, gates.target[candidates], candidates, "amin")
    opened = torch.zeros_like(gates.opened)
    return opened.index_fill(0, first[first < edges], 1.0)
