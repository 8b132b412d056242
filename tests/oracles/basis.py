"""Skeletons by brute force: walks over the unit classes written down one by one."""

from __future__ import annotations

import re

import torch
from torch import Tensor

import pathspace as ps


def fixture_edges(net) -> list[tuple[str, tuple[int, ...]]]:
    """Edge of the model for every parameter number of a fixture's network."""
    edges = []
    for key in net.net["param_names"]:
        matrix, index = re.fullmatch(r"(\w+)\[(.*)\]", key).groups()
        edges.append((net.names[matrix], tuple(map(int, index.split(", ")))))
    return edges


def as_skeleton(network, net, known) -> ps.paths.Skeleton:
    """The fixture's skeleton for the traced network: classes are told by the edges that enter and leave them."""
    edges = fixture_edges(net)
    into, out_of = ({edges[i] for i in known[way].values()} for way in "IO")
    return ps.paths.Skeleton.from_edges(
        network,
        [next(iter(into & set(c.incoming))) for c in network.unit_classes],
        [next(iter(out_of & set(c.outgoing))) for c in network.unit_classes],
    )


def best_products(network) -> tuple[Tensor, Tensor]:
    """The largest product of weights over all walks from an input to each class, and from each class to an output.

    Walks that meet a class twice, and edges that lie on any such circle, are left out, as are biases.
    """
    weights = {name: p.detach() for name, p in network.parameters.items()}
    leaving: dict[int, list[tuple[int, float]]] = {c: [] for c in range(-1, network.num_classes)}
    into = {edge: c.index for c in network.unit_classes for edge in c.incoming}
    biases = {edge for c in network.unit_classes for edge in c.bias}
    out_of = {edge: c.index for c in network.unit_classes for edge in c.outgoing}
    for name, weight in weights.items():
        if network.edges[name].bias:
            continue
        for index in torch.ones_like(weight).nonzero().tolist():
            edge = (name, tuple(index))
            if edge not in biases:
                leaving[out_of.get(edge, -1)].append((into.get(edge, -1), abs(weight[tuple(index)].item())))

    def follows(start: int) -> set[int]:
        found, new = set(), {start}
        while new:
            found |= new
            new = {end for node in new for end, _ in leaving[node] if end >= 0} - found
        return found

    after = {c: follows(c) for c in range(network.num_classes)}

    def walk(node: int, product: float, best: dict[int, float], forwards: dict[int, list]) -> None:
        for end, weight in forwards[node]:
            circle = node >= 0 and end >= 0 and node in after[end] and end in after[node]
            if end >= 0 and not circle:
                best[end] = max(best.get(end, 0.0), product * weight)
                walk(end, product * weight, best, forwards)

    backwards: dict[int, list[tuple[int, float]]] = {c: [] for c in leaving}
    for node, edges in leaving.items():
        for end, weight in edges:
            backwards[end].append((node, weight))
    result = []
    for way in (leaving, backwards):
        best: dict[int, float] = {}
        walk(-1, 1.0, best, way)
        result.append(
            torch.tensor([best.get(c, 0.0) for c in range(network.num_classes)], dtype=torch.float64)
        )
    return result[0], result[1]
