"""Every path value as a product of integer powers of basis values (S19 Theorem 1, Eq. (4)).

With I(c) and O(c) the skeleton edges of class c, A_c and B_c the products along them, and v_e = A_u
w_e B_v the value of the basis path through e = (u -> v):

    v_p = prod over edges e of p of v_e  /  prod over classes c that p passes of A_c B_c

because each pass multiplies the path in front of c by B_c and the path behind it by A_c. The values
v_e of e in O and A_c B_c are basis values themselves: for e = O(u), v_e = A_u B_u; and A_c B_c =
v_e with e = I(c), which is a basis value if I(c) is outside O, and else A_u B_u of the class u
where I(c) starts. So the exponents are whole numbers; negative ones stand at skeleton paths alone,
which are not zero.

Letters: P paths, E weights, N basis paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.paths.listing.listing import Paths
from pathspace.paths.space.basis import basis_paths, check_complete
from pathspace.paths.space.reduction import expect_own, used_edges
from pathspace.paths.space.skeleton import Skeleton


@dataclass(frozen=True, eq=False)
class BasisExpression:
    """Paths in terms of a basis; made by :func:`express`.

    Attributes:
        edges: numbers of the edges e whose basis paths these are, ``[N]``, in the order of
            :func:`basis_paths`.
        counts: the basis paths' counting vectors, int64 ``[N, E]``.
        exponents: int64 ``[P, N]``.
    """

    edges: Tensor
    counts: Tensor
    exponents: Tensor

    def values(self, basis: Tensor) -> Tensor:
        """Compute the path values, prod over the basis of v_e to its exponent.

        Args:
            basis: values of the basis paths, ``[N]``.

        Returns:
            ``[P]``; differentiable in the basis values.
        """
        exponents = self.exponents.to(basis.device)
        powers = torch.where(exponents == 0, torch.ones_like(basis), basis).pow(exponents)
        return powers.prod(1)


@tables_on_the_cpu()
def express(network: Network, skeleton: Skeleton, paths: Paths) -> BasisExpression:
    """Write the values of paths as products of powers of the basis values of a skeleton.

    Args:
        network: a traced network.
        skeleton: a skeleton of it, complete.
        paths: paths of it, from :func:`enumerate_paths`.

    Returns:
        Basis paths and exponents: ``paths.counts == exponents @ counts``.

    Raises:
        ValueError: the skeleton lacks an edge of some class, it or the paths are another network's,
            or the network uses a matrix in both directions.

    Example:
        >>> import torch, pathspace as ps
        >>> layers = [torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU(), torch.nn.Linear(1, 2, bias=False)]
        >>> network = ps.trace(torch.nn.Sequential(*layers), torch.zeros(1, 2))
        >>> paths = ps.paths.enumerate_paths(network)
        >>> ps.paths.express(network, ps.paths.skeleton(network), paths).exponents.shape  # four paths, a basis of three
        torch.Size([4, 3])
    """
    # refuses a skeleton that does not fit
    basis = basis_paths(network, skeleton)
    graph = skeleton.graph
    expect_own(paths.reduction, network, "list of paths was made")
    used = used_edges(network, graph)
    check_complete(graph, skeleton, used)
    out_of = set(skeleton.edges[1 + graph.num_classes :].tolist())
    kept = [e for e in used.nonzero().flatten().tolist() if e not in out_of]
    on_paths = set(graph.ends(used).unique().tolist())
    added, taken = _factors_of_edges(skeleton, kept, on_paths)
    rows = paths.columns
    one = torch.ones_like(rows)
    exponents = torch.zeros(len(paths), len(kept) + 1, dtype=torch.long)
    exponents.scatter_add_(1, added[rows], one)
    exponents.scatter_add_(1, taken[rows], -one)
    counts = torch.zeros(len(kept), graph.num_edges, dtype=torch.long)
    for n, path in enumerate(basis):
        for edge in path:
            counts[n, graph.number(edge)] += 1
    return BasisExpression(torch.tensor(kept), counts, exponents[:, :-1])


def _factors_of_edges(
    skeleton: Skeleton, kept: list[int], on_paths: set[int]
) -> tuple[Tensor, Tensor]:
    """Return which basis values an edge of a path multiplies with, and divides by.

    The exponent is + 1 for every edge, and - 1 for every class between two edges: the classes are
    those at which all edges but the first of a stretch between fixed units start.

    Args:
        skeleton: the skeleton.
        kept: the edges whose basis paths are the basis.
        on_paths: nodes that a path passes.

    Returns:
        Numbers of basis paths, N for none: ``[E + 1]`` each, where the last edge stands for none.
    """
    into = skeleton.edges[1 : 1 + skeleton.num_classes].tolist()
    source = skeleton.graph.source.tolist()
    place = {e: n for n, e in enumerate(kept)}

    def through(node: int) -> int:
        """Return the basis path whose value is A_c B_c."""
        edge = into[node - 1]
        return place[edge] if edge in place else through(source[edge])

    nothing = len(kept)
    classes = range(1, skeleton.num_classes + 1)
    passes = {node: through(node) for node in classes if node in on_paths}
    taken = [passes.get(node, nothing) for node in source]
    added = [place.get(edge, taken[edge]) for edge in range(len(source))]
    return torch.tensor([*added, nothing]), torch.tensor([*taken, nothing])
