"""Cycles of unit classes, and the order in which paths run through what is not a cycle.

Signed nodes: a unit may have the inverse scale of its class (tied input and output embeddings).
Every edge s -> t is therefore read a second time as -t -> -s: on the *double cover*, whose nodes
are 0 (fixed scale), 1 + c (class c) and 1 + C + c (its inverse), edges have one direction. Without
inverse scales it is the reduction graph and, apart from it, the reduction graph reversed.

Letters: C number of unit classes, c one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.space.reduction import ReductionGraph


def cover(nodes: Tensor, num_classes: int) -> Tensor:
    """Numbers in the double cover of signed nodes (see :class:`ReductionGraph`): 0, 1 + c or 1 + C + c."""
    return torch.where(nodes < 0, num_classes - nodes, nodes)


def condensation(network: Network, graph: ReductionGraph) -> tuple[Tensor, Tensor]:
    """Strongly connected components of the double cover, and how deep each lies.

    Recurrent matrices, and residual blocks that lead back to the stream they read, tie classes into
    cycles. Zero weights count like any others, so the result does not change while a network is
    trained.

    Returns:
        Two int64 tensors ``[1 + 2 C]``: the component of every node, and its level. An edge between
        two components leads from a lower to a higher level. Node 0, where paths start and end, is
        left out: it has level 0 and a component of its own.
    """
    size = 1 + 2 * network.num_classes
    successors: list[list[int]] = [[] for _ in range(size)]
    for labels in network.edges.values():
        if labels.bias:
            continue
        sources = graph.factors(labels.source.cpu())
        targets = graph.factors(labels.target.cpu())
        for source, target in product(sources, targets):
            _add_edges(successors, source, target, network.num_classes)
    component = _components(successors)
    # components are numbered in an order in which every edge leads to a smaller number
    level = [0] * (max(component) + 1)
    order = sorted(range(len(successors)), key=lambda node: -component[node])
    for node in order:
        here = component[node]
        for after in successors[node]:
            there = component[after]
            if there != here:
                level[there] = max(level[there], level[here] + 1)
    of_node = torch.tensor(component[:size])
    level_of_node = torch.tensor(level)[of_node]
    # without gaps, from 1 on
    _, levels = torch.unique(level_of_node, return_inverse=True)
    levels = levels + 1
    levels[0] = 0
    return of_node, levels


def _varying_dims(nodes: Tensor) -> set[int]:
    """Return the dimensions, counted from the last, in which a table has several entries."""
    return {d for d, n in enumerate(reversed(nodes.shape)) if n > 1}


def _add_edges(
    successors: list[list[int]], source: Tensor, target: Tensor, num_classes: int
) -> None:
    are_apart = _varying_dims(source).isdisjoint(_varying_dims(target))
    for start, end in ((source, target), (-target, -source)):
        start = cover(start, num_classes)
        end = cover(end, num_classes)
        if are_apart:
            # all sources with all targets: one node between them stands for the whole product
            hub = len(successors)
            successors.append(_without_fixed(end.unique()))
            for node in _without_fixed(start.unique()):
                successors[node].append(hub)
        else:
            pairs = torch.stack(torch.broadcast_tensors(start, end)).reshape(2, -1).unique(dim=1)
            for s, t in pairs[:, (pairs > 0).all(0)].t().tolist():
                successors[s].append(t)


def _without_fixed(nodes: Tensor) -> list[int]:
    return nodes[nodes > 0].tolist()


def _components(successors: list[list[int]]) -> list[int]:
    """Component of every node, numbered so that edges lead to smaller numbers (Tarjan 1972, without recursion)."""
    index = [-1] * len(successors)
    low = [0] * len(successors)
    component = [-1] * len(successors)
    stack: list[int] = []
    visited = result = 0
    for root in range(len(successors)):
        if index[root] >= 0:
            continue
        work: list[tuple[int, Iterable[int]]] = [(root, iter(successors[root]))]
        index[root] = low[root] = visited
        visited += 1
        stack.append(root)
        while work:
            node, rest = work[-1]
            deeper = None
            for after in rest:
                if index[after] < 0:
                    deeper = after
                    break
                if component[after] < 0:
                    low[node] = min(low[node], index[after])
            if deeper is not None:
                index[deeper] = low[deeper] = visited
                visited += 1
                stack.append(deeper)
                work.append((deeper, iter(successors[deeper])))
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                while True:
                    member = stack.pop()
                    component[member] = result
                    if member == node:
                        break
                result += 1
    return component
