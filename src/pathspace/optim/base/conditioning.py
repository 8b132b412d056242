"""The conditioning of an optimizer in path space, and changes of its skeleton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.paths.space.condensation import cover
from pathspace.paths.space.skeleton import Skeleton


def diagnose(network: Network, chosen: Skeleton, start: Mapping[str, Tensor]) -> dict[str, Any]:
    """See :meth:`pathspace.optim.base.path_space.PathSpaceOptimizer.diagnostics`.

    ``start`` has the products when the skeleton was chosen (``fixed``), and the counts ``clamped``
    and ``flipped``.
    """
    products = chosen.products(network.parameters)
    gauge = gauge_of_nodes(network)
    complete = (1 + chosen.complete.nonzero().flatten()).to(products.device)
    visible = torch.where(products == 0, torch.nan, (gauge / products).square())
    c = network.num_classes

    def at(labels: Tensor) -> Tensor:
        return visible[cover(labels, c).to(gauge.device)]

    every = []
    for name, ends in network.edges.items():
        factor = at(ends.source) * at(-ends.target)
        every.append(factor.expand(network.parameters[name].shape).reshape(-1))
    multipliers = torch.cat(every)
    seen = multipliers[~multipliers.isnan()]
    seen = seen if seen.numel() else seen.new_ones(1)
    ratios = (products / start["fixed"])[complete].abs()
    return {
        "classes": len(complete),
        "incomplete": [network.class_names[i] for i in chosen.incomplete],
        "multipliers": (float(seen.min()), float(seen.median()), float(seen.max())),
        "smallest_ratio": float(ratios.min()) if len(ratios) else 1.0,
        "largest_ratio": float(ratios.max()) if len(ratios) else 1.0,
        "clamped": int(start["clamped"]),
        "flipped": int(start["flipped"]),
    }


def gauge_of_nodes(network: Network) -> Tensor:
    """Return the scale at which every node of the double cover stands."""
    gauge = node_mass(network).gauge()
    return torch.cat([gauge.new_ones(1), gauge, gauge.reciprocal()])
