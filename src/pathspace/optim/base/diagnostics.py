"""Diagnostics of a step of a metric optimizer, read off its state and the gradients.

Letters: p parameter, g = dL/dp, D the metric, D' = f^2 D the metric in the balanced frame, f gauge
(see ``metrics.metric``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics import Metric
from pathspace.metrics.gauge import Gauge
from pathspace.optim.base.steepest import ParamStep
from pathspace.squared.sharding import totals


def clipped_squares(steps: Sequence[ParamStep], *, is_root: bool) -> list[Tensor]:
    """Return the square of the norm of g / sqrt(D) for each parameter, float64.

    Args:
        steps: with g, and 1 / D or 1 / sqrt(D) as the factor.
        is_root: whether the factor is 1 / sqrt(D).
    """
    squares = []
    for step in steps:
        g = step.g.double()
        d = step.direction().double()
        squares.append((d * d if is_root else g * d).sum())
    return squares


def shares_of_layers(
    squares: Sequence[Tensor], parameters: Sequence[Tensor], names: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Return the norm over all parameters, and the share of its square that each module has.

    Args:
        squares: of the norms, one for each parameter.
        parameters: these, of which each process may have a part.
        names: theirs in the model.
    """
    together = torch.stack([square.to(squares[0].device) for square in squares])
    numbers = totals(together, parameters).tolist()
    of_layer: dict[str, list[float]] = {}
    for name, number in zip(names, numbers, strict=True):
        of_layer.setdefault(name.rpartition(".")[0], []).append(number)
    whole = math.fsum(numbers)
    # where all gradients are 0, no layer has a share
    shares = {layer: math.fsum(some) / whole if whole else 0.0 for layer, some in of_layer.items()}
    return math.sqrt(whole), shares


def spread_of_metric(
    states: Mapping[str, Mapping[str, Any]], metric: Metric, *, is_root: bool
) -> list[float]:
    """Return the values of D' that 5, 50 and 95 % of all elements of the network are below.

    Elements that are on no path and hence do not move are left out. Of parameters that are split
    over processes, this takes the part in this process.
    """
    values = [
        _balanced(state["factor"], metric.gauge(name), is_root=is_root).flatten()
        for name, state in states.items()
    ]
    together = torch.cat([value.to(values[0].device) for value in values])
    together = together[together > 0]
    if not together.numel():
        return [math.nan] * 3
    last = together.numel() - 1
    places = [round(share * last) + 1 for share in (0.05, 0.5, 0.95)]
    # torch.quantile takes 16 million elements at most
    inverse = [float(together.kthvalue(last + 2 - place).values) for place in places]
    return [1.0 / value for value in inverse]


def _balanced(factor: Tensor, gauge: Gauge, *, is_root: bool) -> Tensor:
    """Return 1 / D' from 1 / D, which holds F^2, or from 1 / sqrt(D), which holds m F."""
    wide = factor.double()
    if not is_root:
        return gauge.times_(wide.clone(memory_format=torch.contiguous_format), -2)
    near = wide if gauge.far is None else wide / gauge.far.double()
    return gauge.times_(near.clone(memory_format=torch.contiguous_format), -1).square()


def steps_since_refresh(age: int, refresh_every: int, *, once: bool) -> int:
    """Return how many steps a metric is old: 0 if the last step computed it.

    Args:
        age: how many steps there were.
        refresh_every: steps between two refreshes, after as many that refresh each time.
        once: whether the first step alone computes it.
    """
    last = age - 1
    if once:
        return last
    return 0 if last < refresh_every else last % refresh_every
