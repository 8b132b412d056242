"""Path-SGD: steepest descent in the geometry of the path norm.

P16: Neyshabur, Wu, Salakhutdinov, Srebro, "Path-Normalized Optimization of Recurrent Neural Networks with ReLU
Activations", 2016. Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer, v velocity, eta lr.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.optim.base.kept_step import KeptStep, Together
from pathspace.optim.base.metric_state import Metric, gauge_of
from pathspace.optim.base.network_optimizer import Active, Parameters, check_bounds, check_not_negative
from pathspace.optim.base.path_metric import powered_, safe_divisor_
from pathspace.optim.base.path_optimizer import Normalization, PathOptimizer
from pathspace.optim.base.steepest import Steepest, shrinking, squared_length
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.kernel.kappa import first_term


class PathSGD(PathOptimizer):
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
        power: how much of kappa is in the metric: with another power than 1, D = (kappa w / c)^power / w stands for
            kappa / c everywhere, where 1 / w is the metric of the network balanced once, at the first step (see
            :class:`PathAdam`). 1 is Path-SGD; 0 is SGD on the balanced network.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, the gradient of (lambda / 2) gamma_net^2.
        clip_norm: largest norm of g / sqrt(kappa / c) over all parameters (of g, outside the network); longer
            gradients are scaled down to it. The norm does not depend on the scaling of the weights. It lets a weight
            of little kappa move far: by up to lr sqrt(c / kappa).
        clip_step: largest length of d over all parameters, measured in the gauge in which the network was balanced at
            the first step (as it is, outside the network), which does not depend on the scaling of the weights
            either. What clipping gradients does for SGD on the balanced network: without momentum no step there is
            longer than lr clip_step. Takes effect after ``clip_norm``.
        refresh_every: steps between two computations of kappa; stale values stay invariant.
        second_term: use kappa1 + kappa2 instead of kappa1 alone.
        normalization: ``"refreshed"``: c is the present mean of kappa, seen in the gauge in which the network was
            balanced at the first step; ``"frozen"``: that of the first step, for good; ``"none"``: c = 1, the paper's
            rule, whose learning rate has another unit for every network.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to kappa there
            (of the first step's mean, unless c is refreshed); stays invariant, unlike a constant.
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
        params: Parameters,
        network: Network,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        power: float = 1.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        clip_norm: float | None = None,
        clip_step: float | None = None,
        refresh_every: int = 1,
        second_term: bool = False,
        normalization: Normalization = "refreshed",
        damping: float = 0.0,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, path_decay=path_decay)
        check_not_negative(power=power)
        self.power, self.factored = power, power == 1  # powers are taken of elements
        if nesterov and not momentum:
            raise ValueError("nesterov needs momentum > 0")
        check_bounds(clip_step=clip_step)
        self.clip_step = clip_step
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "path_decay": path_decay,
            "maximize": maximize,
        }
        super().__init__(
            params,
            network,
            defaults,
            clip_norm=clip_norm,
            refresh_every=refresh_every,
            second_term=second_term,
            normalization=normalization,
            damping=damping,
        )
        # subclasses with another rule have other steps between two refreshes
        plain = type(self)._advance is PathSGD._advance
        self._between = KeptStep(self) if plain else None

    def _metric(self, kappa: Tensor, state: dict[str, Any]) -> Metric:
        if self.power != 1:  # c D, since the step divides by D = kappa / c
            powered_(kappa, gauge_of(state), state["normalizer"], self.power).mul_(state["normalizer"])
        return Metric(safe_divisor_(kappa), state["normalizer"])

    def _taken_between(self) -> bool:
        return self._between is not None and self._between.take()

    def _remember(self, active: Active) -> None:
        if self._between is not None and self.refresh_every > 1:
            self._between.remember(active)

    def _advance(self, active: Active, metrics: dict[Tensor, Metric]) -> None:
        gradients = self._gradients(active)
        steps = [
            Steepest(p, group, g, metrics.get(p), self._scratch(p))
            for (p, group), g in zip(active, gradients, strict=True)
        ]
        factor = shrinking(steps, self.clip_norm)
        if self.clip_step is not None:
            gauges = [gauge_of(self.state[s.p]) if s.metric is not None else None for s in steps]
            factor *= clip_factor(factor**2 * squared_length(steps, gauges), self.clip_step)
        self._move_(steps, factor)

    def _move_(self, steps: list[Steepest], factor: float) -> None:
        """Update all parameters; those with a plain metric of their type together, each group in one call."""
        moved: dict[int, Together] = {}
        for step in steps:
            p, group, state = step.p, step.group, self.state[step.p]
            metric = step.metric
            values = None if metric is None else metric.values
            if (
                metric is None
                or not isinstance(values, Tensor)
                or not values.dtype == p.dtype == step.g.dtype
                or (group["momentum"] and "momentum_buffer" not in state)
            ):
                update_(step, factor, state)
                continue
            together = moved.get(id(group))
            if together is None:
                together = moved[id(group)] = Together(group)
            together.parameters.append(p)
            together.gradients.append(step.g)
            together.metrics.append(values)
            together.normalizers.append(metric.normalizer)
            if group["momentum"]:
                together.velocities.append(state["momentum_buffer"])
        for together in moved.values():
            together.move_(factor)

    def _scratch(self, p: Tensor) -> Tensor | None:
        """Memory that held p's square, which nobody needs after kappa is known."""
        memory = self._memory.get(self.network.names_by_id.get(id(p), ""))
        return memory if memory is not None and memory.dtype == p.dtype else None

    def _gradients(self, active: Active) -> list[Tensor]:
        """The gradients to descend, with the path regularizer's; the user's own tensors are never changed."""
        regularized = [p for p, group in active if group["path_decay"]]
        names = self._names(regularized) if regularized else {}
        decayed, near = list(names.values()), None if self._near is None else self._near.parameters
        kappa1 = first_term(self.network, near, names=decayed) if decayed else {}
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


def update_(step: Steepest, factor: float, state: dict[str, Any]) -> None:
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
