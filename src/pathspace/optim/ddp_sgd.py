"""DDPSGD: steepest descent in the geometry of the data-dependent path norm.

D16: Neyshabur, Tomioka, Salakhutdinov, Srebro, "Data-Dependent Path Normalization in Neural
Networks", 2016. Letters: p parameter, g = dL/dp, kappa the metric, c its normalizer, v velocity,
eta lr.
"""

from __future__ import annotations

from typing import Unpack

from pathspace.metrics import DataDependent
from pathspace.network import Network
from pathspace.optim.base.data_optimizer import DataOptimizer
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedDataOptions, with_metric
from pathspace.optim.path_sgd import PathSGD


class DDPSGD(DataOptimizer, PathSGD):
    r"""Data-dependent Path-SGD with momentum, invariant under node-wise rescaling of the network.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        d = g / D;   v = momentum v + d;   p = (1 - eta weight_decay) p - eta v

    With alpha = 0 this is :class:`PathSGD`, bit by bit. With alpha = 1 and the second moment as the
    statistic it is the diagonal natural gradient of a Gaussian output (D16 Theorem 2), if no
    weights are shared, and for convolutions. For recurrent networks it is the diagonal of the
    Fisher information.

    The metric reads batches from the calls of the model (see
    :class:`pathspace.metrics.DataDependent`). ``optimizer.observe(batch)`` gives it a batch by
    hand; ``optimizer.close()`` removes the hook from the model.

    Parameters that do not belong to the network take the plain rule, d = g, with the same options.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. Rates that are good for SGD on a balanced network are good here,
            unless ``normalization`` is ``"none"``.
        momentum: factor of the velocity v.
        alpha: share of the data, in [0, 1]; None: 0.5, or that of the ``metric``.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, the gradient of (lambda / 2)
            gamma_net^2 at alpha = 0.
        clip_step: largest length of d over all parameters, on the balanced network; see
            :class:`PathSGD`.
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
        >>> optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.1, momentum=0.9, alpha=0.5)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.close()  # the model keeps its weights, and no hook
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        alpha: float | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        clip_step: float | None = None,
        **options: Unpack[SharedDataOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            lr,
            momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            path_decay=path_decay,
            clip_step=clip_step,
            **with_metric(self, {"alpha": alpha, **options}, DataDependent),
        )
