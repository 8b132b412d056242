"""Skeletons: two forests of edges over the unit classes that turn weights into coordinates of path space.

S19: "Path Space for Recurrent Neural Networks with ReLU Activations", 2019, after Meng et al.,
"G-SGD: Optimizing ReLU Neural Networks in its Positively Scale-Invariant Space", 2018.

Every class c gets I(c), one edge that enters it, and O(c), one that leaves it; following I back
leads to an input, following O on leads to an output. The products of weights along them are A_c and
B_c. S19's Skeleton Method chooses one edge in and one edge out per unit by itself, and its paths
become dependent with two hidden layers or a stacked RNN; the forests here do not (see ``basis``).

Letters: c a unit class, C their number, e an edge (parameter element) from u to v, w_e its weight,
E their number. Nodes are those of the double cover (see ``condensation``), on which O is a forest
like I: O(c) is the edge that enters the inverse of c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pathspace.network import Edge, Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.network import current_values
from pathspace.paths.space.condensation import condensation, cover
from pathspace.paths.space.reduction import ReductionGraph, reduction_graph, used_edges

Rule = Literal["largest", "cyclic", "random"]
RULES: tuple[Rule, ...] = get_args(Rule)

_TIE = 1e-6
"""Relative difference below which two products count as equal: a choice must not hang on how they were rounded."""


@dataclass(frozen=True, eq=False)
class Skeleton:
    """Two forests of skeleton edges over the unit classes; made by :func:`skeleton`.

    Attributes:
        graph: the reduction graph that numbers the edges.
        edges: the edge that enters every node of the double cover, int64 ``[1 + 2 C]``: place 1 + c
            has I(c), place 1 + C + c has O(c); -1 where there is none.
        starts: the node from which each of these edges comes, likewise.
    """

    graph: ReductionGraph
    edges: Tensor
    starts: Tensor

    def as_state(self) -> dict[str, Any]:
        """Return what :meth:`restored` makes the skeleton of again."""
        count = self.graph.num_edges
        return {"edges": self.edges.clone(), "starts": self.starts.clone(), "num_edges": count}

    @staticmethod
    def restored(graph: ReductionGraph, state: dict[str, Any]) -> Skeleton:
        """Return the skeleton of a state, whose entries are taken out of it.

        Raises:
            ValueError: it belongs to another network.
        """
        edges = state.pop("edges").cpu()
        starts = state.pop("starts").cpu()
        count = state.pop("num_edges")
        if len(edges) != 1 + 2 * graph.num_classes or count != graph.num_edges:
            raise ValueError(
                f"the skeleton of this state belongs to a network of {count} weights and {len(edges) // 2} unit "
                f"classes, and this one has {graph.num_edges} and {graph.num_classes}: was the model the same?"
            )
        return Skeleton(graph, edges, starts)

    @staticmethod
    @tables_on_the_cpu()
    def from_edges(
        network: Network, incoming: Sequence[Edge | None], outgoing: Sequence[Edge | None]
    ) -> Skeleton:
        """Return a skeleton of edges chosen by hand.

        Args:
            network: a traced network.
            incoming: I(c) for every unit class, as (parameter name, index); None for a class
                without one.
            outgoing: O(c) likewise.

        Returns:
            The skeleton.

        Raises:
            ValueError: the lists are not one edge per class, an edge is at no end of its class or
                on no path, or the edges run in a circle or start at a class without one.
            KeyError: there is no such edge.
        """
        graph = reduction_graph(network)
        c = graph.num_classes
        if len(incoming) != c or len(outgoing) != c:
            raise ValueError(
                f"need one edge for each of the {c} classes, got {len(incoming)} and {len(outgoing)}"
            )
        edges = torch.full((1 + 2 * c,), -1)
        starts = torch.zeros(1 + 2 * c, dtype=torch.long)
        used = used_edges(network, graph)
        for node, edge in enumerate([*incoming, *outgoing], start=1):
            if edge is None:
                continue
            number = graph.number(edge)
            if not used[number]:
                raise ValueError(f"skeleton edge {edge} is on no path from an input to an output")
            ends = graph.source[number], graph.target[number]
            for start, end in (ends, (-ends[1], -ends[0])):
                if graph.single[number] and int(cover(end, c)) == node:
                    edges[node] = number
                    starts[node] = cover(start, c)
            if edges[node] < 0:
                way, name = ("enter", "incoming") if node <= c else ("leave", "outgoing")
                raise ValueError(f"{name} edge {edge} does not {way} class {(node - 1) % c}")
        result = Skeleton(graph, edges, starts)
        seen = torch.zeros_like(edges, dtype=torch.bool)
        seen[torch.cat([torch.zeros(1, dtype=torch.long), *result.levels])] = True
        lost = ((edges >= 0) & ~seen).nonzero().flatten().tolist()
        if lost:
            raise ValueError(
                f"skeleton edge {graph.edge(int(edges[lost[0]]))} leads back to no input, or on to no output"
            )
        return result

    @property
    def num_classes(self) -> int:
        """C, the number of unit classes."""
        return self.graph.num_classes

    @cached_property
    def incoming(self) -> tuple[Edge | None, ...]:
        """I(c) for every unit class; None where no weight other than zero leads to it from an input."""
        return self._named(slice(1, 1 + self.num_classes))

    @cached_property
    def outgoing(self) -> tuple[Edge | None, ...]:
        """O(c) for every unit class; None where no weight other than zero leads from it to an output."""
        return self._named(slice(1 + self.num_classes, None))

    def _named(self, nodes: slice) -> tuple[Edge | None, ...]:
        return tuple(None if e < 0 else self.graph.edge(e) for e in self.edges[nodes].tolist())

    @cached_property
    def tied(self) -> Tensor:
        """Mask of classes with units of the inverse scale, bool ``[C]``: no pair of forests serves both directions."""
        tied = torch.zeros(self.num_classes + 1, dtype=torch.bool)
        for nodes in (self.graph.source, self.graph.target):
            ends = self.graph.factors(nodes)
            tied[-ends[ends < 0]] = True
        return tied[1:]

    @cached_property
    def complete(self) -> Tensor:
        """Mask of classes with both I(c) and O(c), and no units of the inverse scale, bool ``[C]``."""
        result = (self.edges[1:] >= 0).reshape(2, -1)
        return result[0] & result[1] & ~self.tied

    @property
    def incomplete(self) -> tuple[int, ...]:
        """The classes that are not complete, such as those of dead units."""
        return tuple((~self.complete).nonzero().flatten().tolist())

    @cached_property
    def levels(self) -> tuple[Tensor, ...]:
        """Nodes with 1, 2, ... skeleton edges on the way: the order in which products are computed."""
        levels = []
        waiting = (self.edges >= 0).nonzero().flatten()
        reached = torch.zeros_like(self.edges, dtype=torch.bool)
        reached[0] = True
        while waiting.numel():
            ready = reached[self.starts[waiting]]
            if not bool(ready.any()):
                break
            levels.append(waiting[ready])
            reached[levels[-1]] = True
            waiting = waiting[~ready]
        return tuple(levels)

    def products(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Products of weights along the forests.

        Args:
            parameters: name -> values of the network's parameters.

        Returns:
            float64 ``[1 + 2 C]``: 1, then A_c for every class, then B_c; 0 where there is no edge.
        """
        weights = self.graph.flatten(parameters).detach().double()
        result = weights.new_zeros(1 + 2 * self.num_classes)
        result[0] = 1
        for nodes in self.levels:
            # A_c = w_e A_u for e = I(c) = (u -> c); B_c = w_e B_v for e = O(c) = (c -> v)
            at = nodes.to(weights.device)
            result[at] = (
                weights[self.edges[nodes].to(at.device)] * result[self.starts[nodes].to(at.device)]
            )
        return result

    def __repr__(self) -> str:
        missing = f", {len(self.incomplete)} of them incomplete" if self.incomplete else ""
        return f"Skeleton({self.num_classes} unit classes{missing})"


@tables_on_the_cpu()
def skeleton(
    network: Network, rule: Rule = "largest", generator: torch.Generator | None = None
) -> Skeleton:
    """Choose skeleton edges: one that enters every unit class and one that leaves it.

    .. code-block:: text

        A_c = w_e A_u  for e = I(c) = (u -> c),   A = 1 at inputs
        B_c = w_e B_v  for e = O(c) = (c -> v),   B = 1 at outputs

    Zero weights, weights on no path (see :func:`used_edges`), biases, recurrent edges (between
    classes of one cycle), and edges at units whose scale is a product of scales are never taken.
    Residual blocks are cycles of the stream that they read and add to; classes of such a cycle that
    no edge joins to the outside take an edge of it.

    - ``"largest"`` maximizes the sizes of A_c and B_c for every class at once. All products that
      lead to a class change by its own scale under node-wise rescaling, so this choice, unlike that
      of the largest weight, does not change. Products within a millionth of the largest count as
      equal to it; the first of them is taken.
    - ``"cyclic"`` is S19's Algorithm 1: unit j of a layer takes edge j mod n of the n there are.
    - ``"random"`` takes any edge.

    Args:
        network: a traced network, whose weights are looked at.
        rule: which edge is chosen.
        generator: source of random numbers on the CPU, for ``"random"``; torch's default if None.

    Returns:
        The skeleton; it keeps no weights. Classes without a usable edge are in ``incomplete``.

    Raises:
        ValueError: there is no such rule.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 2))
        >>> model[0].weight.data = torch.tensor([[0.5, -2.0]])
        >>> model[2].weight.data = torch.tensor([[3.0], [1.0]])
        >>> skeleton = ps.paths.skeleton(ps.trace(model, torch.zeros(1, 2)))
        >>> skeleton.incoming, skeleton.outgoing
        ((('0.weight', (0, 1)),), (('2.weight', (0, 0)),))
    """
    if rule not in RULES:
        raise ValueError(f"rule must be 'largest', 'cyclic' or 'random', got {rule!r}")
    current_values(network)
    graph = reduction_graph(network)
    arcs = _Arcs.of(graph, network)
    logs = graph.flatten(network.parameters).detach().double().abs().log().cpu()
    if rule == "largest":
        preference = None
    elif rule == "random":
        drawn = torch.rand(2 * graph.num_edges, dtype=torch.float64, generator=generator)
        preference = drawn[arcs.number]
    else:
        preference = -arcs.cyclic_rank(graph)
    return _grow(graph, arcs, logs, preference)


@dataclass(frozen=True, eq=False)
class _Arcs:
    """Arcs of the double cover that may be in a skeleton, zero weights included, sorted by the level of their end.

    Each edge u -> v of the graph is two arcs: u -> v, of the forest of incoming edges, and -v ->
    -u, of the forest of outgoing edges.

    Attributes:
        edge: the number of the edge, int64 ``[N]``.
        number: the number of the arc: that of the edge, plus E for the arc -v -> -u.
        start: the node at which the arc starts, int64 ``[N]``.
        end: the node at which it ends, int64 ``[N]``.
        inside: whether both nodes are in one cycle.
        bounds: the positions at which the arcs of a level begin, and N.
    """

    edge: Tensor
    number: Tensor
    start: Tensor
    end: Tensor
    inside: Tensor
    bounds: list[int]

    @staticmethod
    def of(graph: ReductionGraph, network: Network) -> _Arcs:
        component, level = condensation(network, graph)
        source = torch.where(graph.single, graph.source, 0)
        target = torch.where(graph.single, graph.target, 0)
        # each edge and its reverse in the double cover
        start = cover(torch.cat([source, -target]), graph.num_classes)
        end = cover(torch.cat([target, -source]), graph.num_classes)
        usable = used_edges(network, graph) & ~graph.bias & graph.single
        number = ((end > 0) & (start != end) & usable.repeat(2)).nonzero().flatten()
        inside = component[start] == component[end]
        # an edge inside a cycle serves only classes that none from outside reaches
        reached = torch.zeros_like(level, dtype=torch.bool)
        reached[end[number[~inside[number]]]] = True
        number = number[~(inside & reached[end])[number]]
        number = number[torch.argsort(level[end[number]], stable=True)]
        counts = torch.zeros(1, dtype=torch.long)
        if number.numel():
            counts = torch.bincount(level[end[number]])
        return _Arcs(
            edge=number % max(1, graph.num_edges),
            number=number,
            start=start[number],
            end=end[number],
            inside=inside[number],
            bounds=[0, *counts.cumsum(0).tolist()],
        )

    def cyclic_rank(self, graph: ReductionGraph) -> Tensor:
        """Return the rank of each arc by the cyclic rule: 0 for arc j mod n of the n arcs to unit j of a layer.

        The nodes whose first arcs are elements of one parameter are the units of a layer.
        """
        # arcs by the node at which they end; node k has the positions begin[k] to begin[k] + count[k]
        order = torch.argsort(self.end, stable=True)
        end = self.end[order]
        is_first = torch.ones_like(end, dtype=torch.bool)
        is_first[1:] = end[1:] != end[:-1]
        begin = is_first.nonzero().flatten()
        count = torch.diff(begin, append=torch.tensor([len(end)]))
        node = is_first.long().cumsum(0) - 1
        unit = self._number_in_layer(graph, order[begin])
        shift = (unit % count)[node]
        position = torch.arange(len(end)) - begin[node]
        rank = torch.empty_like(order)
        rank[order] = (position - shift) % count[node]
        return rank.double()

    def _number_in_layer(self, graph: ReductionGraph, first_arcs: Tensor) -> Tensor:
        """Return j of nodes, counted within each layer from 0 on, from the first arc of each."""
        sizes = torch.tensor([shape.numel() for shape in graph.shapes]).repeat(2)
        layer = torch.bucketize(self.number[first_arcs], sizes.cumsum(0), right=True)
        by_layer = torch.argsort(layer, stable=True)
        sorted_layer = layer[by_layer]
        begin_of_layer = torch.searchsorted(sorted_layer, sorted_layer)
        unit = torch.empty_like(layer)
        unit[by_layer] = torch.arange(len(layer)) - begin_of_layer
        return unit


def _grow(graph: ReductionGraph, arcs: _Arcs, logs: Tensor, preference: Tensor | None) -> Skeleton:
    """Grow both forests of a skeleton, level by level.

    Args:
        graph: the reduction graph.
        arcs: the arcs that may be taken.
        logs: log |w_e|, float64 ``[E]``.
        preference: a node takes the arc with the largest preference, ``[N]``; None for the arc with
            the largest product |A_c| or |B_c|.
    """
    size = 1 + 2 * graph.num_classes
    edges = torch.full((size,), -1)
    starts = torch.zeros(size, dtype=torch.long)
    # log |A_c|, log |B_c|
    products = torch.full((size,), -torch.inf, dtype=torch.float64)
    products[0] = 0

    def choose(arc: Tensor) -> None:
        """Take the best of some arcs at each node where they end; those that start at no path are passed over."""
        product = products[arcs.start[arc]] + logs[arcs.edge[arc]]
        is_path = product > -torch.inf
        arc = arc[is_path]
        product = product[is_path]
        score = product if preference is None else preference[arc]
        end = arcs.end[arc]
        best = torch.full_like(products, -torch.inf).scatter_reduce(0, end, score, "amax")
        tied = (score >= best[end] - _TIE).nonzero().flatten()
        # a node where none of them ends keeps the number len(arc)
        first = torch.full((size,), len(arc)).scatter_reduce(0, end[tied], tied, "amin")
        chosen = first[first < len(arc)]
        node = end[chosen]
        best_arc = arc[chosen]
        edges[node] = arcs.edge[best_arc]
        starts[node] = arcs.start[best_arc]
        products[node] = product[chosen]

    for begin, end in pairwise(arcs.bounds):
        inside = arcs.inside[begin:end]
        choose(begin + (~inside).nonzero().flatten())
        rest = begin + inside.nonzero().flatten()
        # through a cycle, one step further from the nodes that are reached at a time
        while rest.numel():
            reached = edges >= 0
            starts_reached = reached[arcs.start[rest]]
            ends_reached = reached[arcs.end[rest]]
            choose(rest[starts_reached & ~ends_reached])
            if torch.equal(reached, edges >= 0):
                break
    return Skeleton(graph, edges, starts)
