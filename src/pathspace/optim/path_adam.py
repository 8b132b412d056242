"""PathAdam: Adam in coordinates that do not depend on how the weights of a network are scaled.

Adam: Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019; AMSGrad: Reddi, Kale and Kumar 2018. Letters: p parameter, g = dL/dp, D
metric, u = sqrt(D) p, m and v the moments.
"""

from __future__ import annotations

from typing import Unpack

from torch.optim import AdamW

from pathspace.metrics import Path
from pathspace.metrics.checks import checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.invariant import Invariant


class PathAdam(Invariant):
    r"""Adam in the coordinates u = sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        h = g / sqrt(D)                                       (dL/du)
        m = beta1 m + (1 - beta1) h;   v = beta2 v + (1 - beta2) h^2
        d = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = (1 - eta weight_decay) p - eta d / sqrt(D)

    This is :class:`Invariant` with ``torch.optim.AdamW``. D is kappa over its mean in the balanced
    frame, plus the damping, to a power (see :class:`pathspace.metrics.Path`). With ``power=0.0``
    the rule is Adam on the network that is balanced once, at the first step. Parameters that do not
    belong to the network take AdamW's rule, D = 1.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. Rates that are good for Adam on a balanced network are good here,
            unless ``normalization`` is ``"none"``.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr, as in AdamW.
        amsgrad: divide by the largest second moment so far.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-4}]
        >>> optimizer = ps.optim.PathAdam(groups, network, lr=1e-3, weight_decay=0.1, clip_norm=1.0)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.001, 0.0001]
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
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            AdamW,
            **checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad),
            **with_metric(self, options, Path),
        )
