"""The member of a rescaling class in which as much squared weight enters each unit class as leaves it.

    sum of w^2 over what enters c  =  sum of w^2 over what leaves c

It is the member with the least sum of squares. It does not depend on the member that one begins
with, and differences of weights, such as matching and averaging go by, are comparable there.

Letters: c unit class, x_c = log s_c, w_e weight of an edge e = (u -> v).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.rescaling.criteria import Edges, Scales, agreement, all_edges


def equal_norm_factors(network: Network) -> Tensor:
    """Return the factors that lead to the member with equal norms, float64 ``[num_classes]``."""
    # from the balanced member, so that every member takes the same steps
    start = 1.0 / node_mass(network).gauge().cpu()
    edges = all_edges(network, start)
    scales = Scales.of(network, start.device)
    # `agreement` goes half of the way, which is too far if a weight changes with more than two
    # classes: the sum of squares is convex in log s, so that a step of 1 / n is safe for n classes
    most = max([_classes_of_a_weight(edge, scales) for edge in edges], default=2)
    share = 2 / max(2, most)

    def gap(x: Tensor) -> Tensor:
        growing, shrinking = log_sums(edges, scales, x)
        has_both = growing.isfinite() & shrinking.isfinite()
        # logs of squares: multiplying s by e^d adds 2 d to one and takes 2 d from the other
        return torch.where(has_both, share * (shrinking - growing) / 4, 0.0)

    return start * agreement(gap, torch.zeros_like(start))


def _classes_of_a_weight(edges: Edges, scales: Scales) -> int:
    """Return with the scales of how many classes a weight of a parameter changes, at most."""
    of_fixed = [0]
    of_classes = [1] * scales.classes
    of_products = (scales.monomials != 0).sum(-1).tolist()
    by_label = torch.tensor([*of_fixed, *of_classes, *of_products])
    at_target = by_label[edges.target.abs().cpu()]
    at_source = by_label[edges.source.abs().cpu()]
    return int((at_target + at_source).max())


def log_sums(edges: Sequence[Edges], scales: Scales, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logs of the sums of w^2 that grow and that shrink with the scale of every class.

    Args:
        edges: the weights.
        scales: of the network.
        x: log s at which they are summed.

    Returns:
        Two tensors ``[C]``; -inf where there is no weight.
    """
    at = [scales.table(x, 0.0) for _ in range(2)]
    for edge in edges:
        values = (2 * edge.log_at(scales, x)).exp()
        for table, labels in zip(at, (edge.target, edge.source), strict=True):
            places = labels.expand(values.shape).remainder(len(table)).reshape(-1)
            table.index_add_(0, places, values.reshape(-1))
    entering, entering_inverse = scales.by_sign(at[0], "sum")
    leaving, leaving_inverse = scales.by_sign(at[1], "sum")
    # of units that have the inverse scale, what leaves grows, and what enters shrinks
    grows = torch.logaddexp(entering.log(), leaving_inverse.log())
    shrinks = torch.logaddexp(leaving.log(), entering_inverse.log())
    return grows, shrinks
