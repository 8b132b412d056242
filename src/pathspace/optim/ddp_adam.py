"""DDPAdam: Adam in the coordinates of the data-dependent path norm.

D16: Neyshabur, Tomioka, Salakhutdinov, Srebro, "Data-Dependent Path Normalization in Neural
Networks", 2016. Letters: p parameter, kappa the metric, c its normalizer.
"""

from __future__ import annotations

from typing import Unpack

from pathspace.metrics import DataDependent
from pathspace.network import Network
from pathspace.optim.base.data_optimizer import DataOptimizer
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedDataOptions, with_metric
from pathspace.optim.path_adam import PathAdam


class DDPAdam(DataOptimizer, PathAdam):
    r"""Adam in the coordinates u = sqrt(D) p of the data-dependent kappa, invariant under node-wise rescaling.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        then as PathAdam

    With alpha = 0 this is :class:`PathAdam`, bit by bit. The metric reads batches from the calls of
    the model (see :class:`pathspace.metrics.DataDependent`); ``optimizer.observe(batch)`` gives it
    a batch by hand.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr, as in AdamW.
        amsgrad: divide by the largest second moment so far.
        alpha: share of the data, in [0, 1]; None: 0.5, or that of the ``metric``.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.DataDependent` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`. RuntimeError also if
            the metric saw no batch.
        UnmatchedForwardError: at a step, if the model's forward pass is not the traced one.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.DDPAdam(model.parameters(), network, lr=1e-3, alpha=0.5, watch=False)
        >>> batch = torch.randn(16, 4)
        >>> model(batch).square().mean().backward()
        >>> optimizer.observe(batch)  # needed with watch=False
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
        alpha: float | None = None,
        **options: Unpack[SharedDataOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            **with_metric(self, {"alpha": alpha, **options}, DataDependent),
        )
