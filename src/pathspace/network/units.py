"""Unit classes: the hidden units of a network that must share one scale, and the edges at them.

One class is a unit of an RNN over all its time steps, a channel over all its positions, or several
channels that a skip connection adds. Node-wise rescaling chooses one factor s > 0 per class.

Where activations are multiplied, the scale of the product is the product of the scales of two
classes, which *generate* those of all units: every scale of the network is a product of integer
powers of the classes' factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Edge = tuple[str, tuple[int, ...]]
"""A parameter's name and the index of one of its elements."""


@dataclass(frozen=True)
class EdgeLabels:
    """For every element of one parameter, the classes at its two ends.

    A label is 0 for a fixed scale (inputs, bias node, outputs), ``1 + c`` for class c, ``1 + C +
    k`` for the k-th product of scales of classes (``Network.monomials``, C classes), and negative
    for the inverse of a scale. A parameter element transforms as p -> (s_target / s_source) p.

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
    _monomials: Tensor = field(repr=False, compare=False)
    _num_classes: int = field(repr=False, compare=False)

    @property
    def incoming(self) -> tuple[Edge, ...]:
        """Edges that are multiplied by the class's scale (or a power of it); biases included, self-loops too."""
        return self._select(1)

    @property
    def outgoing(self) -> tuple[Edge, ...]:
        """Edges that are divided by the class's scale (or a power of it); self-loops too."""
        return self._select(-1)

    @property
    def bias(self) -> tuple[Edge, ...]:
        """Incoming edges from the bias node."""
        return tuple(edge for edge in self.incoming if self._edges[edge[0]].bias)

    def _select(self, sign: int) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        for name, labels in self._edges.items():
            at_ends = (sign * self._exponents(labels.target) > 0) | (
                sign * self._exponents(labels.source) < 0
            )
            mask = torch.broadcast_to(at_ends, self._shapes[name])
            edges += [(name, tuple(index)) for index in mask.nonzero().tolist()]
        return tuple(edges)

    def _exponents(self, labels: Tensor) -> Tensor:
        """Return the power of the class's scale in each label."""
        label = self.index + 1
        result = (labels == label).long() - (labels == -label).long()
        factors = self._monomials
        powers = (factors == label).sum(1) - (factors == -label).sum(1)
        for k in powers.nonzero().flatten().tolist():
            beyond = 1 + self._num_classes + k
            result += powers[k] * ((labels == beyond).long() - (labels == -beyond).long())
        return result
