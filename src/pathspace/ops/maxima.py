"""Maxima, minima and orders: edges from all values that may be chosen, of which the chosen one is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from pathspace.graph.capture import Step
from pathspace.network.rules.order import RULES as ORDERED
from pathspace.network.rules.order import dimension
from pathspace.ops.family import GatedFamily, Gates, first_operand, gates_of_linear
from pathspace.ops.listing import Listing
from pathspace.ops.probing import each

_POOLS = frozenset(
    f"{prefix}max_pool{d}d{end}"
    for d in (1, 2, 3)
    for prefix in ("", "_", "adaptive_", "_adaptive_")
    for end in ("", "_with_indices")
)
_MEDIANS = frozenset(["median", "nanmedian"])
_SMALLER = frozenset(["minimum", "fmin", "min"])
"""Functions of two tensors that return the smaller one."""


class Order(GatedFamily):
    """Functions that put values in order along a dimension, such as ``sort`` and ``cummax``."""

    names = frozenset(ORDERED)

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether there is one dimension; a median of all is one of a window."""
        del listing
        return not _is_of_all(step)

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from all values along the dimension; for ``cummax`` and ``cummin`` from those up to a place."""
        del listing
        x, function = first_operand(step)
        dim = dimension(step.name, step.args[1:], step.kwargs)
        dim = -1 if dim is None else dim
        places = _places(function, x, dim)
        running = step.name.startswith("cum")

        def any_of(unit: Tensor) -> Tensor:
            values = unit.reshape(x.shape)
            if running:
                return values.cumsum(dim)
            return values.sum(dim, keepdim=True).expand(places.shape)

        def chosen(unit: Tensor) -> Tensor:
            return unit.reshape(x.shape).gather(dim, places)

        return (x,), gates_of_linear(any_of, chosen, x.numel())


def _places(function: Callable[[Tensor], Any], x: Tensor, dim: int) -> Tensor:
    """Return the places along a dimension of the values that a function returns."""
    result = function(x.detach())
    if isinstance(result, Tensor):  # msort returns no indices
        return torch.sort(x.detach(), 0)[1]
    indices = result[1]
    return indices if indices.dim() == x.dim() else indices.unsqueeze(dim)


def _is_of_all(step: Step) -> bool:
    """Return whether a step is the median of all values."""
    if step.name not in _MEDIANS:
        return False
    return dimension(step.name, step.args[1:], step.kwargs) is None


class LargerOfTwo(GatedFamily):
    """The larger or smaller of two tensors."""

    names = frozenset(["maximum", "minimum", "fmax", "fmin", "max", "min"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether two tensors are compared."""
        del listing
        return len(step.tensors) == 2

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return an edge from each of both; the gates of two equal values are one half."""
        del listing
        x, y = step.tensors
        shape = torch.broadcast_shapes(x.shape, y.shape)
        output = torch.arange(shape.numel())
        from_x = _broadcast_numbers(x, shape)
        # elements of y are numbered after those of x
        from_y = _broadcast_numbers(y, shape) + x.numel()
        takes_x = x < y if step.name in _SMALLER else x > y
        gate = takes_x.double() + 0.5 * (x == y).double()
        gate = gate.detach().expand(shape).flatten()
        gates = Gates(
            target=torch.cat([output, output]),
            source=torch.cat([from_x, from_y]),
            opened=torch.cat([gate, 1 - gate]),
        )
        return (x, y), gates


def _broadcast_numbers(t: Tensor, shape: torch.Size) -> Tensor:
    """Return the numbers of the elements of a tensor that is broadcast to a shape, flattened."""
    numbers = torch.arange(t.numel()).reshape(t.shape)
    return numbers.expand(shape).flatten()


class Largest(GatedFamily):
    """The largest or smallest value of windows, of dimensions, or of all."""

    names = _POOLS | _MEDIANS | {"amax", "amin", "max", "min"}

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from the members of each window; the derivative says which are open."""
        del listing
        x, function = first_operand(step)
        # the smallest is the largest of the negatives
        sign = -1 if step.name in ("min", "amin") else 1

        def largest(vector: Tensor) -> Tensor:
            result = function(sign * vector.reshape(x.shape))
            values = result if isinstance(result, Tensor) else result[0]
            return (sign * values).reshape(-1)

        # one at element i and zero elsewhere: the largest of a window is one if i is in it
        units = torch.eye(x.numel(), dtype=torch.float64)
        is_member = each(largest, units) > 0
        source, target = is_member.nonzero(as_tuple=True)
        slopes = jacrev(largest)(sign * x.detach().reshape(-1))
        assert isinstance(slopes, Tensor)
        return (x,), Gates(target, source, slopes[target, source])
