"""The direction of steepest descent in kappa's geometry, d = c g / kappa, and its length.

Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.optim.path_optimizer import Metric, clip_factor


@dataclass(slots=True)
class Steepest:
    """What one parameter's direction is made of; ``metric`` is None outside the network, where d = g."""

    p: Tensor
    group: dict[str, Any]
    g: Tensor
    metric: Metric | None

    @property
    def fused(self) -> bool:
        """Whether g / kappa can be computed in p's own type."""
        return self.metric is None or self.metric.values.dtype == self.p.dtype

    def direction(self, factor: float = 1.0) -> Tensor:
        """Factor d, a new tensor of p's type."""
        if self.metric is None:
            return self.g * factor
        wide = self.g.to(self.metric.values.dtype) / self.metric.values
        return wide.mul_(factor * self.metric.normalizer).to(self.p.dtype)

    def add_to_(self, tensor: Tensor, factor: float) -> None:
        """Tensor += factor d, without a temporary where the types allow it."""
        if self.metric is None:
            tensor.add_(self.g, alpha=factor)
        elif self.fused:
            tensor.addcdiv_(self.g, self.metric.values, value=factor * self.metric.normalizer)
        else:
            tensor.add_(self.direction(factor))


def shrinking(steps: Iterable[Steepest], largest: float | None) -> float:
    """What scales g down so that ||g / sqrt(kappa / c)||, the root of the sum of g d, is at most ``largest``."""
    if largest is None:
        return 1.0
    square = 0.0
    for step in steps:
        square += float(torch.dot(step.g.reshape(-1), step.direction().reshape(-1)))
    return clip_factor(square, largest)
