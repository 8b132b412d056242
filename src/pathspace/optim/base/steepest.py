"""Steepest descent in a metric, d = g / D, with momentum, decay and clipping, for all parameters at once.

Letters: p parameter, g = dL/dp, D metric, d direction, v velocity, eta lr, f gauge; m powers of two
that take a far network near balance (see ``metrics.gauge``), 1 for all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.metrics import Metric
from pathspace.metrics.gauge import Gauge
from pathspace.optim.rules.clipping import changes, clip_factor
from pathspace.optim.rules.moments import cast_state
from pathspace.rescaling.optimizer_states import Group, State
from pathspace.squared.precision import widened
from pathspace.squared.sharding import totals
from pathspace.torch_private import foreach_add_, foreach_addcmul_, foreach_mul, foreach_mul_


@dataclass(slots=True)
class ParamStep:
    """A parameter in a step: its gradient, its options and its state.

    Attributes:
        parameter: the parameter.
        p: the part of it in this process: all of it, unless FSDP splits it.
        group: its options.
        state: what the optimizer keeps of it.
        name: in the network; None outside.
        g: the gradient of p to descend, in the near member: m dL/dp.
        factor: what the metric gives, 1 / D there for this rule; None outside the network, where d
            = g.
        gauge: f / m and m; None outside the network.
    """

    parameter: Tensor
    p: Tensor
    group: Group
    state: State
    name: str | None
    g: Tensor
    factor: Tensor | None = None
    gauge: Gauge | None = None

    @property
    def far(self) -> Tensor | None:
        """m; None for 1."""
        return None if self.gauge is None else self.gauge.far

    @property
    def has_one_type(self) -> bool:
        """True if p, g and 1 / D have one type, so that one call may multiply and add them."""
        return self.factor is not None and self.factor.dtype == self.p.dtype == self.g.dtype

    def direction(self) -> Tensor:
        """d, in the widest type that it is made of; g itself outside the network."""
        return self.g if self.factor is None else self.g * self.factor


def orient_gradients(steps: list[ParamStep], metric: Metric) -> None:
    """Turn each g into the gradient that the step descends, of the member near balance.

    With ``maximize`` its sign changes. The user's own gradients stay as they are.
    """
    for step in steps:
        if step.group["maximize"]:
            step.g = -step.g
        if step.name is not None:
            step.gauge = metric.gauge(step.name)
            if step.far is not None:
                step.g = (step.g * step.far).to(step.g.dtype)


def clipping(
    steps: list[ParamStep], clip_norm: float | None, clip_step: float | None
) -> float | Tensor:
    """Return the factor of all directions that clipping asks for.

    Args:
        steps: of all parameters.
        clip_norm: the largest ||g / sqrt(D)||; its square is the sum of g d.
        clip_step: the largest ||d / f||, the length of d in the balanced network, after
            ``clip_norm`` was applied.
    """
    factor: float | Tensor = 1.0
    if clip_norm is not None:
        products = (widened(s.g) * widened(s.direction()) for s in steps)
        factor = clip_factor(_sum(products, steps), clip_norm)
    if clip_step is not None:
        squares = (_balanced_direction(s).square() for s in steps)
        clipped_square = factor**2 * _sum(squares, steps)
        factor = factor * clip_factor(clipped_square, clip_step)
    return factor


def _balanced_direction(step: ParamStep) -> Tensor:
    """Return d / f, or d outside the network."""
    direction = step.direction()
    if step.gauge is None:
        return widened(direction)
    return step.gauge.into(direction)


def gradient_over_direction(steps: list[ParamStep]) -> float:
    """Return ||f g|| / ||d / f||, the lengths of g and d in the frame of the metric; 1 if d is 0.

    Both are over the parameters of the network. Squares are summed in float64, because those of d
    may be beyond float32.
    """
    with_gauge = [(s, s.gauge) for s in steps if s.gauge is not None]
    if not with_gauge:
        return 1.0
    inside = [s for s, _ in with_gauge]
    gradients = (gauge.times_(_doubled(s.g)).square() for s, gauge in with_gauge)
    directions = (gauge.into(s.direction().double()).square() for s, gauge in with_gauge)
    of_gradient = float(_sum(gradients, inside))
    of_direction = float(_sum(directions, inside))
    return math.sqrt(of_gradient / of_direction) if of_direction > 0 else 1.0


def _doubled(g: Tensor) -> Tensor:
    """Return a copy in float64 that lies row after row."""
    return g.to(torch.float64, copy=True, memory_format=torch.contiguous_format)


def _sum(terms: Iterable[Tensor], steps: list[ParamStep]) -> Tensor:
    """Return the sum of all elements over all processes, shape ``[]``; at least one step."""
    sums = [t.sum() for t in terms]
    together = [s.to(sums[0].device) for s in sums]
    return totals(torch.stack(together), (s.parameter for s in steps)).sum()


@dataclass(slots=True)
class _Directions:
    """Directions of parameters that step together: d = scale * gradients * inverses.

    Attributes:
        gradients: g of each parameter, or d itself where there are no ``inverses``.
        inverses: 1 / D of each parameter; None if the gradients were multiplied with it before.
        scale: a factor of all of them.
    """

    gradients: list[Tensor]
    inverses: list[Tensor] | None = None
    scale: float = 1.0

    def add_to_(self, tensors: list[Tensor], alpha: float) -> None:
        """Tensors += alpha d."""
        if self.inverses is None:
            foreach_add_(tensors, self.gradients, alpha=alpha * self.scale)
        else:
            foreach_addcmul_(tensors, self.gradients, self.inverses, alpha * self.scale)


def descend_(steps: list[ParamStep], factor: float | Tensor) -> None:
    """v = momentum v + factor d;  p = (1 - eta weight_decay) p - eta v, each in one call for a group."""
    batches: dict[tuple[int, bool], list[ParamStep]] = {}
    for step in steps:
        batches.setdefault((id(step.group), step.has_one_type), []).append(step)
    for batch in batches.values():
        _descend_together_(batch, _directions(batch, factor))


def _directions(steps: list[ParamStep], factor: float | Tensor) -> _Directions:
    """Return factor d of parameters that have one type, all of them or none."""
    if not steps[0].has_one_type:
        return _Directions([_own_direction(step, factor) for step in steps])
    gradients = [step.g for step in steps]
    inverses = [step.factor for step in steps if step.factor is not None]
    if isinstance(factor, Tensor):
        return _Directions(list(foreach_mul(gradients, factor)), inverses)
    return _Directions(gradients, inverses, factor)


def _own_direction(step: ParamStep, factor: float | Tensor) -> Tensor:
    """Return factor d in the parameter's type."""
    direction = step.direction()
    if changes(factor):
        # before the conversion: longer directions may be beyond the parameter's type
        direction = direction * factor
    return direction.to(step.p.dtype)


def _descend_together_(steps: list[ParamStep], directions: _Directions) -> None:
    """Step parameters of one group."""
    group = steps[0].group
    p = [step.p for step in steps]
    far = [step.far for step in steps]
    lr = float(group["lr"])
    momentum = group["momentum"]
    nesterov = group["nesterov"]
    if group["weight_decay"]:
        foreach_mul_(p, 1 - lr * group["weight_decay"])
    if momentum:
        v = _velocities(steps, momentum)
        directions.add_to_(v, 1.0)
        foreach_add_(p, _back(v, far), alpha=-lr * momentum if nesterov else -lr)
    # nesterov: d + momentum v
    if nesterov or not momentum:
        directions.gradients = _back(directions.gradients, far)
        directions.add_to_(p, -lr)


def _velocities(steps: list[ParamStep], momentum: float) -> list[Tensor]:
    """momentum v; zero at first."""
    for step in steps:
        if "momentum_buffer" not in step.state:
            step.state["momentum_buffer"] = torch.zeros_like(step.p)
        cast_state(step.state, step.p.dtype, ("momentum_buffer",))
    v = [step.state["momentum_buffer"] for step in steps]
    foreach_mul_(v, momentum)
    return v


def _back(tensors: list[Tensor], far: list[Tensor | None]) -> list[Tensor]:
    """Convert steps of the recentred network to steps of the weights."""
    return [t if m is None else (t * m).to(t.dtype) for t, m in zip(tensors, far, strict=True)]
