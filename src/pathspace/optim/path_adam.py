"""PathAdam: Adam in coordinates that do not depend on how the weights of a network are scaled.

Adam: Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019;
AMSGrad: Reddi, Kale and Kumar 2018. Letters: p parameter, g = dL/dp, D metric, u = sqrt(D) p, m and v the moments.
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

    It is :class:`Invariant` with ``torch.optim.AdamW``. D is kappa over its mean in the balanced frame, plus the
    damping, to a power; see :class:`pathspace.metrics.Path`. Two networks that differ by a node-wise rescaling stay so,
    step by step: bitwise, if the factors are powers of two. With power = 0 the rule is Adam on the network balanced
    once, at the first step.

    Parameters that do not belong to the network take AdamW's rule, D = 1, with the same options.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta; about Adam's on a balanced network, unless ``normalization`` is ``"none"``.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr, as in AdamW.
        amsgrad: divide by the largest second moment so far.
        options: ``clip_norm``, ``maximize`` and ``metric``, as for :class:`Invariant`; without a ``metric`` those of
            :class:`pathspace.metrics.Path`.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

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
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            AdamW,
            **checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad),
            **with_metric(self, options, Path),
        )
