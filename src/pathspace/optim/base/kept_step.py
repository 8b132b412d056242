"""Path-SGD's rule for all parameters of a group at once, and the steps between two refreshes by it alone.

A step with a metric that was kept has nothing to compute but the update, which for small networks costs less than
finding out what it is made of. So that is remembered, and looked at only for what may have changed.

Letters: p parameter, g = dL/dp, kappa the metric, c its normalizer, v velocity, eta lr.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pathspace.optim.base.network_optimizer import Active
from pathspace.optim.base.same_states import SameStates
from pathspace.squared.precision import full_precision

if TYPE_CHECKING:
    from pathspace.optim.path_sgd import PathSGD


@dataclass(slots=True)
class Together:
    """Parameters of one group that move together, v = momentum v + c g / kappa, with what moves them."""

    group: dict[str, Any]
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    metrics: list[Tensor] = field(default_factory=list)  # kappa
    normalizers: list[float] = field(default_factory=list)  # c
    velocities: list[Tensor] = field(default_factory=list)  # none without momentum

    def move_(self, factor: float = 1.0) -> None:
        """V = momentum v + factor d;  p = (1 - eta weight_decay) p - eta v, each in one call."""
        group, p, v = self.group, self.parameters, self.velocities
        lr, momentum = float(group["lr"]), group["momentum"]
        if group["weight_decay"]:
            torch._foreach_mul_(p, 1 - lr * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        if momentum:
            torch._foreach_mul_(v, momentum)  # pyright: ignore[reportPrivateImportUsage]
            self._add_to_(v, factor)
            torch._foreach_add_(p, v, alpha=-lr * momentum if group["nesterov"] else -lr)  # pyright: ignore[reportPrivateImportUsage]
        if not momentum or group["nesterov"]:  # d + momentum v
            self._add_to_(p, -lr * factor)

    def _add_to_(self, tensors: list[Tensor], factor: float) -> None:
        """Tensors += factor d."""
        values = [factor * c for c in self.normalizers]
        torch._foreach_addcdiv_(tensors, self.gradients, self.metrics, values)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(slots=True)
class _Kept:
    """One parameter with its state, as the last step left them."""

    p: Tensor
    state: dict[str, Any]
    kappa: Tensor


class KeptStep:
    """The steps of an optimizer between two refreshes.

    Args:
        optimizer: whose options and state these are.
    """

    def __init__(self, optimizer: PathSGD) -> None:
        self._optimizer = optimizer
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptStep:
        copied = memo.get(id(self._optimizer))
        assert copied is not None  # only its optimizer holds it
        return type(self)(copied)

    def forget(self) -> None:
        """Remember nothing."""
        self._groups: list[list[_Kept]] = []
        self._states = SameStates()

    def remember(self, active: Active) -> None:
        """Look at the state after a step; only where all parameters have a plain metric is there anything to gain."""
        self.forget()
        optimizer = self._optimizer
        states = optimizer.state
        groups: list[list[_Kept]] = []
        ages = set()
        for group in optimizer.param_groups:
            groups.append([])
            for p in group["params"]:
                state = states.get(p, {})
                kappa = state.get("kappa")
                if kappa is None or "scales" in state or kappa.dtype != p.dtype:
                    return
                groups[-1].append(_Kept(p, state, kappa))
                ages.add(state["age"])
        if sum(map(len, groups)) == len(active) and len(ages) == 1 and all(groups):
            self._groups, self._states = groups, SameStates(states)

    def is_expected(self) -> bool:
        """Whether the next step will need no new metric, unless somebody changes a state before; :meth:`take` looks."""
        optimizer = self._optimizer
        if not self._groups or not self._states.belong_to(optimizer.state):
            return False
        # steps since the last refresh, the same for all parameters
        return self._groups[0][0].state["age"] % optimizer.refresh_every != 0

    def take(self) -> bool:
        """Take the step, or return False with nothing done."""
        expected = self.is_expected() and self._states.are(self._optimizer.state)
        moved = self._ready() if expected else None
        if moved is None:
            return False
        with full_precision(self._groups[0][0].p):
            for together in moved:
                together.move_()
        for group in self._groups:
            for kept in group:
                kept.state["age"] += 1
        return True

    def _ready(self) -> list[Together] | None:
        """What moves, if all is as it was."""
        optimizer, moved = self._optimizer, []
        groups = optimizer.param_groups
        first = self._groups[0][0]
        if first.state["gauge_rows"].device != first.p.device:  # the model was moved
            return None
        if (
            optimizer.clip_norm is not None
            or optimizer.clip_step is not None
            or len(groups) != len(self._groups)
        ):
            return None
        for group, known in zip(groups, self._groups, strict=True):
            if group["path_decay"] or len(group["params"]) != len(known):
                return None
            momentum, sign = group["momentum"], -1.0 if group["maximize"] else 1.0
            together = Together(group)
            for p, kept in zip(group["params"], known, strict=True):
                state, kappa, g = kept.state, kept.kappa, p.grad
                if p is not kept.p or g is None or g.is_sparse or state.get("kappa") is not kappa:
                    return None
                if p.dtype != kappa.dtype or g.dtype != kappa.dtype or p.device != kappa.device:
                    return None
                if momentum:
                    v = state.get("momentum_buffer")
                    if v is None or v.dtype != kappa.dtype:
                        return None
                    together.velocities.append(v)
                together.gradients.append(g)
                together.metrics.append(kappa)
                together.normalizers.append(sign * state["normalizer"])
            together.parameters = group["params"]
            moved.append(together)
        return moved
