"""The form of a family of operations, and of those whose edges data open and close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.ops.listing import NONE, Listing
from pathspace.ops.probing import each


class Family(ABC):
    """Operations that are alike to every reader of a captured pass."""

    @abstractmethod
    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether a step is one of the family."""

    @abstractmethod
    def listed(self, step: Step, listing: Listing) -> None:
        """Write down the edges of a step."""


@dataclass(frozen=True)
class Gates:
    """The edges of an operation and their gates.

    A gate g is 0 or 1, or the slope of a leaky ReLU: the output is g times the input (for a
    maximum, the sum over the window, with ties shared).

    Attributes:
        target: elements of the result.
        source: elements of the operands, one operand after the other.
        opened: g of each edge.
    """

    target: Tensor
    source: Tensor
    opened: Tensor


class GatedFamily(Family):
    """Operations that open and close edges depending on the data.

    Attributes:
        names: of the operations.
    """

    names: ClassVar[frozenset[str]]

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is one of the family."""
        return step.name in self.names and self.has_gates(step, listing)

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether a step with one of the names has gates."""
        del step, listing
        return True

    @abstractmethod
    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Any, ...], Gates]:
        """Return the operands of a step, and the edges from their elements."""

    def listed(self, step: Step, listing: Listing) -> None:
        """Write an edge for each gate."""
        operands, gates = self.gated(step, listing)
        sources = torch.cat([listing.sources(t).flatten() for t in operands])
        # a maximum returns its indices too
        several = not isinstance(step.result, Tensor)
        values = step.result[0] if several else step.result
        nodes = listing.new_nodes(values.shape)
        numbers = listing.add_gates(gates.opened)
        ones = torch.ones(len(gates.target), dtype=torch.float64)
        listing.add_edges(sources[gates.source], nodes.flatten()[gates.target], NONE, ones, numbers)
        if several:
            listing.bind_data(step.result[1:])
        listing.bind_nodes(values, nodes)


def first_operand(step: Step) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the first tensor among the arguments of a step, and the step as a function of it."""
    leaves, form = pytree.tree_flatten((step.args, step.kwargs))
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def on(value: Tensor) -> Any:
        args, kwargs = pytree.tree_unflatten([*leaves[:place], value, *leaves[place + 1 :]], form)
        return step.function(*args, **kwargs)

    return leaves[place], on


def gates_of_linear(
    possible: Callable[[Tensor], Tensor], actual: Callable[[Tensor], Tensor], elements: int
) -> Gates:
    """Return the edges that a map may have for any data, with gates for the present data.

    Args:
        possible: a linear map of a vector ``[elements]`` that has all these edges.
        actual: the linear map for the present data.
        elements: the number of elements.
    """
    units = torch.eye(elements, dtype=torch.float64)
    # `possible` may write into its argument
    edges = each(lambda unit: possible(unit.clone()).reshape(-1), units)
    values = each(lambda unit: actual(unit).reshape(-1), units)
    source, target = edges.nonzero(as_tuple=True)
    opened = (values / edges)[source, target]
    return Gates(target, source, opened)
