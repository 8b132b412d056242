"""Path norm and both terms of kappa by writing down every path of an explicit weighted graph.

Alphabet: e an edge (source node, target node, parameter index), i a parameter, P a path (a tuple of
edges from an input or the bias node to an output), p_i a weight. A parameter index of -1 is a fixed
weight of one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

Edge = tuple[int, int, int]


@dataclass
class Graph:
    """A weighted graph; `inputs` holds the bias node too."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    nodes: int = 0

    def node(self, *, is_input: bool = False, is_output: bool = False) -> int:
        index = self.nodes
        self.nodes += 1
        if is_input:
            self.inputs.append(index)
        if is_output:
            self.outputs.append(index)
        return index

    def edge(self, source: int, target: int, parameter: int) -> None:
        self.edges.append((source, target, parameter))


def enumerate_paths(graph: Graph) -> list[tuple[Edge, ...]]:
    """List every path from an input or the bias node to an output."""
    leaving = defaultdict(list)
    for edge in graph.edges:
        leaving[edge[0]].append(edge)
    outputs = set(graph.outputs)
    paths: list[tuple[Edge, ...]] = []
    unfinished: list[tuple[int, tuple[Edge, ...]]] = [(node, ()) for node in graph.inputs]
    while unfinished:
        node, path = unfinished.pop()
        if node in outputs:
            paths.append(path)
        unfinished.extend((edge[1], (*path, edge)) for edge in leaving[node])
    return paths


def _squares(path, weights, without=()):
    """Product of the squared weights of a path, leaving out the edges at the positions `without`."""
    return math.prod(
        weights[parameter] ** 2
        for position, (_, _, parameter) in enumerate(path)
        if parameter >= 0 and position not in without
    )


def squared_path_norm(graph: Graph, weights: list[float]) -> float:
    # gamma_net^2 = sum_P prod_{e in P} p_e^2
    return math.fsum(_squares(path, weights) for path in enumerate_paths(graph))


def kappa1(graph: Graph, weights: list[float]) -> list[float]:
    # kappa1_i = sum_P sum_{e in P, e of i} prod_{e' in P, e' != e} p_{e'}^2
    terms: list[list[float]] = [[] for _ in weights]
    for path in enumerate_paths(graph):
        for position, (_, _, parameter) in enumerate(path):
            if parameter >= 0:
                terms[parameter].append(_squares(path, weights, (position,)))
    return [math.fsum(column) for column in terms]


def kappa2(graph: Graph, weights: list[float]) -> list[float]:
    # kappa2_i = 2 p_i^2 sum_P sum_{ordered pairs e != e' in P, both of i} prod_{the other edges}
    # p^2
    terms: list[list[float]] = [[] for _ in weights]
    for path in enumerate_paths(graph):
        for first, (_, _, parameter) in enumerate(path):
            for second, (_, _, other) in enumerate(path):
                if parameter >= 0 and parameter == other and first != second:
                    rest = _squares(path, weights, (first, second))
                    terms[parameter].append(2 * weights[parameter] ** 2 * rest)
    return [math.fsum(column) for column in terms]


class _Numbered:
    """Parameter indices in the order in which named tensors are asked for."""

    def __init__(self) -> None:
        self.index: dict[tuple, int] = {}

    def __call__(self, *key) -> int:
        return self.index.setdefault(key, len(self.index))


def layered(
    widths: list[int], *, bias: bool = True, skips: bool = False
) -> tuple[Graph, dict[tuple, int]]:
    """Fully connected layers; with `skips`, every layer also reads all layers before its predecessor.

    Keys of the parameters: ("weight", layer from, layer to, row, column) and ("bias", layer to,
    row).
    """
    graph, number = Graph(), _Numbered()
    one = graph.node(is_input=True) if bias else -1
    layers = [[graph.node(is_input=True) for _ in range(widths[0])]]
    for to, width in enumerate(widths[1:], start=1):
        layers.append([graph.node(is_output=to == len(widths) - 1) for _ in range(width)])
        for start in range(to) if skips else (to - 1,):
            for row, target in enumerate(layers[to]):
                for column, source in enumerate(layers[start]):
                    graph.edge(source, target, number("weight", start, to, row, column))
        if bias:
            for row, target in enumerate(layers[to]):
                graph.edge(one, target, number("bias", to, row))
    return graph, number.index


def recurrent(
    inputs: int,
    hidden: list[int],
    outputs: int,
    steps: int,
    *,
    emit: str = "last",
    bias: bool = True,
) -> tuple[Graph, dict[tuple, int]]:
    """Stacked recurrent layers unrolled over `steps`, a linear read-out at the last step or at all of them.

    Keys: ("in", layer, row, column), ("rec", layer, row, column), ("bias", layer, row), ("out",
    row, column) and ("out bias", row). There is no initial state: h_0 = 0 carries no path.
    """
    graph, number = Graph(), _Numbered()
    one = graph.node(is_input=True) if bias else -1
    before: list[list[int]] = [[] for _ in hidden]
    for step in range(steps):
        below = [graph.node(is_input=True) for _ in range(inputs)]
        for layer, width in enumerate(hidden):
            now = [graph.node() for _ in range(width)]
            for row, target in enumerate(now):
                for column, source in enumerate(below):
                    graph.edge(source, target, number("in", layer, row, column))
                for column, source in enumerate(before[layer]):
                    graph.edge(source, target, number("rec", layer, row, column))
                if bias:
                    graph.edge(one, target, number("bias", layer, row))
            before[layer] = below = now
        if emit == "all" or step == steps - 1:
            for row in range(outputs):
                target = graph.node(is_output=True)
                for column, source in enumerate(below):
                    graph.edge(source, target, number("out", row, column))
                if bias:
                    graph.edge(one, target, number("out bias", row))
    return graph, number.index
