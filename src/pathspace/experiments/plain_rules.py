"""The rules that Path-SGD, PathSOAP and PathMuon carry into invariant coordinates, on the weights as they are.

They share their directions with those optimizers, line by line, so that a comparison of the two measures the
coordinates and nothing else. torch's own Muon takes matrices alone and computes in bfloat16; torch has no SOAP, and its
SGD puts weight decay into the gradient. Letters: p parameter, g = dL/dp, eta lr.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pathspace.optim.rules.eigenbasis import soap_direction
from pathspace.optim.rules.moments import adam_direction
from pathspace.optim.rules.newton_schulz import muon_direction


class PlainRule(Optimizer):
    """p = (1 - eta weight_decay) p - eta d, where a subclass says what the direction d is."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @abstractmethod
    def _direction(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """What to subtract for lr = 1; the caller may change it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = self._direction(p.grad, self.state[p])
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-group["lr"])
        return loss


class SGD(PlainRule):
    """v = momentum v + g; d = v. As torch's, but with decoupled weight decay, as all methods here have it."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.momentum = momentum

    def _direction(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        if not self.momentum:
            return g
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(g)
        return state["momentum_buffer"].mul_(self.momentum).add_(g)


class SOAP(PlainRule):
    """Adam in the eigenbasis of the averages of g g^T and g^T g; AdamW for biases. See `optim.PathSOAP`."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        precondition_frequency: int = 40,
        max_precondition_size: int = 4096,
    ) -> None:
        super().__init__(params, lr, weight_decay)
        self.betas, self.eps = betas, eps
        self.precondition_frequency, self.max_precondition_size = (
            precondition_frequency,
            max_precondition_size,
        )

    def _direction(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        if g.dim() < 2:
            return adam_direction(g, state, self.betas, self.eps)
        frequency, largest = self.precondition_frequency, self.max_precondition_size
        return soap_direction(g.flatten(1), state, self.betas, self.eps, frequency, largest).reshape(g.shape)


class Muon(PlainRule):
    """0.2 sqrt(max(n, m)) times the orthogonalized momentum; AdamW for biases. See `optim.PathMuon`."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, weight_decay)
        self.momentum, self.betas, self.eps = momentum, betas, eps

    def _direction(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        if g.dim() < 2:
            return adam_direction(g, state, self.betas, self.eps)
        G = g.flatten(1)
        scale = 0.2 * math.sqrt(max(G.shape))
        direction = muon_direction(G, state, self.momentum, nesterov=True, steps=5, dtype=None)
        return direction.mul_(scale).reshape(g.shape)
