"""PathAdam: Adam in coordinates that do not depend on how the weights of a network are scaled.

Adam: Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019;
AMSGrad: Reddi, Kale and Kumar 2018. Letters: p parameter, g = dL/dp, D metric, u = sqrt(D) p, m and v the moments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pathspace.network import Network
from pathspace.optim.base.coordinates import CoordinateOptimizer
from pathspace.optim.base.network_optimizer import Parameters, check_betas, check_not_negative
from pathspace.optim.base.path_optimizer import Normalization
from pathspace.optim.rules.moments import adam_direction


class PathAdam(CoordinateOptimizer):
    r"""Adam in the coordinates u = sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        D = (kappa / c)^power (1 / w)^(1 - power)
        h = g / sqrt(D)                                       (dL/du)
        m = beta1 m + (1 - beta1) h;   v = beta2 v + (1 - beta2) h^2
        d = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = (1 - eta weight_decay) p - eta d / sqrt(D)

    kappa of an edge u -> v becomes (s_u / s_v)^2 kappa when unit u is rescaled by s_u and v by s_v, and so does
    1 / w, with w = (b_v / b_u)^2 of the gauge b that was measured at the first step (b_u is the scale at which unit u
    stands, compared with the balanced member of its rescaling class). kappa w and c do not change, hence
    D = (kappa w / c)^power / w becomes (s_u / s_v)^2 D for every power, and h, m, v, eps and d belong to coordinates
    without a scale. Two networks that differ by a node-wise rescaling stay so, step by step: bitwise, if the factors
    are powers of two. With power = 0 the rule is Adam on the network balanced once, at the first step.

    Parameters that do not belong to the network take AdamW's rule, D = 1, with the same options.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta. With a normalizer it has about the size that Adam's has on a balanced network.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr, as in AdamW.
        amsgrad: divide by the largest second moment so far.
        power: how much of kappa is in the metric: 1 all, 0 only the balance of the units at the first step.
        clip_norm: largest norm of h over all parameters; longer gradients are scaled down to it. The norm does not
            depend on the scaling of the weights.
        refresh_every: steps between two computations of kappa; stale values stay invariant.
        second_term: use kappa1 + kappa2 instead of kappa1 alone.
        normalization: which c, see :class:`PathSGD`; ``"none"`` is c = 1.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to kappa there
            (of the first step's mean, unless c is refreshed); bounds the steps of weights on paths of little weight,
            in the balanced network to lr / sqrt(damping) times the direction. None is 0.01, or 0 where
            ``normalization`` is ``"none"``, the raw rule.
        maximize: ascend instead.

    Raises:
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, for sparse gradients.
        FloatingPointError: at a step, if kappa is not finite; parameters are not changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.PathAdam(model.parameters(), network, lr=1e-3)
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
        power: float = 1.0,
        refresh_every: int = 1,
        second_term: bool = False,
        normalization: Normalization = "refreshed",
        damping: float | None = None,
        clip_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        check_betas(betas)
        check_not_negative(eps=eps)
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
            power=power,
            clip_norm=clip_norm,
            refresh_every=refresh_every,
            second_term=second_term,
            normalization=normalization,
            damping=damping,
        )

    def _direction(self, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return adam_direction(g, state, group["betas"], group["eps"], group["amsgrad"])
