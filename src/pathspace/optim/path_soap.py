"""PathSOAP: Shampoo with Adam in its eigenbasis, in coordinates that do not depend on the scales of the weights.

SOAP: Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, "SOAP: Improving and
Stabilizing Shampoo using Adam", 2024. Letters: p parameter, g = dL/dp, D metric, G = g / sqrt(D) as
a matrix, eta lr.
"""

from __future__ import annotations

from typing import Any, Unpack

from pathspace.metrics import Path
from pathspace.metrics.checks import checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.options import SharedOptions, with_metric
from pathspace.optim.invariant import Invariant
from pathspace.optim.rules.soap import SOAP


class PathSOAP(Invariant):
    r"""SOAP in the coordinates sqrt(D) p, invariant under node-wise rescaling of the network.

    .. code-block:: text

        G = g / sqrt(D)                                       (dL/du; filters of a convolution are rows)
        L = beta2 L + (1 - beta2) G G^T;   R = beta2 R + (1 - beta2) G^T G
        d = Q_L Adam(Q_L^T G Q_R) Q_R^T                       (Q_L, Q_R eigenvectors of L, R, refreshed now and then)
        p = (1 - eta weight_decay) p - eta d / sqrt(D)

    This is :class:`Invariant` with SOAP for matrices and AdamW for biases and other vectors. D: see
    :class:`pathspace.metrics.Path`. A preconditioner that mixes entries of a matrix is meaningful
    only if they have a common unit, and those of G have one.

    The invariance is bitwise if the factors are powers of two. Other factors change the rounding,
    and rounding turns the eigenvectors of eigenvalues that lie close together. In float32 two such
    runs differ after a few steps, as do two runs that sum their examples in different orders.

    The first step of a matrix only measures its basis, as in the published code, but applies weight
    decay. Parameters that do not belong to the network take the same rules with D = 1.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. Rates that are good for Adam are good here.
        betas: decay rates of the two moments; L and R decay with the second.
        eps: added to the root of the second moment, in the coordinates.
        weight_decay: decoupled decay of every parameter, times lr.
        precondition_frequency: steps between two updates of the eigenvectors, each by one power
            iteration and QR.
        max_precondition_size: sides of a matrix that are longer than this keep the standard basis.
        process_group: processes that have the same weights and gradients, over which updates of
            eigenvectors are divided; see :class:`PathMuon`. Of sharded models (FSDP) only the two
            sides of a matrix are divided.
        options: other options as :class:`Invariant` (``metric``, ``clip_norm``, ``maximize``), and
            those of :class:`pathspace.metrics.Path` in place of a ``metric``.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`Invariant`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2)
        ... )
        >>> network = ps.trace(model, torch.zeros(1, 1, 8, 8))
        >>> optimizer = ps.optim.PathSOAP(model.parameters(), network, lr=3e-3, precondition_frequency=10)
        >>> model(torch.randn(16, 1, 8, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    matrices = True

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        precondition_frequency: int = 40,
        max_precondition_size: int = 4096,
        process_group: Any = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            params,
            network,
            SOAP,
            **checked(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                precondition_frequency=precondition_frequency,
                max_precondition_size=max_precondition_size,
            ),
            process_group=process_group,
            **with_metric(self, options, Path),
        )
