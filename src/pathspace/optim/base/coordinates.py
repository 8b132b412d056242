"""Optimizers in coordinates that node-wise rescaling does not change.

With a metric D that is positive and transforms like kappa, as (s_u / s_v)^2 for an edge u -> v, the coordinates
u = sqrt(D) w transform as a weight times an inverse weight: they do not change at all, up to the motion of D itself.
Any rule of training, however it mixes entries of a matrix, is therefore invariant if it is given the gradient
dL/du = g / sqrt(D) and its step du is mapped back, dw = du / sqrt(D).

    D = (kappa / c)^p (1 / w_e)^(1 - p)

1 / w_e of the gauge (see ``path_metric``) transforms like kappa, hence D does for every power p: the full metric
for p = 1, for p = 0 that of the network balanced once, at the first step.

Letters: p parameter (power, where a number), g = dL/dp, D metric, u coordinates, eta lr.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.optim.base.metric_state import Metric, gauge_of
from pathspace.optim.base.network_optimizer import Active, Parameters, check_not_negative
from pathspace.optim.base.path_metric import powered_, safe_divisor_
from pathspace.optim.base.path_optimizer import Normalization, PathOptimizer
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.kernel.norm import widened

# Adam's direction is as long for a weight of little kappa as for any other, and 1 / sqrt(D) is what it moves by: on
# MNIST rows PathAdam without damping was lost at a rate at which it trained with this one (docs/results/winner.md).
DAMPING = 0.01


class CoordinateOptimizer(PathOptimizer):
    """Base of the optimizers that train u = sqrt(D) w; a rule is the method ``_direction``.

    Groups have the options ``lr``, ``weight_decay`` (decoupled) and ``maximize`` in any case.
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        defaults: dict[str, Any],
        *,
        power: float,
        clip_norm: float | None,
        refresh_every: int,
        second_term: bool,
        normalization: Normalization,
        damping: float | None,
    ) -> None:
        check_not_negative(lr=defaults["lr"], weight_decay=defaults["weight_decay"], power=power)
        self.power = power
        if damping is None:
            damping = 0.0 if normalization == "none" else DAMPING
        super().__init__(
            params,
            network,
            defaults,
            clip_norm=clip_norm,
            refresh_every=refresh_every,
            second_term=second_term,
            normalization=normalization,
            damping=damping,
        )

    @abstractmethod
    def _direction(self, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """What to subtract from the coordinates, for lr = 1: a new tensor; ``g`` is dL/du and not to be kept."""

    def _metric(self, kappa: Tensor, state: dict[str, Any]) -> Metric:
        """sqrt(D)."""
        if self.power == 1:
            return Metric(safe_divisor_(kappa).sqrt_().div_(math.sqrt(state["normalizer"])), 1.0)
        powered_(kappa, gauge_of(state), state["normalizer"], self.power)
        return Metric(safe_divisor_(kappa).sqrt_(), 1.0)

    def _advance(self, active: Active, metrics: dict[Tensor, Metric]) -> None:
        gradients = [_in_coordinates(p, group["maximize"], metrics.get(p)) for p, group in active]
        factor = 1.0
        if self.clip_norm is not None:
            square = sum(float(torch.dot(g.reshape(-1), g.reshape(-1))) for g in gradients)
            factor = clip_factor(square, self.clip_norm)
        for (p, group), g in zip(active, gradients, strict=True):
            direction = self._direction(g if factor == 1 else g * factor, group, self.state[p])
            _move_(p, direction, group, metrics.get(p))


def _in_coordinates(p: Tensor, maximize: bool, metric: Metric | None) -> Tensor:
    """dL/du = g / sqrt(D) in p's type, or in float32 for half precision; g itself outside the network."""
    assert p.grad is not None
    g = -p.grad if maximize else p.grad
    if metric is None:
        return widened(g)
    return (g / metric.values if metric.values.dtype == g.dtype else _wide_ratio(g, metric)).to(
        widened(p).dtype
    )


def _wide_ratio(g: Tensor, metric: Metric) -> Tensor:
    return g.to(metric.values.dtype) / metric.values


def _move_(p: Tensor, direction: Tensor, group: dict[str, Any], metric: Metric | None) -> None:
    """P = (1 - eta weight_decay) p - eta direction / sqrt(D)."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    if metric is None:
        p.add_(direction.to(p.dtype), alpha=-lr)
    elif metric.values.dtype == p.dtype == direction.dtype:
        p.addcdiv_(direction, metric.values, value=-lr)
    else:
        p.add_(_wide_ratio(direction, metric).to(p.dtype), alpha=-lr)
