"""PathMuon: orthogonalized momentum in coordinates that do not depend on the scales of the weights.

Muon: Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in
neural networks", 2024; the sizes of its steps: Liu et al., "Muon is Scalable for LLM Training",
2025. Letters: p parameter, g = dL/dp, D metric, G = g / sqrt(D) as a matrix [n, m], B momentum, eta
lr.
"""

from __future__ import annotations

from typing import Any, Unpack

from pathspace.metrics import Path
from pathspace.metrics.checks import check_numbers, checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.base.steepest import ParamStep
from pathspace.optim.invariant import Invariant
from pathspace.optim.rules.muon import ROW_BLOCKS, AdjustLr, MuonAdamW
from pathspace.rescaling.optimizer_states import Group


class PathMuon(Invariant):
    r"""Muon in the coordinates sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        G = g / sqrt(D)                                       (dL/du; filters of a convolution are rows)
        B = momentum B + (1 - momentum) G
        d = U V^T, nearly, for U S V^T = (1 - momentum) G + momentum B    (of B without nesterov)
        p = (1 - eta weight_decay) p - eta 0.2 sqrt(max(n, m)) d / sqrt(D)

    This is :class:`Invariant` with ``torch.optim.Muon``, which iterates in bfloat16, for matrices
    and ``torch.optim.AdamW`` for biases and other vectors. D: see :class:`pathspace.metrics.Path`.
    To orthogonalize a matrix is meaningful only if its entries have a common unit, and those of G
    have one.

    Some weights hold several matrices whose rows the network uses separately, such as
    ``in_proj_weight`` of ``nn.MultiheadAttention``. Each of them is orthogonalized separately, as
    if it were the weight of a layer of its own.

    Parameters that do not belong to the network take the same rules with D = 1: Muon and AdamW.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta of both rules.
        momentum: decay rate of B.
        nesterov: orthogonalize a mean of G and B instead of B.
        weight_decay: decoupled decay of every parameter, times lr.
        betas: decay rates of the two moments, for vectors.
        eps: added to the root of the second moment, for vectors.
        adjust_lr: factor of a matrix's step. ``"match_rms_adamw"``: 0.2 sqrt(max(n, m)), which
            gives steps of AdamW's size, so that one lr serves both rules; ``"original"``:
            sqrt(max(1, n / m)).
        ns_steps: Newton-Schulz iterations.
        use_muon: False gives matrices to AdamW, too; set it in the param group of embeddings and of
            the last layer.
        process_group: processes that have the same weights and gradients, as
            ``DistributedDataParallel`` gives them. Each orthogonalizes a share of the matrices and
            sends the results to the others. ``"default"``: all processes of torch.distributed,
            where it is initialised; None: each process orthogonalizes all matrices. Sharded models
            (FSDP) divide this work in any case.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> last = {"params": model[2].parameters(), "use_muon": False}
        >>> optimizer = ps.optim.PathMuon([{"params": model[0].parameters()}, last], network, lr=1e-3)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    matrices = True

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
        adjust_lr: AdjustLr = "match_rms_adamw",
        ns_steps: int = 5,
        use_muon: bool = True,
        process_group: Any = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        _check(momentum, use_muon)
        if adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(
                f"adjust_lr must be 'match_rms_adamw' or 'original', got {adjust_lr!r}"
            )
        super().__init__(
            params,
            network,
            MuonAdamW,
            **checked(
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                betas=betas,
                eps=eps,
                adjust_lr=adjust_lr,
                ns_steps=ns_steps,
                use_muon=use_muon,
            ),
            process_group=process_group,
            **with_metric(self, options, Path),
        )

    def _advance(self, steps: list[ParamStep]) -> None:
        # at every step, for a copy of a parameter has none of its attributes
        for name, sizes in self.network.row_blocks.items():
            shadow = self._shadows.get(self.network.parameters[name])
            if shadow is not None:
                setattr(shadow, ROW_BLOCKS, sizes)
        super()._advance(steps)

    def _check_group(self, param_group: Group) -> None:
        super()._check_group(param_group)
        _check(param_group.get("momentum", 0.0), param_group.get("use_muon", True))


def _check(momentum: float, use_muon: bool) -> None:
    check_numbers(momentum=momentum)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not isinstance(use_muon, bool):
        raise ValueError(f"use_muon must be True or False, got {use_muon!r}")
