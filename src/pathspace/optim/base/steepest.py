"""Steepest descent in a metric, d = g / D, with momentum, decay and clipping, for all parameters at once.

Letters: p parameter, g = dL/dp, D metric, d direction, v velocity, eta lr, f gauge; m powers of two that take a far
network near balance (see ``metrics.gauge``), 1 for all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.gauge import Gauge
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.kernel.norm import widened

# torch's own optimizers are made of these
_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_addcmul_ = torch._foreach_addcmul_  # pyright: ignore[reportPrivateImportUsage]


@dataclass(slots=True)
class Descent:
    """What one parameter's direction is made of.

    Attributes:
        p: the parameter.
        group: its options.
        g: the gradient to descend, in the near member: m dL/dp.
        inverse: 1 / D there; None outside the network, where d = g.
        gauge: f / m and m; None outside the network.
    """

    p: Tensor
    group: dict[str, Any]
    g: Tensor
    inverse: Tensor | None
    gauge: Gauge | None

    @property
    def is_plain(self) -> bool:
        """Whether 1 / D may be multiplied with as it is, of the parameter's type."""
        return self.inverse is not None and self.inverse.dtype == self.p.dtype == self.g.dtype

    def direction(self) -> Tensor:
        """d, in the widest type that it is made of; g itself outside the network."""
        return self.g if self.inverse is None else self.g * self.inverse


def clipping(steps: list[Descent], clip_norm: float | None, clip_step: float | None) -> float:
    """What all directions are multiplied with.

    Args:
        steps: of all parameters.
        clip_norm: largest ||g / sqrt(D)||, the root of the sum of g d.
        clip_step: after it, largest ||d / f||, the length of d in the balanced network.
    """
    factor = 1.0
    if clip_norm is not None:
        factor = clip_factor(_sum(widened(s.g) * widened(s.direction()) for s in steps), clip_norm)
    if clip_step is not None:
        balanced = (widened(s.direction()) if s.gauge is None else s.gauge.into(s.direction()) for s in steps)
        factor *= clip_factor(factor**2 * _sum(d * d for d in balanced), clip_step)
    return factor


def _sum(terms: Iterable[Tensor]) -> float:
    totals = [t.sum() for t in terms]
    return float(torch.stack(totals).sum()) if totals else 0.0


@dataclass(slots=True)
class _Lists:
    """The parameters of one group that move alike, and what moves them."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    inverses: list[Tensor] = field(default_factory=list)
    far: list[Tensor | None] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


def descend_(steps: list[Descent], states: dict[Tensor, dict[str, Any]], factor: float) -> None:
    """v = momentum v + factor d;  p = (1 - eta weight_decay) p - eta v, each in one call for a group."""
    groups: dict[tuple[int, bool], tuple[dict[str, Any], _Lists]] = {}
    for step in steps:
        plain = step.is_plain
        _, lists = groups.setdefault((id(step.group), plain), (step.group, _Lists()))
        lists.parameters.append(step.p)
        if plain:
            assert step.inverse is not None
            lists.gradients.append(step.g)
            lists.inverses.append(step.inverse)
        else:
            lists.gradients.append(step.direction().to(step.p.dtype))
        lists.far.append(None if step.gauge is None else step.gauge.far)
        lists.states.append(states[step.p])
    for group, lists in groups.values():
        _move_(group, lists, factor)


def _move_(group: dict[str, Any], lists: _Lists, factor: float) -> None:
    lr, momentum, p = float(group["lr"]), group["momentum"], lists.parameters
    if group["weight_decay"]:
        _mul_(p, 1 - lr * group["weight_decay"])
    if not momentum:
        _add_directions_(p, lists, -lr * factor, lists.far)
        return
    if all("momentum_buffer" in state for state in lists.states):
        v = [state["momentum_buffer"] for state in lists.states]
        _mul_(v, momentum)
    else:
        v = []
        for q, state in zip(p, lists.states, strict=True):
            old = state.get("momentum_buffer")
            new = (
                torch.zeros_like(q, memory_format=torch.preserve_format)
                if old is None
                else old.mul_(momentum)
            )
            state["momentum_buffer"] = new
            v.append(new)
    _add_directions_(v, lists, factor, [])
    _add_(p, _away(v, lists.far), alpha=-lr * momentum if group["nesterov"] else -lr)
    if group["nesterov"]:  # d + momentum v
        _add_directions_(p, lists, -lr * factor, lists.far)


def _add_directions_(tensors: list[Tensor], lists: _Lists, value: float, far: list[Tensor | None]) -> None:
    """Tensors += value d."""
    gradients = _away(lists.gradients, far)
    if lists.inverses:
        _addcmul_(tensors, gradients, lists.inverses, value)
    else:
        _add_(tensors, gradients, alpha=value)


def _away(tensors: list[Tensor], far: list[Tensor | None]) -> list[Tensor]:
    """Steps of the near member as steps of the weights."""
    if all(m is None for m in far):
        return tensors
    return [t if m is None else (t * m).to(t.dtype) for t, m in zip(tensors, far, strict=True)]
