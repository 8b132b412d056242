"""Path-SGD: steepest descent in the geometry of the path norm.

P16: Neyshabur, Wu, Salakhutdinov, Srebro, "Path-Normalized Optimization of Recurrent Neural Networks with ReLU
Activations", 2016. Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer, v velocity, eta lr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.optim.path_metric import Gauge, gauges, parameter_names, safe_divisor_
from pathspace.paths.kappa import first_term, kappa_of


class PathSGD(torch.optim.Optimizer):
    r"""Path-SGD with momentum, invariant under node-wise rescaling of the network.

    .. code-block:: text

        d = c g / kappa                              (P16 Section 3: p <- p - (eta / kappa) g)
        v = momentum v + d
        p = (1 - eta weight_decay) p - eta v

    kappa is the diagonal of half the Hessian of the squared path norm. (P16 Eqs. (5) and (7) as printed would give
    eta / (2 kappa).) Two networks that differ by a node-wise rescaling stay so, step by step: bitwise, if the factors
    are powers of two.

    Parameters that do not belong to the network take the plain rule, d = g, with the same options.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta. With a normalizer it has about the size that SGD's has on a balanced network.
        momentum: factor of the velocity v, which is kept on d.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, the gradient of (lambda / 2) gamma_net^2.
        clip_norm: largest norm of g / sqrt(kappa / c) over all parameters (of g, outside the network); longer
            gradients are scaled down to it. The norm does not depend on the scaling of the weights.
        refresh_every: steps between two computations of kappa; stale values stay invariant.
        second_term: use kappa1 + kappa2 instead of kappa1 alone.
        normalization: ``"refreshed"``: c is the present mean of kappa, seen in the gauge in which the network was
            balanced at the first step; ``"frozen"``: that of the first step, for good; ``"none"``: c = 1, the paper's
            rule, whose learning rate has another unit for every network.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to kappa there;
            stays invariant, unlike a constant.
        maximize: ascend instead.

    Raises:
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, for sparse gradients.
        FloatingPointError: at a step, if kappa is not finite; parameters are not changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1, momentum=0.9)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        network: Network,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        clip_norm: float | None = None,
        refresh_every: int = 1,
        second_term: bool = False,
        normalization: Literal["refreshed", "frozen", "none"] = "refreshed",
        damping: float = 0.0,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        for name, value in (("path_decay", path_decay), ("damping", damping)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if nesterov and not momentum:
            raise ValueError("nesterov needs momentum > 0")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive or None, got {clip_norm}")
        if refresh_every < 1:
            raise ValueError(f"refresh_every must be at least 1, got {refresh_every}")
        if normalization not in ("refreshed", "frozen", "none"):
            raise ValueError(f"normalization must be 'refreshed', 'frozen' or 'none', got {normalization!r}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "path_decay": path_decay,
            "maximize": maximize,
        }
        self.network = network
        self.clip_norm, self.refresh_every, self.second_term = clip_norm, refresh_every, second_term
        self.normalization, self.damping = normalization, damping
        super().__init__(params, defaults)
        parameter_names(network, (p for group in self.param_groups for p in group["params"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in active:
            if p.grad.is_sparse:
                raise RuntimeError("PathSGD does not support sparse gradients; use Embedding(sparse=False)")
        if not active:
            return loss
        names = parameter_names(self.network, (p for p, _ in active))
        metrics = self._metrics(names)
        gradients = self._gradients(active, names)
        steps = [_Step(p, group, g, metrics.get(p)) for (p, group), g in zip(active, gradients, strict=True)]
        factor = 1.0 if self.clip_norm is None else _clip_factor(steps, self.clip_norm)
        for step in steps:
            _update_(step, factor, self.state[step.p])
        return loss

    def _metrics(self, names: dict[Tensor, str]) -> dict[Tensor, _Metric]:
        """Kappa and c of every parameter of the network, computed afresh when it is due."""
        if not any(self.state[p].get("age", 0) % self.refresh_every == 0 for p in names):
            for p in names:
                self.state[p]["age"] += 1
            return {p: _Metric(self.state[p]["kappa"], self.state[p]["normalizer"]) for p in names}
        kappa = kappa_of(self.network, list(names.values()), second_term=self.second_term)
        self._normalize(names, kappa)
        metrics = {}
        for p, name in names.items():
            state, value = self.state[p], kappa[name]
            if self.damping:
                gauge = Gauge(state["gauge_rows"], state["gauge_columns"])
                # the damping stands for the same number in every member of the rescaling class
                value.add_(gauge.damping(p.shape).to(value.dtype), alpha=self.damping * state["mean"])
            metrics[p] = _Metric(safe_divisor_(value), state["normalizer"])
            if self.refresh_every > 1:
                state["kappa"], state["age"] = value, 1
        return metrics

    def _normalize(self, names: dict[Tensor, str], kappa: dict[str, Tensor]) -> None:
        """Set the numbers c (see ``path_metric``), and the gauge at the first step."""
        if self.normalization == "none" and not self.damping:
            for p in names:
                self.state[p]["normalizer"] = 1.0
            return
        new = [name for p, name in names.items() if "gauge_rows" not in self.state[p]]
        found = gauges(self.network, new) if new else {}
        for p, name in names.items():
            state = self.state[p]
            first = name in found
            if first:
                state["gauge_rows"], state["gauge_columns"] = found[name].rows, found[name].columns
            if first or self.normalization == "refreshed":
                mean = Gauge(state["gauge_rows"], state["gauge_columns"]).mean(kappa[name])
                state["mean"] = mean if mean > 0 else 1.0
            state["normalizer"] = 1.0 if self.normalization == "none" else state["mean"]

    def _gradients(
        self, active: list[tuple[Tensor, dict[str, Any]]], names: dict[Tensor, str]
    ) -> list[Tensor]:
        """The gradients to descend, with the path regularizer's; the user's own tensors are never changed."""
        decayed = [names[p] for p, group in active if group["path_decay"] and p in names]
        kappa1 = first_term(self.network, names=decayed) if decayed else {}
        gradients = []
        for p, group in active:
            g = p.grad
            assert g is not None
            if group["maximize"]:
                g = -g
            if names.get(p) in kappa1:
                # d/dp (lambda / 2) gamma_net^2 = lambda kappa1 p
                g = torch.addcmul(g, kappa1[names[p]].to(g.dtype), p, value=group["path_decay"])
            gradients.append(g)
        return gradients


@dataclass(frozen=True)
class _Metric:
    kappa: Tensor  # zeros replaced by infinity
    normalizer: float  # c


@dataclass(frozen=True)
class _Step:
    """What one parameter's step is made of; ``metric`` is None outside the network."""

    p: Tensor
    group: dict[str, Any]
    g: Tensor
    metric: _Metric | None

    @property
    def fused(self) -> bool:
        """Whether g / kappa can be computed in p's own type."""
        return self.metric is None or self.metric.kappa.dtype == self.p.dtype

    def direction(self, factor: float) -> Tensor:
        """D = factor c g / kappa, a new tensor of p's type."""
        if self.metric is None:
            return self.g * factor
        wide = self.g.to(self.metric.kappa.dtype) / self.metric.kappa
        return wide.mul_(factor * self.metric.normalizer).to(self.p.dtype)

    def add_to_(self, tensor: Tensor, factor: float) -> None:
        """Tensor += factor d, without a temporary where the types allow it."""
        if self.metric is None:
            tensor.add_(self.g, alpha=factor)
        elif self.fused:
            tensor.addcdiv_(self.g, self.metric.kappa, value=factor * self.metric.normalizer)
        else:
            tensor.add_(self.direction(factor))


def _clip_factor(steps: list[_Step], largest: float) -> float:
    """What scales g down so that ||g / sqrt(kappa / c)||, the root of the sum of g d, is at most ``largest``."""
    square = 0.0
    for step in steps:
        d = step.direction(1.0)
        square += float(torch.dot(step.g.reshape(-1), d.reshape(-1)))
    # a norm that is not a number must show in the parameters, not vanish in a comparison
    return 1.0 if square <= largest**2 else largest / math.sqrt(square) if square == square else square


def _update_(step: _Step, factor: float, state: dict[str, Any]) -> None:
    """V = momentum v + d;  p = (1 - eta weight_decay) p - eta v."""
    p, lr, momentum = step.p, float(step.group["lr"]), step.group["momentum"]
    if step.group["weight_decay"]:
        p.mul_(1 - lr * step.group["weight_decay"])
    if not momentum:
        step.add_to_(p, -lr * factor)
        return
    if "momentum_buffer" in state:
        velocity = state["momentum_buffer"].mul_(momentum)
        step.add_to_(velocity, factor)
    else:
        velocity = state["momentum_buffer"] = step.direction(factor)
    if step.group["nesterov"]:  # d + momentum v
        p.add_(velocity, alpha=-lr * momentum)
        step.add_to_(p, -lr * factor)
    else:
        p.add_(velocity, alpha=-lr)
