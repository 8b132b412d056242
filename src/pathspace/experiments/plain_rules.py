"""Rules for the plain weights that torch does not have as the comparisons need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class SGD(Optimizer):
    """v = momentum v + g. As torch's, but with decoupled weight decay, as all methods here have it."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = p.grad
                if momentum:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    direction = state["momentum_buffer"].mul_(momentum).add_(p.grad)
                if group["weight_decay"]:
                    p.mul_(1 - lr * group["weight_decay"])
                p.add_(direction, alpha=-lr)
        return loss
