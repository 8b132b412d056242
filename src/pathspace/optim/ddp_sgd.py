"""DDPSGD: steepest descent in the geometry of the data-dependent path norm.

D16: Neyshabur, Tomioka, Salakhutdinov, Srebro, "Data-Dependent Path Normalization in Neural Networks", 2016. Letters: p
parameter, g = dL/dp, kappa the metric, c its normalizer, v velocity, eta lr.
"""

from __future__ import annotations

from typing import Any

from pathspace.network import Network
from pathspace.optim.base.near_data import NearbyDataMetric
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.path_optimizer import Normalization
from pathspace.optim.path_sgd import PathSGD
from pathspace.paths.data.data_dependent import Estimator
from pathspace.paths.data.edge_statistics import Sharing
from pathspace.paths.data.node_measure import Statistic, check_options


class DDPSGD(NearbyDataMetric, PathSGD):
    r"""Data-dependent Path-SGD with momentum, invariant under node-wise rescaling of the network.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        d = c g / kappa;   v = momentum v + d;   p = (1 - eta weight_decay) p - eta v

    alpha = 0 is :class:`PathSGD`, bit by bit. alpha = 1 with the second moment is the diagonal natural gradient of a
    Gaussian output (D16 Theorem 2), without shared weights and for convolutions; for recurrent networks it is the
    diagonal of the Fisher information.

    The metric needs data: the optimizer remembers what the model was last called with while gradients were enabled, by
    a forward pre-hook that only looks (``close()`` removes it), or takes the batch that ``observe`` is given. If the
    metric is due, it is computed at the end of that call from its own graph; where that is not the evaluation form of
    the model (dropout, BatchNorm in training) or cannot be followed (autocast, frozen parameters, ``outside=``,
    ``nn.RNN`` but for a stack of it with a linear readout), the step runs the model's code once more, on a copy. With
    several calls for one step, the last one's batch counts. A model inside ``torch.compile`` or ``torch.func`` may not
    show its batches: use ``observe``.

    Parameters that do not belong to the network take the plain rule, d = g, with the same options.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta. With a normalizer it has about the size that SGD's has on a balanced network.
        momentum: factor of the velocity v, which is kept on d.
        alpha: share of the data, in [0, 1].
        statistic: ``"second_moment"`` (R = M) or ``"covariance"`` (R = C).
        sharing: whether the edges of a parameter are added before the statistic (``"parameters"``) or after it
            (``"edges"``); see :func:`pathspace.paths.data_dependent_kappa`.
        estimator: ``"exact"``, ``"signs"`` or ``"auto"``; see there.
        averaging: decay of the average of the data term over refreshes; None: 0.9 for random signs, and no average of
            exact values.
        seed: of the random signs, which are drawn by a generator of their own; the state keeps how many were drawn.
        examples: look at the first so many examples of a batch only, or at a share of them below 1, such as 0.25:
            cheaper and noisier, and the average over refreshes makes up for it; None: at all.
        watch: whether to look at the model's calls; if not, every batch comes by ``observe``.
        process_group: the processes of data-parallel training, over whose parts of a batch the metric is averaged at
            every refresh, so that replicas stay alike; ``"default"``: those of torch.distributed, where it is
            initialised; None: no others.
        power: how much of kappa is in the metric, see :class:`PathSGD`.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, the gradient of (lambda / 2) gamma_net^2 at alpha = 0.
        clip_norm: largest norm of g / sqrt(kappa / c) over all parameters.
        clip_step: largest length of d over all parameters, on the balanced network; see :class:`PathSGD`.
        refresh_every: steps between two computations of kappa; stale values stay invariant.
        normalization: which c, see :class:`PathSGD`.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to kappa there.
            With alpha = 1 it is needed: a weight that no example of a batch used has kappa = 0, and so have output
            biases for the covariance; a zero kappa stands for a zero step.
        maximize: ascend instead.

    Raises:
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, if no batch was seen, or for sparse gradients.
        UnmatchedForwardError: at a step, if the model's forward pass is not the traced one.
        FloatingPointError: at a step, if kappa is not finite; parameters are not changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.1, alpha=0.5)
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
        alpha: float = 0.5,
        statistic: Statistic = "second_moment",
        sharing: Sharing = "parameters",
        estimator: Estimator = "auto",
        averaging: float | None = None,
        seed: int = 0,
        examples: float | None = None,
        watch: bool = True,
        process_group: Any = "default",
        power: float = 1.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        clip_norm: float | None = None,
        clip_step: float | None = None,
        refresh_every: int = 1,
        normalization: Normalization = "refreshed",
        damping: float = 0.0,
        maximize: bool = False,
    ) -> None:
        check_options(alpha, statistic)
        self.alpha = alpha
        super().__init__(
            params,
            network,
            lr,
            momentum,
            power=power,
            nesterov=nesterov,
            weight_decay=weight_decay,
            path_decay=path_decay,
            clip_norm=clip_norm,
            clip_step=clip_step,
            refresh_every=refresh_every,
            normalization=normalization,
            damping=damping,
            maximize=maximize,
        )
        self._start(
            alpha=alpha,
            statistic=statistic,
            sharing=sharing,
            estimator=estimator,
            averaging=averaging,
            seed=seed,
            examples=examples,
            watch=watch,
            process_group=process_group,
        )

    def _is_between(self) -> bool:
        return self._between is not None and self._between.is_expected()
