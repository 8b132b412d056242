"""PathGradientAdam: Adam fed with the direction of Path-SGD, the recipe of P16 Section 5.3. It is not invariant.

P16: Neyshabur, Wu, Salakhutdinov, Srebro, "Path-Normalized Optimization of Recurrent Neural Networks with ReLU
Activations", 2016. Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer, m and v the moments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pathspace.network import Network
from pathspace.optim.base.metric_state import Metric
from pathspace.optim.base.network_optimizer import Active, Parameters, check_betas, check_not_negative
from pathspace.optim.base.path_metric import safe_divisor_
from pathspace.optim.base.path_optimizer import Normalization, PathOptimizer
from pathspace.optim.base.steepest import Steepest, shrinking
from pathspace.optim.rules.moments import adam_direction
from pathspace.paths.kernel.norm import widened


class PathGradientAdam(PathOptimizer):
    r"""Adam with g / kappa in the place of the gradient; **not** invariant, use :class:`PathAdam`.

    .. code-block:: text

        d = c g / kappa
        m = beta1 m + (1 - beta1) d;   v = beta2 v + (1 - beta2) d^2
        p = (1 - eta weight_decay) p - eta (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Rescaling multiplies the d of an edge u -> v by s_v / s_u, like its weight. But m and sqrt(v) are both multiplied
    by it, and the step m / sqrt(v) not at all: a weight that was made 100 times as large takes the same step as
    before. For the same reason the second moment cancels the preconditioner: with a kappa that stays the same this is
    Adam on g, but for eps. kappa acts by its motion alone. It is here because the experiments of P16 used it.

    Parameters that do not belong to the network take AdamW's rule, d = g, with the same options.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of every parameter, times lr.
        amsgrad: divide by the largest second moment so far.
        clip_norm: largest norm of g / sqrt(kappa / c) over all parameters (of g, outside the network).
        refresh_every: steps between two computations of kappa.
        second_term: use kappa1 + kappa2 instead of kappa1 alone.
        normalization: which c, see :class:`PathSGD`; it matters for eps and the clipping only. ``"none"`` is the
            paper's c = 1.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to kappa there
            (of the first step's mean, unless c is refreshed).
        maximize: ascend instead.

    Raises:
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, for sparse gradients.
        FloatingPointError: at a step, if kappa is not finite; parameters are not changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.PathGradientAdam(model.parameters(), network, lr=1e-3)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

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
        refresh_every: int = 1,
        second_term: bool = False,
        normalization: Normalization = "none",
        damping: float = 0.0,
        clip_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        check_betas(betas)
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
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

    steps_nearby = False  # the rule is another one in every member of a rescaling class

    def _metric(self, kappa: Tensor, state: dict[str, Any]) -> Metric:
        return Metric(safe_divisor_(kappa), state["normalizer"])

    def _advance(self, active: Active, metrics: dict[Tensor, Metric]) -> None:
        steps = []
        for p, group in active:
            assert p.grad is not None
            steps.append(Steepest(p, group, -p.grad if group["maximize"] else p.grad, metrics.get(p)))
        factor = shrinking(steps, self.clip_norm)
        for step in steps:
            p, group, lr = step.p, step.group, float(step.group["lr"])
            d = widened(step.direction(factor))
            direction = adam_direction(d, self.state[p], group["betas"], group["eps"], group["amsgrad"])
            if group["weight_decay"]:
                p.mul_(1 - lr * group["weight_decay"])
            p.add_(direction.to(p.dtype), alpha=-lr)
