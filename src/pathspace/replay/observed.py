"""The results of a forward pass on data: values of nodes, and operations in which parameters are edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Key = tuple[int, ...]
"""(slot,) of the tape, or (slot, cell, t) inside a recurrent layer."""


@dataclass
class UseOf:
    """A use of parameters in the captured pass: ``function(*args)``, and its results, one for each step of a loop."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[Tensor]
    results: list[Tensor]
    stacked: bool = False


@dataclass
class Question:
    """A question of the model about its inputs, and the answer with which the pass was captured."""

    value: Tensor
    made_by: str  # the step that made it
    answer: bool = False


@dataclass
class Seen:
    """The results of a captured pass.

    Attributes:
        inputs: the tensors that the model was called with, then parameters and buffers.
        names: of the latter.
        nodes: by their keys.
        uses: of parameters.
        views: ids of tensors that are rearranged parameters.
        questions: what the model asked.
        constants: tensors that are the same on all data.
        starts: first states of recurrent layers.
    """

    inputs: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nodes: dict[Key, Tensor] = field(default_factory=dict)
    uses: list[UseOf] = field(default_factory=list)
    views: set[int] = field(default_factory=set)
    questions: list[Question] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)


@dataclass
class Node:
    """Values of some units on all examples, ``[n, ...]``."""

    value: (
        Tensor  # as it was before its activation; part of the graph only in a differentiable replay
    )
    edge: GradientEdge

    @property
    def shape_of_one(self) -> torch.Size:
        """Its shape for one example."""
        return self.value.shape[1:]


@dataclass
class Use:
    """One operation in which parameters are edges: ``function(*args)`` for one example."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[Tensor]  # those arguments that depend on parameters only
    data: list[Tensor]  # those that have their examples in the first dimension, [n, ...]
    # of the result; of its steps, where there are several, which are stacked
    edges: list[GradientEdge]
    shape: torch.Size = field(default_factory=torch.Size)  # of the result, [n, ...]

    def is_data(self, tensor: Tensor) -> bool:
        """Return whether an argument has the examples in its first dimension."""
        return any(tensor is t for t in self.data)
