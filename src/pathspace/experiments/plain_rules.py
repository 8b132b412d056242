"""Rules that torch does not have as the comparisons need them: SGD with decoupled decay, and natural gradients.

A step of `NaturalGradient` solves (F + damping diag(kappa)) d = g by conjugate gradients in
float64, with F on the batch of the loss (see `pathspace.paths.natural_gradient`). That takes some
fifty passes through the network: affordable on small ones alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pathspace


class SGD(Optimizer):
    """v = momentum v + g. As torch's, but with decoupled weight decay, as all methods here have it."""

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self.param_groups:
            lr = group["lr"]
            momentum = group["momentum"]
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

    def _prepare(self) -> None:
        """Change gradients before a step is taken by them."""


LEAST_DAMPING = 0.01
TOLERANCE = 0.01  # of the solution: the gradient is a batch's
ITERATIONS = 20


class NaturalGradient(SGD):
    """SGD with momentum on natural gradients; parameters outside the network take the plain rule.

    A step puts natural gradients in the place of the others.

    Args:
        model: The model; a hook that only looks remembers what it was last called with while
            gradients were enabled.
        network: Its trace.
        lr: Step size.
        momentum: Factor of the velocity, which is kept on natural gradients.
        weight_decay: Decoupled.
        damping: Share of kappa.
        clip_norm: Largest length of a step before the rate, sqrt(g d), which no rescaling changes;
            None does not clip.
    """

    def __init__(
        self,
        model: nn.Module,
        network: pathspace.network.Network,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        damping: float = LEAST_DAMPING,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(model.parameters(), lr, momentum, weight_decay)
        self.network, self.damping, self.clip_norm = network, max(damping, LEAST_DAMPING), clip_norm
        self._batch: Any = None

        # a function, because a copy of the model would take a copy of a method's object along
        def look(called: nn.Module, arguments: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled() and called is model:
                self._batch = arguments[0] if len(arguments) == 1 else arguments

        model.register_forward_pre_hook(look)

    def _prepare(self) -> None:
        name_of = self.network.names_by_id
        gradients = {
            name_of[id(p)]: p.grad
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and id(p) in name_of
        }
        with torch.enable_grad():
            natural = pathspace.paths.natural_gradient(
                self.network,
                self._batch,
                gradients,
                damping=self.damping,
                tolerance=TOLERANCE,
                iterations=ITERATIONS,
            )
        factor = self._factor(gradients, natural)
        for name in gradients:
            p = self.network.parameters[name]
            p.grad = (natural[name] * factor).to(p)

    def _factor(self, gradients: dict[str, Tensor], natural: dict[str, Tensor]) -> float:
        if self.clip_norm is None:
            return 1.0
        products = ((natural[name] * g.double().cpu()).sum() for name, g in gradients.items())
        length = sum(map(float, products)) ** 0.5
        return min(1.0, self.clip_norm / length) if length else 1.0
