"""DDPAdam: Adam in the coordinates of the data-dependent path norm.

D16: Neyshabur, Tomioka, Salakhutdinov, Srebro, "Data-Dependent Path Normalization in Neural Networks", 2016. Letters: p
parameter, kappa the metric, c its normalizer.
"""

from __future__ import annotations

from typing import Any

from pathspace.network import Network
from pathspace.optim.base.near_data import NearbyDataMetric
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.path_optimizer import Normalization
from pathspace.optim.path_adam import PathAdam
from pathspace.paths.data.data_dependent import Estimator
from pathspace.paths.data.edge_statistics import Sharing
from pathspace.paths.data.node_measure import Statistic, check_options


class DDPAdam(NearbyDataMetric, PathAdam):
    r"""Adam in the coordinates u = sqrt(D) p of the data-dependent kappa, invariant under node-wise rescaling.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        D = (kappa / c)^power (1 / w)^(1 - power);   then as PathAdam

    alpha = 0 is :class:`PathAdam`, bit by bit. Where the data comes from is told at :class:`DDPSGD`.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr, as in AdamW.
        amsgrad: divide by the largest second moment so far.
        alpha: share of the data, in [0, 1].
        statistic: see :class:`DDPSGD`, like the options that follow.
        sharing: likewise.
        estimator: likewise.
        averaging: likewise.
        seed: likewise.
        examples: likewise.
        watch: likewise.
        process_group: likewise.
        power: see :class:`PathAdam`, like the options that follow.
        refresh_every: likewise.
        normalization: likewise.
        damping: likewise; with alpha = 1 some is needed.
        clip_norm: likewise.
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
        >>> optimizer = ps.optim.DDPAdam(model.parameters(), network, lr=1e-3, alpha=0.5, refresh_every=10)
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
        refresh_every: int = 1,
        normalization: Normalization = "refreshed",
        damping: float | None = None,
        clip_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        check_options(alpha, statistic)
        self.alpha = alpha
        super().__init__(
            params,
            network,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            power=power,
            refresh_every=refresh_every,
            normalization=normalization,
            damping=damping,
            clip_norm=clip_norm,
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
