"""PathGradientAdam: Adam fed with the direction of Path-SGD, the recipe of P16 Section 5.3. It is not invariant.

P16: Neyshabur, Wu, Salakhutdinov, Srebro, "Path-Normalized Optimization of Recurrent Neural
Networks with ReLU Activations", 2016. Letters: p parameter, g = dL/dp, kappa the path metric, c its
normalizer, m and v the moments.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, Unpack

from pathspace.metrics import Path
from pathspace.metrics.checks import checked
from pathspace.network import Network
from pathspace.optim.base.metric_optimizer import MetricOptimizer
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.base.steepest import (
    ParamStep,
    clipping,
    gradient_over_direction,
    orient_gradients,
)
from pathspace.optim.rules.moments import MOMENTS, adam_direction, step_decayed_
from pathspace.squared.precision import widened


class PathGradientAdam(MetricOptimizer):
    r"""Adam on g / kappa instead of the gradient g; **not** invariant, use :class:`PathAdam`.

    .. code-block:: text

        d = g / D                                              (scale="none": g / kappa as it comes)
        d = g / D  ||f g|| / ||g / (f D)||                     (scale="gradient": as long as g in the frame)
        m = beta1 m + (1 - beta1) d;   v = beta2 v + (1 - beta2) d^2
        p = (1 - eta weight_decay) p - eta (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The experiments of P16 used this rule. Rescaling multiplies the d of an edge u -> v by s_v /
    s_u, like its weight. It multiplies m and sqrt(v) by the same factor, so their quotient does not
    change: a weight that was made 100 times as large takes the same step as before. For the same
    reason v cancels the preconditioner: with a constant kappa, and but for eps, this is Adam on g.
    Only changes of kappa have an effect.

    **The option scale.** During training kappa grows, that of recurrent matrices more than tenfold
    (figures in docs/results/char-lm.md). So g / kappa shrinks, while v averages over the last 1 /
    (1 - beta2) steps and still holds larger values. Steps become too short. ``scale="gradient"``
    multiplies d by one number for the whole network, so that d is as long as g in the frame of the
    metric. Proportions between weights do not change. P16 does not say whether its experiments did
    so. In the balanced frame the number does not depend on how the weights are scaled; with
    ``frame="weights"`` it does.

    Parameters that do not belong to the network take AdamW's rule, d = g, with the same options.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of every parameter, times lr.
        amsgrad: divide by the largest second moment so far.
        scale: ``"none"``, the rule as printed, or ``"gradient"``. It does not affect parameters
            outside the network, and is computed before ``clip_norm`` shortens d.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``, with
            ``normalization="none"`` by default, the kappa of the paper.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.PathGradientAdam(model.parameters(), network, lr=1e-3, scale="gradient")
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    clips_by = None
    _misread = MOMENTS
    _velocities = MappingProxyType({"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2})
    _velocities_near = False

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        scale: Literal["none", "gradient"] = "none",
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        if scale not in ("none", "gradient"):
            raise ValueError(f"scale must be 'none' or 'gradient', got {scale!r}")
        self.scale = scale
        super().__init__(
            params, network, defaults, **with_metric(self, options, Path, normalization="none")
        )

    def _orient(self, steps: list[ParamStep]) -> None:
        orient_gradients(steps, self.metric)

    def _advance(self, steps: list[ParamStep]) -> None:
        orient_gradients(steps, self.metric)
        factor = clipping(steps, self.clip_norm, None)
        scale = gradient_over_direction(steps) if self.scale == "gradient" else 1.0
        for step in steps:
            group = step.group
            d = widened(step.direction()) * (factor if step.name is None else factor * scale)
            if step.far is not None:
                d = d * step.far
            direction = adam_direction(
                d, step.state, group["betas"], group["eps"], group["amsgrad"]
            )
            step_decayed_(step.p, direction, group)
