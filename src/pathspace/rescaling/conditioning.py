"""PathCond's member of a rescaling class: the one where kappa is nearest to one number for all weights.

kappa is the diagonal of the Gram matrix of the path vector's derivatives. PathCond brings that
diagonal near to a multiple of the identity, in the log-determinant divergence

    D(x) = min_alpha sum_e (alpha k_e - log(alpha k_e) - 1) = p log(sum_e k_e) - sum_e log k_e - p log p

k_e is multiplied by (s_u / s_v)^2, so D is convex in x = log s. It is at its least where

    sum of k entering c - sum of k leaving c = (n_in,c - n_out,c) / p  sum_e k_e

An edge that no path goes through has k_e = 0 in every member, and does not count. A class where
that holds for all edges of one side, such as a dead unit, keeps the scale of the criterion "path".

Letters: c unit class, s_c its factor, e edge u -> v, k_e its kappa, p the number of edges with k_e
> 0, n_in,c and n_out,c how many of them enter c and leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.kappa import kappa_in_float64
from pathspace.rescaling.criteria import Edges, Scales, agreement, edge_labels
from pathspace.rescaling.equal_norms import log_sums


@dataclass(frozen=True)
class Kappas:
    """kappa of all edges, at the member where a search begins.

    Attributes:
        edges: the edges whose kappa depends on the scales, log sqrt(k_e) each. Their ends are
            exchanged, as k_e is multiplied by the inverse of what w_e^2 is multiplied by.
        held: the sum of kappa over all other edges, which no rescaling changes.
        count: p.
    """

    edges: list[Edges]
    held: float
    count: int


def conditioning_factors(network: Network, start: Tensor) -> Tensor:
    """Return the factors that lead to PathCond's member, float64 ``[C]``.

    Args:
        network: a traced network.
        start: the factors of the criterion "path".

    Raises:
        FloatingPointError: kappa is not finite.
    """
    scales = Scales.of(network, start.device)
    here = torch.zeros_like(start)
    return start * agreement(_gap(_kappas(network, start), scales, here), here)


def _kappas(network: Network, start: Tensor) -> Kappas:
    edges = []
    held = 0.0
    count = 0
    for name, found in kappa_in_float64(network).items():
        target, source = edge_labels(network, name, start.device)
        k = found.to(start.device) / network.edge_factors(name, start).square()
        same = target == source
        held += float(k.masked_fill(~same, 0.0).sum())
        count += int((k > 0).sum())
        edges.append(Edges(k.masked_fill(same, 0.0).sqrt().log(), source, target))
    return Kappas(edges, held, count)


def _gap(kappas: Kappas, scales: Scales, here: Tensor) -> Callable[[Tensor], Tensor]:
    """Return how far each class is from its optimum, where sum_e k_e is taken to be constant.

    p log(sum_e k_e) is concave in the sum, so D lies below the function that is linear in the sum
    and touches it: a step down there is a step down in D.

    Args:
        kappas: of the network.
        scales: of the network.
        here: log s = 0, where every edge counts as one.
    """
    ones = [
        Edges(torch.where(e.log.isfinite(), 0.0, e.log), e.target, e.source) for e in kappas.edges
    ]
    n_out, n_in = (logs.exp() for logs in log_sums(ones, scales, here))
    share = (n_in - n_out) / max(kappas.count, 1)

    def gap(x: Tensor) -> Tensor:
        grows, shrinks = log_sums(kappas.edges, scales, x)
        total = _log_total(kappas, scales, x)
        # s^2 = q of one class: q^2 grows + q share sum_e k_e - shrinks = 0
        half = share / 2 * (total - (grows + shrinks) / 2).exp()
        both = grows.isfinite() & shrinks.isfinite()
        return torch.where(both, (shrinks - grows) / 4 - half.asinh() / 2, 0.0)

    return gap


def _log_total(kappas: Kappas, scales: Scales, x: Tensor) -> Tensor:
    """Compute log sum_e k_e."""
    logs = [x.new_tensor(kappas.held).log()]
    for edge in kappas.edges:
        logs.append((2 * edge.log_at(scales, x)).flatten().logsumexp(0))
    return torch.stack(logs).logsumexp(0)
