"""Back from path space to weights: basis values and signs of a skeleton say which network it is, up to rescaling.

Node-wise rescaling reaches every length of the weights O(c), and no sign of them. So one member of
every rescaling class has O(c) = +-1, and its other weights follow from the basis values:

    B_c = s_c B_v  for O(c) = (c -> v),   B = 1 at outputs,   s_c the sign of O(c)
    A_c B_c = v_e  for e = I(c) outside O, else A_u B_u of the class u where I(c) starts;   A = 1 at inputs
    w_e = v_e / (A_u B_v)  for e = (u -> v)

Letters: c a unit class, C their number, e = (u -> v) an edge, v_e the value of the basis path
through e. Nodes are those of the double cover: 0, 1 + c for the paths into c, 1 + C + c for those
out of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.network import current_values
from pathspace.paths.space.basis import check_complete, checked
from pathspace.paths.space.reduction import ReductionGraph, used_edges
from pathspace.paths.space.skeleton import Skeleton


@tables_on_the_cpu()
def skeleton_signs(
    network: Network, skeleton: Skeleton, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the signs of the weights O(c) of a skeleton, which rescaling does not change.

    Args:
        network: a traced network.
        skeleton: a skeleton of it.
        parameters: values to use instead of the model's own, by name.

    Returns:
        int64 ``[num_classes]`` on the CPU: 1 or -1; 0 where a class has no skeleton edge.

    Raises:
        KeyError, ValueError: see :func:`basis_paths`, and for ``parameters`` :func:`kappa`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> model[2].weight.data = torch.tensor([[3.0, -1.0]])
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> ps.paths.skeleton_signs(network, ps.paths.skeleton(network))
        tensor([ 1, -1])
    """
    graph = checked(network, skeleton)
    weights = graph.flatten(current_values(network, parameters)).detach().cpu()
    edges = skeleton.edges[1 + graph.num_classes :]
    return torch.where(edges < 0, 0, weights[edges].sign().long())


@tables_on_the_cpu()
def weights_from_values(
    network: Network, skeleton: Skeleton, values: Mapping[str, Tensor], signs: Tensor
) -> dict[str, Tensor]:
    """Undo :func:`basis_values`: the weights of the network that has these basis values, with O(c) = +-1.

    What the network computes depends on the basis values and the signs alone (S19 Theorems 1 and
    2), so these weights compute what those do that the values were taken from.

    Args:
        network: a traced network; its weights are not looked at.
        skeleton: a skeleton of it.
        values: basis values by name, as :func:`basis_values` gives them. Those at O(c), which are
            no coordinates of their own, are not looked at.
        signs: the sign of O(c) for every class, as :func:`skeleton_signs` gives them,
            ``[num_classes]``.

    Returns:
        Parameter name -> float64 tensor of the parameter's shape; 0 for weights on no path.

    Raises:
        KeyError: ``values`` lacks a parameter of the network.
        ValueError: see :func:`basis_paths`; or a value has another shape than the parameter, a
            class on a path has no skeleton edges, or a basis path that consists of skeleton edges
            alone has the value zero: there path space has no coordinates.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 1))
        >>> model[0].weight.data, model[2].weight.data = torch.tensor([[6.0]]), torch.tensor([[-0.5]])
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> skeleton = ps.paths.skeleton(network)
        >>> values, signs = ps.paths.basis_values(network, skeleton), ps.paths.skeleton_signs(network, skeleton)
        >>> weights = ps.paths.weights_from_values(network, skeleton, values, signs)
        >>> weights["0.weight"].item(), weights["2.weight"].item()
        (3.0, -1.0)
    """
    graph = checked(network, skeleton)
    used = used_edges(network, graph)
    check_complete(graph, skeleton, used)
    c = graph.num_classes
    if signs.shape != (c,) or bool((signs[skeleton.complete].abs() != 1).any()):
        raise ValueError(f"signs must hold 1 or -1 for each of the {c} unit classes")
    given = current_values(network, values)
    v = graph.flatten({n: value.detach().double().cpu() for n, value in given.items()})
    s = signs.cpu().double()
    has_outgoing = skeleton.edges[1 + c :] >= 0
    outgoing = skeleton.edges[1 + c :][has_outgoing]
    through, b = _products_from_values(skeleton, v, s)
    _expect_no_singularity(graph, used, through)
    a = through / b
    # w_e = v_e / (A_u B_v); at e = O(c) the sign itself
    weights = v / (a[graph.source] * b[graph.target])
    weights[outgoing] = s[has_outgoing]
    return graph.unflatten(torch.where(used, weights, 0.0))


def _products_from_values(skeleton: Skeleton, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return A_c B_c and B_c of node 0 and of every class, float64 ``[1 + C]`` each.

    Args:
        skeleton: the skeleton.
        v: basis values, ``[E]``.
        s: signs of O(c), ``[C]``.
    """
    c = skeleton.num_classes
    held = torch.zeros(len(v), dtype=torch.bool)
    outgoing = skeleton.edges[1 + c :]
    held[outgoing[outgoing >= 0]] = True
    b = torch.ones(1 + c, dtype=torch.float64)
    through = torch.ones_like(b)
    for nodes in skeleton.levels:
        into = nodes[nodes <= c]
        out_of = nodes[nodes > c]
        # A_c B_c = v_e for e = I(c) outside O, else A_u B_u
        edges = skeleton.edges[into]
        starts = skeleton.starts[into]
        through[into] = torch.where(held[edges], through[starts], v[edges])
        # B_c = s_c B_v
        after = (skeleton.starts[out_of] - c).clamp(min=0)
        b[out_of - c] = s[out_of - c - 1] * b[after]
    return through, b


def _expect_no_singularity(graph: ReductionGraph, used: Tensor, through: Tensor) -> None:
    """Raise ValueError if A_c B_c of a class on a path has no inverse."""
    on_path = torch.zeros(len(through), dtype=torch.bool)
    on_path[graph.source[used]] = True
    has_no_inverse = (through == 0) | ~through.isfinite()
    singular = (on_path & has_no_inverse).nonzero().flatten().tolist()
    if singular:
        first = singular[0]
        raise ValueError(
            f"the path of skeleton edges through the class of {graph.class_names[first - 1]} has the value "
            f"{through[first].item():g}: path space has no coordinates there; choose the skeleton anew"
        )
