"""QuasiDiagonal: steepest descent in the data-dependent metric with the column of the bias.

O13: Ollivier, "Riemannian metrics for neural networks" I and II, 2013/2015; D16: Neyshabur,
Tomioka, Salakhutdinov, Srebro 2016. Letters: p parameter, g = dL/dp, M metric of one unit (0 its
bias), c normalizer, v velocity, eta lr.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
from torch import Tensor

from pathspace.metrics.quasi_diagonal import DataDependentWithBias
from pathspace.metrics.solve import solve_diagonal, solve_quasi_diagonal
from pathspace.network import Network
from pathspace.optim.base.data_optimizer import DataOptimizer
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedDataOptions, with_metric
from pathspace.optim.base.steepest import ParamStep, descend_
from pathspace.optim.path_sgd import PathSGD
from pathspace.optim.rules.clipping import clip_factor


class QuasiDiagonal(DataOptimizer, PathSGD):
    r"""Quasi-diagonal natural gradient, invariant under rescaling of units and under shifts of their inputs.

    .. code-block:: text

        d_i = (g_i - g_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00)
        d_0 = g_0 / M_00 - sum_i (M_0i / M_00) d_i
        v = momentum v + d;   p = (1 - eta weight_decay) p - eta v

    The formula holds for the weights i into a unit and its bias 0, in linear, convolutional and
    recurrent layers. Other parameters, and units without a bias, take the rule of :class:`DDPSGD`.
    M_ii = kappa_i and M_0i are those of :func:`pathspace.metrics.quasi_diagonal_metric`.

    With alpha = 1 and ``normalization="none"`` a run does not change when a constant is added to an
    input or to the activity of a unit, and the biases that read it are corrected.

    The metric reads batches from the calls of the model (see
    :class:`pathspace.metrics.DataDependent`). Parameters that do not belong to the network take d =
    g.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. The default is for momentum 0; otherwise take (1 - momentum) times as
            much.
        momentum: factor of the velocity v.
        alpha: share of the data, in (0, 1]; the share of the paths is diagonal.
        nesterov: take the step with d + momentum v.
        weight_decay: decoupled decay of every parameter, times lr.
        path_decay: lambda; adds lambda kappa1 p to the gradient, as :class:`PathSGD`.
        options: other options as :class:`Invariant` (``clip_norm``, here of sqrt(g^T d), and
            ``maximize``), and those of :class:`pathspace.metrics.DataDependent` except ``power``
            and ``sharing``. The normalizer c is the mean over all parameters, as the rule mixes
            them. The damping times c is added to the diagonal. Both keep the invariance under
            rescaling and end that under shifts.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`. RuntimeError also if
            the metric saw no batch.
        UnmatchedForwardError: at a step, if the model's forward pass is not the traced one.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.QuasiDiagonal(model.parameters(), network, lr=0.05, damping=1e-2)
        >>> for batch in torch.randn(3, 16, 4):
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
    """

    form = "balanced"
    clips_by = "clip_norm"

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 0.05,
        momentum: float = 0.0,
        *,
        alpha: float = 1.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        path_decay: float = 0.0,
        **options: Unpack[SharedDataOptions],
    ) -> None:
        if not alpha:
            raise ValueError(
                f"alpha must be in (0, 1], got {alpha}: without data the metric is diagonal (use PathSGD)"
            )
        for name in ("metric", "power", "sharing", "second_term"):
            if name in options:
                raise TypeError(
                    f"{name} is no option of QuasiDiagonal: its metric is not of kappa alone"
                )
        super().__init__(
            params,
            network,
            lr,
            momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            path_decay=path_decay,
            **with_metric(self, {"alpha": alpha, **options}, DataDependentWithBias),
        )

    def _advance(self, steps: list[ParamStep]) -> None:
        self._orient(steps)
        inside = {step.name: step for step in steps if step.name is not None}
        directions = self._directions(
            {name: _balanced(step) for name, step in inside.items()},
            {name: step.factor for name, step in inside.items() if step.factor is not None},
        )
        factor: float | Tensor = 1.0
        if self.clip_norm is not None:
            # products have either sign here: in float32 those of a large gradient would cancel as
            # inf - inf
            pairs = [
                (_balanced(s).double(), directions[name].double()) for name, s in inside.items()
            ]
            pairs += [(s.g.double(), s.g.double()) for s in steps if s.name is None]
            place = pairs[0][0].device
            factor = clip_factor(
                torch.stack([(g * d).sum().to(place) for g, d in pairs]).sum(), self.clip_norm
            )
        for name, step in inside.items():
            assert step.gauge is not None
            # d = f d'
            step.g = step.gauge.times_(directions[name])
            step.factor = None
        descend_(steps, factor)

    def _directions(
        self, gradients: dict[str, Tensor], diagonal: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """d' of every parameter of the network, in the balanced frame."""
        assert isinstance(self.metric, DataDependentWithBias)
        crosses: dict[str, dict[str, Tensor]] = {}  # bias -> of the weights into its units
        for name in gradients:
            pair = self.metric.cross(name)
            if pair is not None and pair[0] in gradients:
                crosses.setdefault(pair[0], {})[name] = pair[1]
        directions: dict[str, Tensor] = {}
        for bias, crossed in crosses.items():
            rows = gradients[bias].numel()
            M_00 = diagonal[bias].reshape(-1)
            d, d_0 = solve_quasi_diagonal(
                _side_by_side((gradients[w] for w in crossed), rows, M_00.dtype),
                gradients[bias].reshape(-1).to(M_00.dtype),
                _side_by_side((diagonal[w] for w in crossed), rows, M_00.dtype),
                _side_by_side(crossed.values(), rows, M_00.dtype),
                M_00,
            )
            # one number for all units has no dimension
            directions[bias] = d_0.view_as(gradients[bias])
            parts = d.split([gradients[w].numel() // rows for w in crossed], 1)
            for w, part in zip(crossed, parts, strict=True):
                directions[w] = part.reshape(gradients[w].shape)
        for name, g in gradients.items():
            if name not in directions:
                directions[name] = solve_diagonal(g.to(diagonal[name].dtype), diagonal[name])
        return directions


def _side_by_side(tensors: Iterable[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Return the weights into some units as one matrix ``[rows, columns]``."""
    return torch.cat([t.reshape(rows, -1).to(dtype) for t in tensors], 1)


def _balanced(step: ParamStep) -> Tensor:
    """g' = f g."""
    assert step.gauge is not None
    return step.gauge.times_(step.g.clone(memory_format=torch.contiguous_format))
