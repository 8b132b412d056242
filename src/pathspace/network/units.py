"""Unit classes: the hidden units of a network that must share one scale, and the edges at them.

One class is a unit of an RNN over all its time steps, a channel over all its positions, or several channels that a
skip connection adds. Node-wise rescaling chooses one factor s > 0 per class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Edge = tuple[str, tuple[int, ...]]
"""A parameter's name and the index of one of its elements."""


@dataclass(frozen=True)
class EdgeLabels:
    """For every element of one parameter, the classes at its two ends.

    A label is 0 for a fixed scale (inputs, bias node, outputs), ``1 + c`` for class c and ``-(1 + c)`` for the
    inverse of its scale. A parameter element transforms as p -> (s_target / s_source) p.

    Attributes:
        target: int64 tensor, broadcastable to the parameter's shape.
        source: likewise.
        bias: whether the elements are edges from the bias node.
    """

    target: Tensor
    source: Tensor
    bias: bool = False


@dataclass(frozen=True)
class UnitClass:
    """One class of tied hidden units.

    Attributes:
        index: its place in ``network.unit_classes`` and in every tensor of factors.
        name: where its units are made, e.g. ``"linear in 'encoder.0'[3]"``.
    """

    index: int
    name: str
    _edges: Mapping[str, EdgeLabels] = field(repr=False, compare=False)
    _shapes: Mapping[str, torch.Size] = field(repr=False, compare=False)

    @property
    def incoming(self) -> tuple[Edge, ...]:
        """Edges that are multiplied by the class's scale; biases included, self-loops too."""
        return self._select(lambda e: (e.target == self.index + 1) | (e.source == -self.index - 1))

    @property
    def outgoing(self) -> tuple[Edge, ...]:
        """Edges that are divided by the class's scale; self-loops too."""
        return self._select(lambda e: (e.source == self.index + 1) | (e.target == -self.index - 1))

    @property
    def bias(self) -> tuple[Edge, ...]:
        """Those of the incoming edges that come from the bias node."""
        return tuple(edge for edge in self.incoming if self._edges[edge[0]].bias)

    def _select(self, test: Callable[[EdgeLabels], Tensor]) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        for name, labels in self._edges.items():
            mask = torch.broadcast_to(test(labels), self._shapes[name])
            edges += [(name, tuple(index)) for index in mask.nonzero().tolist()]
        return tuple(edges)
