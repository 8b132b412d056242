"""The roles of the tensors of a model that runs to be written down: the nodes of their elements, or their weights.

Letters: u -> v an edge of the written-out graph; node 0 is the bias node; nodes are numbered so that u < v.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError
from pathspace.network.rules import MOVEMENTS
from pathspace.network.rules.elementwise import counted
from pathspace.paths.listing.probing import LARGEST
from pathspace.paths.space.reduction import ReductionGraph

BIAS = 0
"""The bias node."""
NONE = -1
"""No weight, or no gate, on an edge."""

JOINS = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "pad", "__setitem__"])


@dataclass
class Edges:
    """Columns of the list of edges, in the order in which the operations ran."""

    source: list[Tensor] = field(default_factory=list)
    target: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    factor: list[Tensor] = field(default_factory=list)
    gate: list[Tensor] = field(default_factory=list)

    def add(self, source: Tensor, target: Tensor, weight: Any, factor: Tensor, gate: Any = NONE) -> None:
        """Append edges; ``weight`` and ``gate`` may be one number for all of them."""
        columns = (self.source, self.target, self.weight, self.factor, self.gate)
        for column, value in zip(columns, (source, target, weight, factor, gate), strict=True):
            column.append(torch.as_tensor(value).expand(target.shape))


@dataclass(frozen=True)
class Weights:
    """A tensor whose elements are parameter elements times fixed factors."""

    numbers: Tensor
    factors: Tensor


class TensorRoles:
    """Activations, weights, inputs and constants, as a run of a model makes them; and the edges between them.

    An activation has nodes. What depends on the example alone is an input, and has nodes once it was read.
    """

    def __init__(self, graph: ReductionGraph, *, with_edges: bool) -> None:
        super().__init__()
        self.graph, self.with_edges = graph, with_edges
        self.edges = Edges()
        self.num_nodes = 1
        self.inputs: list[Tensor] = []  # node numbers
        self.input_values: list[Tensor] = []
        self._units: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (tensor, node numbers)
        self._weights: dict[int, tuple[Tensor, Weights]] = {}
        self._data: dict[int, Tensor] = {}  # tensors that depend on the example alone

    def bind_parameter(self, name: str, parameter: Tensor) -> None:
        """The elements of a parameter are edges."""
        first = self.graph.number((name, (0,) * parameter.dim())) if parameter.numel() else 0
        numbers = torch.arange(first, first + parameter.numel()).reshape(parameter.shape)
        ones = torch.ones(parameter.shape, dtype=torch.float64)
        self._weights[id(parameter)] = (parameter, Weights(numbers, ones))

    def bind_data(self, tensor: Tensor) -> Tensor:
        """The tensor depends on the example alone."""
        self._data[id(tensor)] = tensor
        return tensor

    def nodes_of(self, tensor: Tensor) -> Tensor | None:
        """Node numbers of a tensor of activations, or of an input that was read, of its shape."""
        result = self._units.get(id(tensor))
        return None if result is None else result[1]

    def is_unit(self, tensor: Tensor) -> bool:
        """Whether the tensor holds activations; an input or a weight that was read before has nodes, and is none."""
        return id(tensor) in self._units and id(tensor) not in self._data and id(tensor) not in self._weights

    def _bind(self, tensor: Tensor, nodes: Tensor) -> Tensor:
        self._units[id(tensor)] = (tensor, nodes.reshape(tensor.shape))
        for other in (self._weights, self._data):
            other.pop(id(tensor), None)
        return tensor

    def _spread(self, written: Tensor) -> None:
        """Whatever shares the memory of a tensor that was written to shows its new nodes."""
        memory = written.untyped_storage()
        size = memory.nbytes() // written.element_size()

        def places(t: Tensor) -> Tensor:
            return torch.arange(size).as_strided(t.shape, t.stride(), t.storage_offset())

        now = torch.full((size,), -1)
        now[places(written)] = self._units[id(written)][1]
        for key, (other, nodes) in list(self._units.items()):
            if other is not written and other.untyped_storage().data_ptr() == memory.data_ptr():
                new = now[places(other)]
                self._units[key] = (other, torch.where(new >= 0, new, nodes))

    def _moves_inputs(self, name: str, tensors: list[Tensor]) -> bool:
        """Whether a function of inputs alone only moves them, perhaps to stand beside constants."""
        inputs = [t for t in tensors if id(t) in self._data]
        moves = name in JOINS or any(id(t) in self._units for t in inputs)
        return moves and bool(inputs) and name in MOVEMENTS and all(t.is_floating_point() for t in inputs)

    def _forget_nodes(self, written: Tensor) -> None:
        """Inputs that share the memory of one that was written to are other inputs from now on."""
        memory = written.untyped_storage().data_ptr()
        for key, (other, _) in list(self._units.items()):
            if key in self._data and other.untyped_storage().data_ptr() == memory:
                del self._units[key]

    def _new_nodes(self, shape: torch.Size) -> Tensor:
        first, self.num_nodes = self.num_nodes, self.num_nodes + shape.numel()
        if self.num_nodes > LARGEST:
            raise UntraceableError(
                "writing down the graph", "", "it has too many nodes", "Use a smaller model"
            )
        return torch.arange(first, self.num_nodes).reshape(shape)

    def _sources(self, tensor: Tensor) -> Tensor:
        """Node numbers of activations; data becomes inputs, a parameter edges from the bias node."""
        nodes = self.nodes_of(tensor)
        if nodes is not None:
            return nodes
        nodes = self._new_nodes(tensor.shape)
        if id(tensor) in self._weights:
            weights = self._weights[id(tensor)][1]
            self._edges(torch.zeros_like(nodes), nodes, weights.numbers, weights.factors)
        elif id(tensor) in self._data:
            self.inputs.append(nodes.flatten())
            self.input_values.append(tensor.detach().double().flatten().clone())  # it may be written to
        else:
            fixed = counted(tensor.detach().double().flatten())
            (where,) = fixed.nonzero(as_tuple=True)
            self._edges(torch.zeros_like(where), nodes.flatten()[where], NONE, fixed[where])
        self._units[id(tensor)] = (tensor, nodes)
        return nodes

    def _edges(self, source: Tensor, target: Tensor, weight: Any, factor: Tensor, gate: Any = NONE) -> None:
        if self.with_edges:
            factor = factor.flatten()
            kept = factor != 0  # a weight that a mask hides, or a zero in its place, is no edge
            source, target, weight, gate = (
                t.flatten()[kept] if isinstance(t, Tensor) else t for t in (source, target, weight, gate)
            )
            self.edges.add(source, target, weight, factor[kept], gate)

    def _weight(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf) in self._weights

    def _keep(self, where: dict[int, Tensor], result: Any) -> Any:
        where.update((id(t), t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result
