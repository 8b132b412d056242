"""The list of edges while it is written: the nodes, weights or inputs that tensors of a captured pass hold.

Letters: u -> v an edge of the unrolled graph; node 0 is the bias node; nodes are numbered so that u
< v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError
from pathspace.network.rules.elementwise import counted
from pathspace.ops.probing import LARGEST
from pathspace.ops.terms import Operation, Terms, terms_of

BIAS = 0
"""The bias node."""
NONE = -1
"""No weight, or no gate, on an edge."""


@dataclass
class Edges:
    """Columns of the list of edges, in the order in which the operations ran."""

    source: list[Tensor] = field(default_factory=list)
    target: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    factor: list[Tensor] = field(default_factory=list)
    gate: list[Tensor] = field(default_factory=list)

    def add(
        self, source: Tensor, target: Tensor, weight: Any, factor: Tensor, gate: Any = NONE
    ) -> None:
        """Append edges; ``weight`` and ``gate`` may be one number for all of them."""
        columns = (self.source, self.target, self.weight, self.factor, self.gate)
        for column, value in zip(columns, (source, target, weight, factor, gate), strict=True):
            column.append(torch.as_tensor(value).expand(target.shape))


@dataclass(frozen=True)
class Weights:
    """A tensor whose elements are parameter elements times fixed factors."""

    numbers: Tensor
    factors: Tensor

    def at(self, places: Tensor) -> Weights:
        """Return the weights of some elements, counted through all dimensions."""
        return Weights(self.numbers.flatten()[places], self.factors.flatten()[places])


class Listing:
    """Nodes, edges, gates and inputs, and what every tensor of the pass holds.

    An activation has nodes. A tensor that depends on the example alone is an input, and has nodes
    once it was read.
    """

    def __init__(self, *, with_edges: bool) -> None:
        self.with_edges = with_edges
        self.edges = Edges()
        self.num_nodes = 1
        self.num_gates = 0
        self.gates: list[Tensor] = []
        self.inputs: list[Tensor] = []  # node numbers
        self.input_values: list[Tensor] = []
        self.entered: list[tuple[Tensor, Tensor]] = []  # what flows into a cut or an outside module
        self.tails: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.weights: dict[int, Weights] = {}
        self.data: set[int] = set()
        self.buffers: set[int] = set()  # the memory of the model's buffers, which may change
        self._units: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # ids are those of living tensors
        self._terms: dict[tuple[Any, ...], tuple[Terms, Operation]] = {}

    def bind_parameter(self, first: int, parameter: Tensor) -> None:
        """Note that the elements of a parameter are edges, numbered from ``first`` on."""
        numbers = torch.arange(first, first + parameter.numel()).reshape(parameter.shape)
        self.bind_weights(
            parameter, Weights(numbers, torch.ones(parameter.shape, dtype=torch.float64))
        )

    def bind_weights(self, tensor: Tensor, weights: Weights) -> None:
        """Note that the tensor holds weights."""
        self._kept.append(tensor)
        self.weights[id(tensor)] = weights

    def bind_data(self, tree: Any) -> None:
        """Note that tensors depend on the example alone."""
        for t in pytree.tree_leaves(tree):
            if isinstance(t, Tensor):
                self._kept.append(t)
                self.data.add(id(t))

    def bind_nodes(self, tensor: Tensor, nodes: Tensor) -> None:
        """Note that the tensor holds activations."""
        self._kept.append(tensor)
        self._units[id(tensor)] = nodes.reshape(tensor.shape)

    def is_unit(self, tensor: Any) -> bool:
        """Return whether the tensor holds hidden activations.

        Inputs and weights that were read have nodes, but do not count.
        """
        key = id(tensor)
        return key in self._units and key not in self.data and key not in self.weights

    def is_data(self, tensor: Any) -> bool:
        """Return whether the tensor depends on the example alone."""
        return id(tensor) in self.data

    def is_weight(self, tensor: Any) -> bool:
        """Return whether the tensor holds weights."""
        return id(tensor) in self.weights

    def has_unit(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether some of the tensors hold activations."""
        return any(self.is_unit(t) for t in tensors)

    def has_data(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether some of the tensors depend on the example alone."""
        return any(self.is_data(t) for t in tensors)

    def has_weight(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether some of the tensors hold weights."""
        return any(self.is_weight(t) for t in tensors)

    def was_read(self, tensor: Tensor) -> bool:
        """Return whether an input has nodes."""
        return id(tensor) in self._units

    def is_zero(self, t: Tensor) -> bool:
        """Return whether a tensor is a constant of zeros."""
        known = self.is_data(t) or t.untyped_storage().data_ptr() in self.buffers
        return t.dim() > 0 and not known and not bool(t.any())

    def before_the_end(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return a tensor of units with its nodes, or the tensors from which a function of outputs was computed."""
        if self.is_unit(tensor):
            return [(tensor, self._units[id(tensor)])]
        return self.tails.get(id(tensor), [])

    def new_nodes(self, shape: torch.Size) -> Tensor:
        """Return numbers of new nodes."""
        first, self.num_nodes = self.num_nodes, self.num_nodes + shape.numel()
        if self.num_nodes > LARGEST:
            raise UntraceableError(
                "writing down the graph", "", "it has too many nodes", "Use a smaller model"
            )
        return torch.arange(first, self.num_nodes).reshape(shape)

    def sources(self, tensor: Tensor) -> Tensor:
        """Return node numbers of activations; data becomes inputs, a parameter edges from the bias node."""
        nodes = self._units.get(id(tensor))
        if nodes is not None:
            return nodes
        nodes = self.new_nodes(tensor.shape)
        weights = self.weights.get(id(tensor))
        if weights is not None:
            self.add_edges(torch.zeros_like(nodes), nodes, weights.numbers, weights.factors)
        elif self.is_data(tensor):
            self.inputs.append(nodes.flatten())
            self.input_values.append(tensor.detach().double().flatten())
        else:
            fixed = counted(tensor.detach().double().flatten())
            (where,) = fixed.nonzero(as_tuple=True)
            self.add_edges(torch.zeros_like(where), nodes.flatten()[where], NONE, fixed[where])
        self._kept.append(tensor)
        self._units[id(tensor)] = nodes
        return nodes

    def add_edges(
        self, source: Tensor, target: Tensor, weight: Any, factor: Tensor, gate: Any = NONE
    ) -> None:
        """Append edges, if they are wanted; a weight that a mask hides, or a zero in its place, is no edge."""
        if not self.with_edges:
            return
        factor = factor.flatten()
        kept = factor != 0
        source, target, weight, gate = (
            t.flatten()[kept] if isinstance(t, Tensor) else t
            for t in (source, target, weight, gate)
        )
        self.edges.add(source, target, weight, factor[kept], gate)

    def add_gates(self, opened: Tensor) -> Tensor:
        """Return numbers of new gates, which begin open."""
        numbers = torch.arange(self.num_gates, self.num_gates + len(opened))
        self.num_gates += len(opened)
        self.gates.append(opened)
        return numbers

    def terms(self, operation: Operation, values: Sequence[Tensor], operands: int) -> Terms:
        """Return the terms of an operation, found once for all steps of a loop."""
        form = (operation.form(), operands)
        if form not in self._terms:
            self._terms[form] = terms_of(operation, values, operands), operation
        return self._terms[form][0]
