"""PathMuon: orthogonalized momentum in coordinates that do not depend on the scales of the weights.

Muon: Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in neural networks",
2024; the sizes of its steps: Liu et al., "Muon is Scalable for LLM Training", 2025. Letters: p parameter, g = dL/dp,
D metric, G = g / sqrt(D) as a matrix [n, m], B momentum, eta lr.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.optim.base.coordinates import CoordinateOptimizer
from pathspace.optim.base.network_optimizer import Parameters, check_betas, check_counts, check_not_negative
from pathspace.optim.base.path_optimizer import Normalization
from pathspace.optim.rules.moments import adam_direction
from pathspace.optim.rules.newton_schulz import muon_direction


class PathMuon(CoordinateOptimizer):
    r"""Muon in the coordinates sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        D = (kappa / c)^power (1 / w)^(1 - power)             (as in PathAdam)
        G = g / sqrt(D)                                       (dL/du; filters of a convolution are rows)
        B = momentum B + (1 - momentum) G
        d = U V^T, nearly, for U S V^T = (1 - momentum) G + momentum B    (of B without nesterov)
        p = (1 - eta weight_decay) p - eta 0.2 sqrt(max(n, m)) d / sqrt(D)

    A matrix can be orthogonalized only where its entries have a common unit. G belongs to coordinates without a
    scale, hence so does d: two networks that differ by a node-wise rescaling stay so, step by step, bitwise if the
    factors are powers of two.

    Biases and other vectors take PathAdam's rule. Parameters that do not belong to the network take the same rules
    with D = 1: Muon and AdamW.

    Args:
        params: parameters or param groups.
        network: the traced network; its parameters must be those of ``params``.
        lr: learning rate eta of both rules.
        momentum: decay rate of B.
        nesterov: orthogonalize a mean of G and B instead of B.
        weight_decay: decoupled decay of every parameter, times lr.
        betas: decay rates of the two moments, for vectors.
        eps: added to the root of the second moment, for vectors.
        adjust_lr: factor of a matrix's step. ``"match_rms_adamw"``: 0.2 sqrt(max(n, m)), which gives steps of
            AdamW's size, so that one lr serves both rules; ``"original"``: sqrt(max(1, n / m)).
        ns_steps: Newton-Schulz iterations.
        ns_dtype: type to do them in; ``torch.bfloat16`` is the published one, faster where the hardware has it. None:
            that of the parameter, float32 for half precision.
        power: how much of kappa is in the metric: 1 all, 0 only the balance of the units at the first step; see
            :class:`PathAdam`.
        clip_norm: largest norm of g / sqrt(D) over all parameters; longer gradients are scaled down to it. The norm
            does not depend on the scaling of the weights.
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
        >>> optimizer = ps.optim.PathMuon(model.parameters(), network, lr=1e-3)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
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
        _check_momentum(momentum)
        if adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr must be 'match_rms_adamw' or 'original', got {adjust_lr!r}")
        check_counts(ns_steps=ns_steps)
        self.adjust_lr, self.ns_steps, self.ns_dtype = adjust_lr, ns_steps, ns_dtype
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: an option is out of its range, or is one of the whole optimizer, which torch would ignore.
        """
        if "momentum" in param_group:
            _check_momentum(param_group["momentum"])
        super().add_param_group(param_group)

    def _direction(self, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if g.dim() < 2:
            return adam_direction(g, state, group["betas"], group["eps"])
        G = g.flatten(1)
        d = muon_direction(G, state, group["momentum"], group["nesterov"], self.ns_steps, self.ns_dtype)
        return d.mul_(self._size(*G.shape)).reshape(g.shape)

    def _size(self, n: int, m: int) -> float:
        """The factor of a matrix's step."""
        return (
            0.2 * math.sqrt(max(n, m)) if self.adjust_lr == "match_rms_adamw" else math.sqrt(max(1.0, n / m))
        )


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
