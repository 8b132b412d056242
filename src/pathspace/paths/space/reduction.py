"""The reduction graph of a network: unit classes as nodes, parameter elements as edges (S19 Section 4).

A recurrent network unrolled over time, or a convolution over its positions, is a large graph with
tied weights. What node-wise rescaling sees of it is small: one node per unit class and one edge per
parameter element, a recurrent weight being an edge between two classes of one layer, or a
self-loop. All nodes of fixed scale (inputs, bias node, outputs, and inner units whose scale is tied
to 1) are one node here, number 0. Weights on no path from an input to an output have no gradient,
and count in no dimension.

Letters: c a unit class, node 1 + c; e an edge, numbered through all parameters in the network's
order; w_e its weight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from pathspace.network import Edge, Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_network
from pathspace.network.network import in_full_precision
from pathspace.paths.kernel.kappa import squared_gradients
from pathspace.squared.squares import dense

FIXED = 0
"""The node of everything whose scale is 1: inputs, bias node, outputs."""


@dataclass(frozen=True, eq=False)
class ReductionGraph:
    """Unit classes and the parameter elements between them; made by :func:`reduction_graph`.

    Attributes:
        names: the parameters, in the order in which their elements are numbered.
        shapes: their shapes.
        source: node at the start of every edge, int64 ``[E]``: 0 fixed, 1 + c class c, -(1 + c) a
            unit whose scale is the inverse of that of class c (where one matrix is used both ways
            round, and of queries and keys).
        target: node at the end of every edge, likewise.
        bias: which edges come from the bias node, bool ``[E]``.
        num_classes: how many unit classes there are.
        class_names: where each was made.
        monomials: the factors of the scales of products, nodes 1 + C + k with C classes (see
            :class:`Network`).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    source: Tensor
    target: Tensor
    bias: Tensor
    num_classes: int
    class_names: tuple[str, ...]
    monomials: Tensor

    @property
    def num_edges(self) -> int:
        """E, the number of weights."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate((shape.numel() for shape in self.shapes), initial=0))

    @property
    def signed(self) -> bool:
        """True if some unit has the inverse scale of its class; then edges have no single direction."""
        return bool((self.source < 0).any() or (self.target < 0).any())

    def number(self, edge: Edge) -> int:
        """Return the number of an edge (parameter name, index).

        Raises:
            KeyError: the network has no such parameter element.
        """
        name, index = edge
        if name not in self.names:
            raise KeyError(f"no parameter '{name}' in the network; it has {', '.join(self.names)}")
        place = self.names.index(name)
        shape = self.shapes[place]
        if len(index) != len(shape) or any(
            not 0 <= i < n for i, n in zip(index, shape, strict=True)
        ):
            raise KeyError(f"'{name}' of shape {tuple(shape)} has no element {tuple(index)}")
        strides = torch.empty(shape, device="meta").stride()
        return self._ends[place] + sum(i * n for i, n in zip(index, strides, strict=True))

    def edge(self, number: int) -> Edge:
        """Return the edge (parameter name, index) of a number.

        Raises:
            IndexError: there is no edge of that number.
        """
        if not 0 <= number < self.num_edges:
            raise IndexError(f"there is no edge {number}: the network has {self.num_edges} weights")
        place = bisect_right(self._ends, number) - 1
        flat = number - self._ends[place]
        strides = torch.empty(self.shapes[place], device="meta").stride()
        index = (flat // n % size for n, size in zip(strides, self.shapes[place], strict=True))
        return self.names[place], tuple(index)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector ``[E]`` of tensors shaped as the parameters, by name; ValueError where one has another shape."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tensors[name].shape != shape:
                raise ValueError(
                    f"'{name}' has shape {tuple(tensors[name].shape)}, not {tuple(shape)}"
                )
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`flatten`: name -> tensor of the parameter's shape."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return {n: p.reshape(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    @tables_on_the_cpu()
    def exponents(self) -> Tensor:
        """Return how rescaling moves the log of the weights: d log|w_e| / d log s_c, float64 ``[E, num_classes]``.

        Path values do not change under rescaling, so these columns span the part of weight space
        that no path sees.
        """
        result = torch.zeros(self.num_edges, self.num_classes + 1, dtype=torch.float64)
        edges = torch.arange(self.num_edges)
        for nodes, sign in ((self.target, 1.0), (self.source, -1.0)):
            for node in self.factors(nodes):
                result.index_put_((edges, node.abs()), sign * node.sign().double(), accumulate=True)
        return result[:, 1:]

    def ends(self, edges: Tensor) -> Tensor:
        """Return the nodes at both ends of some edges, which are a mask or numbers."""
        return torch.cat([self.source[edges], self.target[edges]])

    @cached_property
    def single(self) -> Tensor:
        """Mask of edges with one class or none at either end, and no product of classes, bool ``[E]``."""
        return torch.maximum(self.source.abs(), self.target.abs()) <= self.num_classes

    def factors(self, nodes: Tensor) -> Tensor:
        """Return the classes whose scales make those of nodes, as nodes, padded with 0; int64 ``[n, *nodes.shape]``."""
        single = torch.zeros(self.num_classes + 1, self.monomials.shape[1], dtype=torch.long)
        single[:, 0] = torch.arange(self.num_classes + 1)
        table = torch.cat([single, self.monomials])
        return (table[nodes.abs()] * nodes.sign()[..., None]).movedim(-1, 0)


def expect_own(graph: ReductionGraph, network: Network, what: str) -> None:
    """Refuse what was made for a network of other weights or unit classes."""
    shapes = tuple(parameter.shape for parameter in network.parameters.values())
    own = (tuple(network.parameters), shapes, network.num_classes)
    if (graph.names, graph.shapes, graph.num_classes) != own:
        raise ValueError(f"the {what} for another network: make one for this network")


@tables_on_the_cpu()
def reduction_graph(network: Network) -> ReductionGraph:
    """Return the reduction graph of a traced network.

    Args:
        network: a traced network.

    Returns:
        The graph, on the CPU; it holds no weights, so it stays right while the network is trained.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> graph = ps.paths.reduction_graph(ps.trace(model, torch.zeros(1, 2)))
        >>> graph.num_edges, graph.num_classes, graph.edge(7)
        (10, 3, ('2.weight', (0, 1)))
    """
    expect_network(network)
    sources = []
    targets = []
    biases = []
    for name, parameter in network.parameters.items():
        labels = network.edges[name]
        sources.append(labels.source.cpu().expand(parameter.shape).reshape(-1))
        targets.append(labels.target.cpu().expand(parameter.shape).reshape(-1))
        biases.append(torch.full((parameter.numel(),), labels.bias))
    return ReductionGraph(
        names=tuple(network.parameters),
        shapes=tuple(p.shape for p in network.parameters.values()),
        source=torch.cat(sources),
        target=torch.cat(targets),
        bias=torch.cat(biases),
        num_classes=network.num_classes,
        class_names=network.class_names,
        monomials=network.monomials.cpu(),
    )


@tables_on_the_cpu()
@in_full_precision
def used_edges(network: Network, graph: ReductionGraph | None = None) -> Tensor:
    """Return which weights are on a path from an input to an output, bool ``[E]``.

    The backward direction of a bidirectional layer that is read at the last step, for example,
    takes a single step, so its recurrent weights are on none.

    Args:
        network: a traced network.
        graph: its reduction graph, if it is known already.

    Returns:
        The mask, in the order of :func:`reduction_graph`, on the CPU.

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        >>> ps.paths.used_edges(ps.trace(rnn, torch.zeros(1, 1, 1)))  # one time step
        tensor([ True, False])
    """
    graph = reduction_graph(network) if graph is None else graph
    # kappa1 counts the paths through a weight, those without the weight's own factor, so ones keep
    # all of them
    same = {name: _small_weights(p) for name, p in network.parameters.items()}
    paths = squared_gradients(network, same, list(same))
    return graph.flatten({name: dense(value) for name, value in paths.items()}).cpu() > 0


def _small_weights(parameter: Tensor) -> Tensor:
    """Positive weights of about 1 / sqrt(inputs), so that sums over many paths stay finite."""
    inputs = max(1, parameter[0].numel() if parameter.dim() else 1)
    return torch.full(parameter.shape, inputs**-0.5, dtype=torch.float64, device=parameter.device)
