"""The direction of steepest descent in kappa's geometry, d = c g / kappa, and its length.

Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer, w_e a gauge (see ``path_metric``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.optim.base.metric_state import Metric
from pathspace.optim.base.path_metric import Gauge
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.kernel.norm import widened
from pathspace.squared.squares import Outer


@dataclass(slots=True)
class Steepest:
    """What one parameter's direction is made of; ``metric`` is None outside the network, where d = g."""

    p: Tensor
    group: dict[str, Any]
    g: Tensor
    metric: Metric | None
    memory: Tensor | None = None  # of p's shape and type, to be overwritten

    def direction(self, factor: float = 1.0) -> Tensor:
        """Factor d, a new tensor of p's type."""
        if self.metric is None:
            return self.g * factor
        values = self.metric.values
        if isinstance(values, Outer):
            wide = (self.g.to(values.dtype) / values.columns).div_(values.rows[:, None])
        else:
            wide = self.g.to(values.dtype) / values
        return wide.mul_(factor * self.metric.normalizer).to(self.p.dtype)

    def add_to_(self, tensor: Tensor, factor: float) -> None:
        """Tensor += factor d, without a temporary where the types allow it."""
        if self.metric is None:
            tensor.add_(self.g, alpha=factor)
            return
        values, value = self.metric.values, factor * self.metric.normalizer
        if values.dtype != self.p.dtype:
            tensor.add_(self.direction(factor))
        elif isinstance(values, Outer):
            self._add_quotient_(tensor, self.metric, value)
        else:
            tensor.addcdiv_(self.g, values, value=value)

    def _add_quotient_(self, tensor: Tensor, metric: Metric, value: float) -> None:
        """Tensor += value g / (rows columns), in one pass over memory if a factor is one number."""
        rows, columns = metric.values.rows, metric.values.columns
        if columns.stride(0) == 0 or rows.stride(0) == 0:
            folded = metric.folded
            if folded is None:
                by_rows = columns.stride(0) == 0
                folded = metric.folded = (rows * columns[0])[:, None] if by_rows else columns * rows[0]
            tensor.addcdiv_(self.g, folded, value=value)
            return
        memory = self.memory if self.memory is not None else torch.empty_like(self.g)
        tensor.addcdiv_(torch.div(self.g, columns, out=memory), rows[:, None], value=value)


def shrinking(steps: Iterable[Steepest], largest: float | None) -> float:
    """What scales g down so that ||g / sqrt(kappa / c)||, the root of the sum of g d, is at most ``largest``."""
    if largest is None:
        return 1.0
    square = 0.0
    for step in steps:
        g, d = widened(step.g), widened(step.direction())  # float16 holds no square beyond 65504
        square += float(torch.dot(g.reshape(-1), d.reshape(-1)))
    return clip_factor(square, largest)


def squared_length(steps: Sequence[Steepest], gauges: Sequence[Gauge | None]) -> float:
    """Sum over all parameters of d^2 / w_e, the squared length of the direction in the gauge; of g^2 without one."""
    square = 0.0
    for step, gauge in zip(steps, gauges, strict=True):
        d = step.direction().to(widened(step.p).dtype)
        balanced = d if gauge is None else d * gauge.damping(d.shape)
        square += float(torch.dot(balanced.reshape(-1), d.reshape(-1)))
    return square
