"""Basis paths: as many paths as path space has dimensions, whose values determine those of all others.

S19 with its Skeleton Method corrected: for every edge e = (u -> v) that is not O(c) of a class, the
path that comes to u along I, takes e, and goes on from v along O. Their number is #weights - #unit
classes, counting those that are on a path at all. (S19's choice, one edge in and one out of every
unit taken by itself, gives 22 paths of rank 16 in a stack of two recurrent layers of two units.)

Letters: c a unit class, e = (u -> v) an edge, w_e its weight, A and B the products along the
skeleton, v_e the value of the basis path through e.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Edge, Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_network, expect_paths
from pathspace.network.network import current_values
from pathspace.paths.space.condensation import cover
from pathspace.paths.space.reduction import ReductionGraph, expect_own, used_edges
from pathspace.paths.space.skeleton import Skeleton


@tables_on_the_cpu()
def basis_paths(network: Network, skeleton: Skeleton) -> list[tuple[Edge, ...]]:
    """Return the paths in_I(u) . e . out_O(v), one for every edge e = (u -> v) outside O, in the order of the edges.

    Args:
        network: a traced network.
        skeleton: a skeleton of it.

    Returns:
        A list of paths, each a tuple of edges (parameter name, index) from input to output. Edges
        at classes without a skeleton edge are on no basis path and are left out, and so are weights
        on no path of the network (see :func:`used_edges`); without either there are #weights -
        #unit classes paths.

    Raises:
        ValueError: the skeleton is another network's, or a matrix is used in both directions (a
            tied input and output embedding), so that no forest leads all paths from inputs to
            outputs.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> for path in ps.paths.basis_paths(network, ps.paths.skeleton(network)):
        ...     print(path)
        (('0.weight', (0, 0)), ('2.weight', (0, 0)))
        (('2.bias', (0,)),)
    """
    graph = checked(network, skeleton)
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
    held = set(skeleton.edges[1 + c :].tolist())
    numbers = [e for e in used_edges(network, graph).nonzero().flatten().tolist() if e not in held]
    source = graph.source.tolist()
    target = graph.target.tolist()
    return [
        tuple(graph.edge(e) for e in (*into[source[number]], number, *out_of[target[number]]))
        for number in numbers
        if source[number] in into and target[number] in out_of
    ]


@tables_on_the_cpu()
def basis_values(
    network: Network, skeleton: Skeleton, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the values v_e = A_u w_e B_v of the basis paths, without writing the paths down.

    They do not change under node-wise rescaling, and together they are what the network's function
    depends on.

    Args:
        network: a traced network.
        skeleton: a skeleton of it.
        parameters: values to use instead of the model's own, by name.

    Returns:
        Parameter name -> float64 tensor of the parameter's shape; at e = O(c), which is on no basis
        path of its own, A_c B_c; nan for weights on no path, and where a class has no skeleton
        edge.

    Raises:
        KeyError, ValueError: see :func:`basis_paths`, and for ``parameters`` :func:`kappa`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> model[0].weight.data, model[2].weight.data = torch.tensor([[6.0]]), torch.tensor([[0.5]])
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> ps.paths.basis_values(network, ps.paths.skeleton(network))["0.weight"].item()
        3.0
    """
    graph = checked(network, skeleton)
    source = current_values(network, parameters)
    products = skeleton.products(source)
    products = torch.where(products == 0, torch.nan, products)
    weights = graph.flatten(source).detach().double()
    weights = weights.masked_fill(~used_edges(network, graph).to(weights.device), torch.nan)
    a = products[cover(graph.source, graph.num_classes).to(weights.device)]
    b = products[cover(-graph.target, graph.num_classes).to(weights.device)]
    return graph.unflatten(a * weights * b)


def checked(network: Network, skeleton: Skeleton) -> ReductionGraph:
    """Return the reduction graph of a skeleton that is one of this network.

    Raises:
        TypeError: it is no skeleton.
        ValueError: it was chosen for another network, or the network has no basis made of skeleton
            edges.
    """
    expect_network(network)
    if not isinstance(skeleton, Skeleton):
        raise TypeError(
            f"skeleton must be one, from ps.paths.skeleton(network), got {type(skeleton).__name__}"
        )
    expect_paths(network)
    graph = skeleton.graph
    expect_own(graph, network, "skeleton was chosen")
    if graph.signed:
        raise ValueError(
            "a matrix of the network is used in both directions (tied input and output embeddings), so its paths have "
            "no basis made of skeleton edges; untie it, or leave it outside"
        )
    return graph


def check_complete(graph: ReductionGraph, skeleton: Skeleton, used: Tensor) -> None:
    """Refuse a skeleton without edges of some class that is on a path.

    Raises:
        ValueError: it lacks one.
    """
    ends = graph.ends(used).unique().tolist()
    lost = [c for c in skeleton.incomplete if c + 1 in ends]
    if lost:
        raise ValueError(
            f"{len(lost)} classes have no skeleton edges, the first is that of {graph.class_names[lost[0]]}: paths "
            "through them have no basis"
        )
