"""QuasiDiagonal: steepest descent in the data-dependent metric with the column of the bias.

O13: Ollivier, "Riemannian metrics for neural networks" I and II, 2013/2015; D16: Neyshabur, Tomioka, Salakhutdinov,
Srebro 2016. Letters: p parameter, g = dL/dp, M metric of one unit (0 its bias), c normalizer, v velocity, eta lr.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.quasi_diagonal import biases, groups
from pathspace.metrics.solve import solve_diagonal, solve_quasi_diagonal
from pathspace.network import Network
from pathspace.optim.base.metric_state import Metric
from pathspace.optim.base.network_optimizer import Active, Parameters
from pathspace.optim.base.path_optimizer import Normalization
from pathspace.optim.base.steepest import Steepest
from pathspace.optim.ddp_sgd import DDPSGD
from pathspace.optim.path_sgd import update_
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.data.data_dependent import Estimator
from pathspace.paths.data.node_measure import Statistic


class QuasiDiagonal(DDPSGD):
    r"""Quasi-diagonal natural gradient, invariant under rescaling of units and under shifts of what enters them.

    .. code-block:: text

        d_i = c (g_i - g_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00)
        d_0 = c g_0 / M_00 - sum_i (M_0i / M_00) d_i
        v = momentum v + d;   p = (1 - eta weight_decay) p - eta v

    For the weights i into a unit and its bias 0, in linear, convolutional and recurrent layers; other parameters, and
    units without a bias, take DDPSGD's rule. M_ii = kappa_i and M_0i are those of
    :func:`pathspace.metrics.quasi_diagonal_metric`. With alpha = 1 and without damping the run does not change when a
    constant is added to an input, or to the activity of a unit, and its effect taken out of the biases.

    Where the data comes from is told at :class:`DDPSGD`; parameters that do not belong to the network take d = g.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta. With momentum take (1 - momentum) times as much: the default is for none.
        momentum: factor of the velocity v, which is kept on d.
        alpha: share of the data, in (0, 1]; the paths' share is diagonal.
        statistic: ``"second_moment"`` or ``"covariance"``; the second has M_00 = 0 at outputs.
        estimator: see :class:`DDPSGD`, like the options that follow.
        averaging: likewise.
        seed: likewise.
        examples: likewise.
        watch: likewise.
        process_group: likewise.
        nesterov: likewise.
        weight_decay: likewise.
        clip_norm: largest norm sqrt(g^T d / c) over all parameters.
        refresh_every: steps between two computations of the metric.
        normalization: which c: as for :class:`PathSGD`, but one number for all parameters, the mean of theirs, because
            the rule mixes them.
        damping: fraction of kappa's mean in the balanced member of the rescaling class that is added to the diagonal
            there; keeps the invariance under rescaling, and gives up a little of that under shifts.
        maximize: ascend instead.

    Raises:
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, if no batch was seen, or for sparse gradients.
        UnmatchedForwardError: at a step, if the model's forward pass is not the traced one.
        FloatingPointError: at a step, if the metric is not finite; parameters are not changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.QuasiDiagonal(model.parameters(), network, lr=0.05, damping=1e-2)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 0.05,
        momentum: float = 0.0,
        *,
        alpha: float = 1.0,
        statistic: Statistic = "second_moment",
        estimator: Estimator = "auto",
        averaging: float | None = None,
        seed: int = 0,
        examples: float | None = None,
        watch: bool = True,
        process_group: Any = "default",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        refresh_every: int = 1,
        normalization: Normalization = "refreshed",
        damping: float = 1e-2,
        maximize: bool = False,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(
                f"alpha must be in (0, 1], got {alpha}: without data the metric is diagonal (use PathSGD)"
            )
        super().__init__(
            params,
            network,
            lr,
            momentum,
            alpha=alpha,
            statistic=statistic,
            estimator=estimator,
            averaging=averaging,
            seed=seed,
            examples=examples,
            watch=watch,
            process_group=process_group,
            nesterov=nesterov,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            refresh_every=refresh_every,
            normalization=normalization,
            damping=damping,
            maximize=maximize,
        )

    _pairs = staticmethod(biases)

    def _normalize(self, states: dict[Tensor, dict[str, Any]]) -> None:
        super()._normalize(states)
        size = sum(p.numel() for p in states)
        c = sum(state["normalizer"] * p.numel() for p, state in states.items()) / max(1, size)
        for state in states.values():
            state["normalizer"] = c

    def _advance(self, active: Active, metrics: dict[Tensor, Metric]) -> None:
        gradients = dict(zip((p for p, _ in active), self._gradients(active), strict=True))
        directions = self._directions(gradients, metrics)
        factor = 1.0
        if self.clip_norm is not None:
            # products have either sign here: in float32 those of a large gradient would cancel as inf - inf
            pairs = ((gradients[p].double(), d.double()) for p, d in directions.items())
            factor = clip_factor(sum(float((g * d).sum()) for g, d in pairs), self.clip_norm)
        for p, group in active:
            update_(Steepest(p, group, directions[p].to(p.dtype), None, None), factor, self.state[p])

    def _directions(
        self, gradients: dict[Tensor, Tensor], metrics: dict[Tensor, Metric]
    ) -> dict[Tensor, Tensor]:
        """D of every parameter."""
        directions = {p: g for p, g in gradients.items() if p not in metrics}
        by_name = {name: p for p, name in self._names(metrics).items()}
        order = list(self.network.parameters)
        bias_of = {
            name: order[self.state[p]["bias"]] for name, p in by_name.items() if "bias" in self.state[p]
        }
        diagonal = {p: _dense(metric) for p, metric in metrics.items()}
        for bias, weights in groups(bias_of, list(by_name)).items():
            b, members = by_name[bias], [by_name[w] for w in weights]
            rows = len(b)

            def wide(tensors: list[Tensor], rows: int = rows) -> Tensor:
                return torch.cat([t.reshape(rows, -1) for t in tensors], 1)

            M_00 = diagonal[b]
            d, d_0 = solve_quasi_diagonal(
                wide([gradients[p].to(M_00.dtype) for p in members]),
                gradients[b].to(M_00.dtype),
                wide([diagonal[p] for p in members]),
                wide([self.state[p]["cross"] for p in members]).to(M_00.dtype),
                M_00,
            )
            directions[b] = d_0 * metrics[b].normalizer
            parts = d.split([p.numel() // rows for p in members], 1)
            for p, part in zip(members, parts, strict=True):
                directions[p] = part.reshape(p.shape) * metrics[p].normalizer
        for p, metric in metrics.items():
            if p not in directions:
                directions[p] = (
                    solve_diagonal(gradients[p].to(diagonal[p].dtype), diagonal[p]) * metric.normalizer
                )
        return directions


def _dense(metric: Metric) -> Tensor:
    """M_ii, whose zeros the metric holds as infinities."""
    values: Any = metric.values
    return torch.where(torch.isinf(values), 0.0, values)
