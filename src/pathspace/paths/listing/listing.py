"""All paths of a network, their values, and its output as a sum over them (S19 Eq. (3)).

    f(x)_k = sum over paths p from an input (or the bias node) to output k of  x_p a_p c_p v_p

x_p the input that p starts at (1 for the bias node), a_p = 1 if all units on p are active and 0
otherwise (the product of its gates), c_p the product of its fixed factors (1 but for averages and
running statistics), and v_p the product of its weights: the *value* of the path. Tied weights make
many paths of an unrolled network have one value.

Letters: P paths, E weights, n examples, L edges of the longest path; n_pe how often path p uses
weight e.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pathspace.network import Edge, Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.ops.listing import BIAS, NONE
from pathspace.paths.listing.unrolled import Activity, UnrolledGraph, unroll
from pathspace.paths.space.reduction import ReductionGraph, expect_own

LIMIT = 100_000
"""How many paths are listed unless more are asked for."""


class TooManyPathsError(ValueError):
    """A network has more paths than were allowed."""


@dataclass(frozen=True, eq=False)
class Paths:
    """A list of paths; made by :func:`enumerate_paths`.

    Attributes:
        reduction: the graph that numbers the weights.
        weights: numbers of the weights of every path in the order from input to output, ``[P, L]``,
            filled with -1.
        gates: numbers of its gates, ``[P, Lg]``, filled with -1.
        factor: c_p, ``[P]``.
        start: which input it starts at, ``[P]``; -1 for the bias node.
        end: which output it ends at, ``[P]``.
        num_outputs: how many outputs there are.
    """

    reduction: ReductionGraph
    weights: Tensor
    gates: Tensor
    factor: Tensor
    start: Tensor
    end: Tensor
    num_outputs: int

    def __len__(self) -> int:
        return len(self.factor)

    def __repr__(self) -> str:
        return f"Paths({len(self)} paths over {self.reduction.num_edges} weights)"

    @property
    def edges(self) -> tuple[tuple[Edge, ...], ...]:
        """Every path as a tuple of edges (parameter name, index tuple), from input to output."""
        edge = [self.reduction.edge(e) for e in range(self.reduction.num_edges)]
        return tuple(tuple(edge[e] for e in row if e != NONE) for row in self.weights.tolist())

    @property
    def columns(self) -> Tensor:
        """Numbers of the weights of every path, ``[P, L]``, filled with E, which no weight has."""
        return torch.where(self.weights == NONE, self.reduction.num_edges, self.weights)

    @cached_property
    def counts(self) -> Tensor:
        """The counting vectors n_pe, int64 ``[P, E]``."""
        result = self.weights.new_zeros(len(self), self.reduction.num_edges + 1)
        result.scatter_add_(1, self.columns, torch.ones_like(self.weights))
        return result[:, :-1]

    def values(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Compute the path values v_p = prod_e w_e^n_pe.

        Args:
            parameters: the weights by name, such as ``network.parameters``.

        Returns:
            ``[P]``, differentiable in the weights.
        """
        w = self.reduction.flatten(parameters)
        w = torch.cat([w, w.new_ones(1)])  # number -1: no edge
        return w[self.weights.to(w.device)].prod(1)

    def active(self, flow: Activity) -> Tensor:
        """Compute the activation status a_p of every path and example, ``[n, P]``: 0 or 1, or a product of slopes."""
        gates = torch.cat([flow.gates, flow.gates.new_ones(len(flow.gates), 1)], 1)
        return gates[:, self.gates].prod(2)

    def output(self, parameters: Mapping[str, Tensor], flow: Activity) -> Tensor:
        """Compute the network's outputs as a sum over its paths, S19 Eq. (3).

        Args:
            parameters: the weights by name; the gates stay those of ``flow``.
            flow: inputs and gates, from :func:`activity`.

        Returns:
            ``[n, outputs]`` in float64, differentiable in the weights.
        """
        v = self.values({name: p.to("cpu", torch.float64) for name, p in parameters.items()})
        x = torch.cat([flow.inputs, flow.inputs.new_ones(len(flow.inputs), 1)], 1)[:, self.start]
        # f(x)_k = sum over paths p that end at k of x_p a_p c_p v_p
        terms = x * self.active(flow) * self.factor * v
        return terms.new_zeros(len(x), self.num_outputs).index_add(1, self.end, terms)


@tables_on_the_cpu()
def enumerate_paths(
    network: Network, limit: int = LIMIT, *, graph: UnrolledGraph | None = None
) -> Paths:
    """List all paths of a network, from an input or the bias node to an output.

    A recurrent network is written out over the time steps of its example input, a convolution over
    its positions.

    Args:
        network: a traced network.
        limit: how many paths may be listed. Their number grows exponentially with depth and time.
        graph: the written-out graph, if it is known already.

    Returns:
        The paths.

    Raises:
        TooManyPathsError: there are more than ``limit``; the message says how many.
        UntraceableError: see :func:`unroll`.
        ValueError: the graph is another network's.

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        >>> network = ps.trace(rnn, torch.zeros(3, 1, 1), output=lambda r: r[0][-1])
        >>> paths = ps.paths.enumerate_paths(network)
        >>> paths.counts.tolist()  # x_3, x_2, x_1: one recurrent edge more at each
        [[1, 2], [1, 1], [1, 0]]
    """
    graph = unroll(network) if graph is None else graph
    expect_own(graph.reduction, network, "graph was written out")
    if graph.num_paths > limit:
        raise TooManyPathsError(
            f"the network has {count_in_words(graph.num_paths)} paths, more than the limit of {limit}: allow more with "
            "limit=, or trace it with fewer time steps or a smaller image"
        )
    rows = list(_walk(graph))
    return Paths(
        reduction=graph.reduction,
        weights=_padded([row[0] for row in rows]),
        gates=_padded([row[1] for row in rows]),
        factor=torch.tensor([row[2] for row in rows], dtype=torch.float64),
        start=torch.tensor([row[3] for row in rows], dtype=torch.long),
        end=torch.tensor([row[4] for row in rows], dtype=torch.long),
        num_outputs=len(graph.outputs),
    )


_Row = tuple[tuple[int, ...], tuple[int, ...], float, int, int]
"""A path: its weights, its gates, the product of its fixed factors, its input and its output."""


def _walk(graph: UnrolledGraph) -> Iterator[_Row]:
    """Yield all paths of a graph, depth first."""
    targets = graph.target.tolist()
    weight = graph.weight.tolist()
    gate = graph.gate.tolist()
    factor = graph.factor.tolist()
    ends: dict[int, list[int]] = {}
    for place, node in enumerate(graph.outputs.tolist()):
        ends.setdefault(node, []).append(place)
    starts = [(BIAS, NONE), *((node, place) for place, node in enumerate(graph.inputs.tolist()))]
    for first, start in starts:
        unfinished: list[tuple[int, tuple[int, ...], tuple[int, ...], float]] = [
            (first, (), (), 1.0)
        ]
        while unfinished:
            node, weights, gates, c = unfinished.pop()
            for end in ends.get(node, ()):
                yield weights, gates, c, start, end
            for edge in graph.leaving[node]:
                if not graph.ways_out[targets[edge]]:
                    continue
                longer = weights if weight[edge] == NONE else (*weights, weight[edge])
                opened = gates if gate[edge] == NONE else (*gates, gate[edge])
                unfinished.append((targets[edge], longer, opened, c * factor[edge]))


def count_in_words(number: int) -> str:
    """Format a whole number in full, or to two digits if it is long."""
    if number < 10**12:
        return f"{number:,}"
    digits = str(number)
    return f"{digits[0]}.{digits[1]}e{len(digits) - 1}"


def _padded(rows: list[tuple[int, ...]]) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = [[*row, *([NONE] * (width - len(row)))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), width)
