"""PathRMSprop: RMSprop in coordinates that do not depend on how the weights of a network are scaled.

RMSprop: Tieleman and Hinton, "Lecture 6.5", 2012; the rule that most work on ReLU recurrent
networks trains with. Letters: p parameter, g = dL/dp, D metric, v mean square.
"""

from __future__ import annotations

from typing import Unpack

from torch.optim import RMSprop

from pathspace.metrics import Path
from pathspace.metrics.checks import checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.invariant import Invariant


class PathRMSprop(Invariant):
    r"""RMSprop in the coordinates u = sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        h = g / sqrt(D)                                       (dL/du)
        v = alpha v + (1 - alpha) h^2;   m = momentum m + h / (sqrt(v) + eps)
        p = p - eta m / sqrt(D)

    This is :class:`Invariant` with ``torch.optim.RMSprop``. D: see :class:`pathspace.metrics.Path`.
    Parameters that do not belong to the network take RMSprop's rule, D = 1.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta.
        alpha: decay rate of v.
        eps: added to the root of v, in the coordinates.
        momentum: factor of m.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.RNN(3, 8, num_layers=2, nonlinearity="relu")  # units of the first layer are rescaled
        >>> network = ps.trace(model, torch.zeros(5, 1, 3))
        >>> optimizer = ps.optim.PathRMSprop(model.parameters(), network, lr=1e-3, alpha=0.9, refresh_every=20)
        >>> model(torch.randn(5, 16, 3))[0].square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 1e-3,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            RMSprop,
            **checked(lr=lr, alpha=alpha, eps=eps, momentum=momentum),
            **with_metric(self, options, Path),
        )
