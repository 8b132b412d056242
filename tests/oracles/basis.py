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

    Walks that meet a class twice, and edges that lie on any such circle, are left out, as are
    biases.
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
                leaving[out_of.get(edge, -1)].append(
                    (into.get(edge, -1), abs(weight[tuple(index)].item()))
                )

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
            torch.tensor(
                [best.get(c, 0.0) for c in range(network.num_classes)], dtype=torch.float64
            )
        )
    return result[0], result[1]


class PathValues:
    """The values of the basis paths as products over lists of edges, and dL/dv from dL/dw by a linear system.

    dL/dw = J^T dL/dv with J = dv/dw. The columns of J for the weights outside O are as many as the
    paths; those for O must then fit too, or the loss does not depend on the weights through the
    paths alone.
    """

    def __init__(self, network, skeleton) -> None:
        self.network, self.graph = network, skeleton.graph
        paths = ps.paths.basis_paths(network, skeleton)
        self.paths = [torch.tensor([self.graph.number(edge) for edge in path]) for path in paths]
        held = {self.graph.number(edge) for edge in skeleton.outgoing}
        used = ps.paths.used_edges(network)
        self.places = [e for e in range(self.graph.num_edges) if e not in held and used[e]]
        assert len(self.places) == len(self.paths)

    def _weights(self) -> Tensor:
        return self.graph.flatten(self.network.parameters).detach()

    def now(self) -> Tensor:
        w = self._weights()
        return torch.stack([w[path].prod() for path in self.paths])

    def jacobian(self) -> Tensor:
        w = self._weights()
        result = torch.zeros(len(self.paths), len(w), dtype=w.dtype)
        for row, path in zip(result, self.paths, strict=True):
            for i, edge in enumerate(path.tolist()):
                row[edge] += w[torch.cat([path[:i], path[i + 1 :]])].prod()
        return result

    def gradient(self) -> Tensor:
        g = self.graph.flatten({name: p.grad for name, p in self.network.parameters.items()})
        jacobian = self.jacobian()
        found = torch.linalg.solve(jacobian[:, self.places].T, g[self.places])
        assert torch.allclose(jacobian.T @ found, g, rtol=1e-6, atol=1e-9)
        return found
