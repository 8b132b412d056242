"""Basis paths: as many paths as path space has dimensions, whose values determine those of all others.

S19 with its Skeleton Method corrected: for every edge e = (u -> v) that is not O(c) of a class, the path that comes
to u along I, takes e, and goes on from v along O. Their number is #weights - #unit classes. (S19's choice, one edge in
and one out of every unit taken by itself, gives 22 paths of rank 16 in a stack of two recurrent layers of two units.)

Letters: c a unit class, e = (u -> v) an edge, w_e its weight, A and B the products along the skeleton, v_e the value
of the basis path through e.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Edge, Network
from pathspace.paths.condensation import cover
from pathspace.paths.reduction import ReductionGraph
from pathspace.paths.skeleton import Skeleton


def basis_paths(network: Network, skeleton: Skeleton) -> list[tuple[Edge, ...]]:
    """The paths in_I(u) . e . out_O(v), one for every edge e = (u -> v) outside O, in the order of the edges.

    Args:
        network: a traced network.
        skeleton: a skeleton of it.

    Returns:
        A list of paths, each a tuple of edges (parameter name, index) from input to output. Edges at classes without
        a skeleton edge are on no basis path and are left out; without such classes there are
        #weights - #unit classes paths.

    Raises:
        ValueError: the skeleton is another network's, or a matrix is used in both directions (a tied input and output
            embedding), so that no forest leads all paths from inputs to outputs.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> for path in ps.paths.basis_paths(network, ps.paths.skeleton(network)):
        ...     print(path)
        (('0.weight', (0, 0)), ('2.weight', (0, 0)))
        (('2.bias', (0,)),)
    """
    graph = _checked(network, skeleton)
    into: dict[int, tuple[int, ...]] = {0: ()}
    out_of: dict[int, tuple[int, ...]] = {0: ()}
    c = graph.num_classes
    for nodes in skeleton.levels:
        for node in nodes.tolist():
            edge = int(skeleton.edges[node])
            start = int(skeleton.starts[node])
            if node <= c:
                into[node] = (*into[start], edge)
            else:
                out_of[node - c] = (edge, *out_of[max(0, start - c)])
    left_out = set(skeleton.edges[1 + c :].tolist())
    ends = zip(graph.source.tolist(), graph.target.tolist(), strict=True)
    return [
        tuple(graph.edge(e) for e in (*into[u], number, *out_of[v]))
        for number, (u, v) in enumerate(ends)
        if number not in left_out and u in into and v in out_of
    ]


def basis_values(
    network: Network, skeleton: Skeleton, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The values v_e = A_u w_e B_v of the basis paths, without writing the paths down.

    They do not change under node-wise rescaling, and together they are what the network's function depends on.

    Args:
        network: a traced network.
        skeleton: a skeleton of it.
        parameters: values to use instead of the model's own, by name.

    Returns:
        Parameter name -> float64 tensor of the parameter's shape; at e = O(c), which is on no basis path of its own,
        A_c B_c; nan where a class has no skeleton edge.

    Raises:
        ValueError: see :func:`basis_paths`.
    """
    graph = _checked(network, skeleton)
    source = network.parameters if parameters is None else parameters
    products = skeleton.products(source)
    products = torch.where(products == 0, torch.nan, products)
    weights = graph.flatten(source).detach().double()
    a = products[cover(graph.source, graph.num_classes).to(weights.device)]
    b = products[cover(-graph.target, graph.num_classes).to(weights.device)]
    return graph.unflatten(a * weights * b)


def _checked(network: Network, skeleton: Skeleton) -> ReductionGraph:
    graph = skeleton.graph
    if graph.names != tuple(network.parameters) or graph.num_classes != network.num_classes:
        raise ValueError("the skeleton was chosen for another network: choose one for this network")
    if graph.signed:
        raise ValueError(
            "a matrix of the network is used in both directions (tied input and output embeddings), so its paths have "
            "no basis made of skeleton edges; untie it, or leave it outside"
        )
    return graph
