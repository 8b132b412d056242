"""Data-dependent path normalization on explicit graphs, by visiting every node, edge and example.

    gamma_v^2 = alpha stat_i[z_v^i] + (1 - alpha) sum_e w_e^2 gamma_u^2
    psi_u     = [output] + (1 - alpha) sum_e psi_v w_e^2
    kappa_p   = (1 - alpha) sum_{e of p} psi_v gamma_u^2 + alpha sum_o psi_o stat_i[dz_o^i/dp]
    by edges  : ... alpha sum_o psi_o sum_{e of p} stat_i[h_u^i dz_o^i/dz_v^i]

Nodes are numbered in topological order; hidden nodes have a ReLU, outputs and inputs do not.
"""

from __future__ import annotations

import numpy as np

from oracles.graph import Graph


class OnData:
    def __init__(
        self,
        graph: Graph,
        weights: list[float],
        inputs: np.ndarray,
        one: int | None,
        alpha: float,
        statistic: str,
    ) -> None:
        self.graph, self.alpha, self.statistic = graph, alpha, statistic
        self.weight = [1.0 if p < 0 else weights[p] for *_, p in graph.edges]
        self.count = len(weights)
        n = len(inputs)
        z = np.zeros((graph.nodes, n))
        data = [v for v in graph.inputs if v != one]
        z[data] = inputs.T
        if one is not None:
            z[one] = 1.0
        entering = {
            v: [k for k, e in enumerate(graph.edges) if e[1] == v] for v in range(graph.nodes)
        }
        linear = {*graph.inputs, *graph.outputs}
        self.h = z.copy()
        self.slope = np.ones((graph.nodes, n))
        self.gamma = np.ones(graph.nodes)
        for v in range(graph.nodes):
            if v in graph.inputs:
                continue
            z[v] = sum(self.weight[k] * self.h[graph.edges[k][0]] for k in entering[v])
            if v not in linear:
                self.slope[v] = z[v] > 0
            self.h[v] = z[v] * self.slope[v]
            path = sum(self.weight[k] ** 2 * self.gamma[graph.edges[k][0]] for k in entering[v])
            self.gamma[v] = alpha * self.stat(z[v]) + (1 - alpha) * path
        self.psi = np.zeros(graph.nodes)
        self.psi[list(graph.outputs)] = 1.0
        for k in sorted(range(len(graph.edges)), key=lambda k: -graph.edges[k][1]):
            u, v, _ = graph.edges[k]
            self.psi[u] += (1 - alpha) * self.psi[v] * self.weight[k] ** 2
        self.entering = entering

    def stat(self, values: np.ndarray) -> float:
        return (
            float((values**2).mean()) if self.statistic == "second_moment" else float(values.var())
        )

    @property
    def norm(self) -> float:
        return float(self.gamma[list(self.graph.outputs)].sum())

    def slopes_of(self, o: int) -> np.ndarray:
        """dz_o^i/dz_v^i for all v, [nodes, n]."""
        d = np.zeros_like(self.h)
        d[o] = 1.0
        for v in range(o, -1, -1):
            for k in self.entering[v]:
                u = self.graph.edges[k][0]
                d[u] += d[v] * self.weight[k] * self.slope[u]
        return d

    def kappa(self, *, by_edges: bool = False) -> list[float]:
        result = np.zeros(self.count)
        for u, v, p in self.graph.edges:
            if p >= 0:
                result[p] += (1 - self.alpha) * self.psi[v] * self.gamma[u]
        for o in range(self.graph.nodes):
            if o in self.graph.inputs or self.psi[o] == 0:
                continue
            d = self.slopes_of(o)
            jacobian = np.zeros((self.count, self.h.shape[1]))
            for u, v, p in self.graph.edges:
                if p >= 0:
                    jacobian[p] += self.h[u] * d[v]
                    if by_edges:
                        result[p] += self.alpha * self.psi[o] * self.stat(self.h[u] * d[v])
            if not by_edges:
                result += [self.alpha * self.psi[o] * self.stat(row) for row in jacobian]
        return result.tolist()
