"""SOAP for matrices and AdamW for all other parameters, as one optimizer.

Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, "SOAP: Improving and Stabilizing Shampoo using
Adam", 2024. Torch has no SOAP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pathspace.optim.rules.eigenbasis import soap_direction
from pathspace.optim.rules.moments import adam_direction


class SOAP(Optimizer):
    """Adam in the eigenbasis of the averages of G G^T and G^T G; AdamW for parameters that are no matrices.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        betas: decay rates of the two moments; the averages decay with the second.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of every parameter, times lr.
        precondition_frequency: steps between two updates of the basis.
        max_precondition_size: sides longer than this keep the standard basis.
        maximize: ascend instead.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        precondition_frequency: int = 10,
        max_precondition_size: int = 4096,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_size": max_precondition_size,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; returns the closure's loss, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, betas, eps = float(group["lr"]), group["betas"], group["eps"]
            frequency, largest = group["precondition_frequency"], group["max_precondition_size"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = -p.grad if group["maximize"] else p.grad, self.state[p]
                if p.dim() < 2:
                    direction = adam_direction(g, state, betas, eps)
                else:
                    d = soap_direction(g.flatten(1), state, betas, eps, frequency, largest)
                    direction = d.reshape(p.shape)
                if group["weight_decay"]:
                    p.mul_(1 - lr * group["weight_decay"])
                p.add_(direction, alpha=-lr)
        return loss
