"""What a forward pass on data shows: the values of nodes, and the operations in which parameters are edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pathspace.network.program import Merged

Key = tuple[int, ...]
"""(slot,) of the tape, or (slot, cell, t) inside a recurrent layer."""


@dataclass
class Node:
    """Values of some units on all examples."""

    value: Tensor  # as it was before its activation; part of the graph only in a differentiable replay
    edge: GradientEdge
    batch: int | None  # the dimension that holds the examples
    merged: Merged | None = None  # how the tape has the dimensions around that of the examples

    def shape_of_one(self) -> torch.Size:
        """Its shape for one example."""
        shape = list(self.value.shape)
        if self.batch is not None:
            shape[self.batch] = 1
        return torch.Size(shape)

    def shape_on_tape(self) -> torch.Size:
        """Likewise, as it was traced."""
        one = torch.empty(self.shape_of_one(), device="meta")
        return (one if self.merged is None else self.merged.joined(one)).shape


@dataclass
class Use:
    """One operation in which parameters are edges: ``function(*args)``, with some arguments depending on data."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[Tensor]  # those arguments that depend on parameters only
    batches: dict[int, int]  # id of an argument that depends on data -> its batch dimension
    edges: list[GradientEdge]  # of the result; of its steps, where there are several, which are stacked
    batch: int | None
    shape: torch.Size = field(default_factory=torch.Size)  # of the result
