"""Path-SGD: steepest descent in the geometry of the path norm.

P16: Neyshabur, Wu, Salakhutdinov, Srebro, "Path-Normalized Optimization of Recurrent Neural
Networks with ReLU Activations", 2016. Letters: p parameter, g = dL/dp, D the metric, v velocity,
eta lr.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Unpack

import torch

from pathspace.metrics import Path
from pathspace.metrics.checks import check_bounds, checked
from pathspace.network import Network
from pathspace.optim.base.metric_optimizer import MetricOptimizer
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.base.steepest import ParamStep, clipping, descend_, orient_gradients
from pathspace.paths.kernel.kappa import kappa_report
from pathspace.squared.sharding import to_local
from pathspace.squared.squares import dense


class PathSGD(MetricOptimizer):
    r"""Path-SGD with momentum, invariant under node-wise rescaling of the network.

    .. code-block:: text

        d = g / D                                    (P16 Section 3: p <- p - (eta / kappa) g)
        v = momentum v + d
        p = (1 - eta weight_decay) p - eta v

    D is kappa over its mean in the balanced frame, plus the damping (see
    :class:`pathspace.metrics.Path`). kappa is the diagonal of half the Hessian of the squared path
    norm. (P16 Eqs. (5) and (7) as printed would give eta / (2 kappa).) Parameters that do not
    belong to the network take d = g.

    ``normalization="none", refresh_every=1`` is the rule of the paper.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. Rates that are good for SGD on a balanced network are good here,
            unless ``normalization`` is ``"none"``.
        momentum: factor of the velocity v.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, the gradient of (lambda / 2)
            gamma_net^2.
        clip_step: largest length of d over all parameters, in the gauge in which the network was
            balanced at the first step (of d itself, outside the network). It does not depend on how
            the weights are scaled, except with ``frame="weights"``. Without momentum, no step in
            the balanced network is longer than lr clip_step. ``clip_norm`` is applied before it; it
            alone lets a weight of small kappa move by up to lr / sqrt(D).
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.PathSGD(
        ...     model.parameters(), network, lr=0.1, momentum=0.9, nesterov=True, clip_step=1.0
        ... )
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> schedule.step()
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """

    clips_by = "clip_step"
    _velocities = MappingProxyType({"momentum_buffer": 1})

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        clip_step: float | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = checked(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            path_decay=path_decay,
        )
        if nesterov and not momentum:
            raise ValueError("nesterov needs momentum > 0")
        check_bounds(clip_step=clip_step)
        self.clip_step = clip_step
        super().__init__(params, network, defaults, **with_metric(self, options, Path))

    def _advance(self, steps: list[ParamStep]) -> None:
        self._orient(steps)
        descend_(steps, clipping(steps, self.clip_norm, self.clip_step))

    def _orient(self, steps: list[ParamStep]) -> None:
        """As `orient_gradients`, with d/dp (lambda / 2) gamma_net^2 = lambda kappa1 p added to the gradients."""
        orient_gradients(steps, self.metric)
        decayed = {
            step.name: step for step in steps if step.name is not None and step.group["path_decay"]
        }
        if not decayed:
            return
        near = self.metric.near_parameters()
        weights = self.network.parameters if near is None else near
        kappa1 = kappa_report(self.network, list(decayed), parameters=near).values
        for name, step in decayed.items():
            # the parameter's type may hold neither
            term = dense(kappa1[name]) * to_local(weights[name])
            step.g = torch.add(step.g, term, alpha=step.group["path_decay"])
