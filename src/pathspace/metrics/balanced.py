"""The metric of a network that is balanced once, at the first step."""

from __future__ import annotations

from pathspace.metrics.path import Path
from pathspace.rescaling.frames import Frame, FrameName


class Balanced(Path):
    """D = 1 / f^2 with the gauge f of the first step: the plain rule on the balanced network, whatever the weights are.

    The same as ``Path(power=0.0)``, and the same steps as those of the plain rule after
    ``ps.rescaling.balance_``, but the weights stay where they are. kappa is never computed.

    Args:
        frame: the member that the network is brought to; see :class:`Path`.

    Raises:
        ValueError: the frame is unknown.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network, metric = ps.trace(model, torch.zeros(1, 4)), ps.metrics.Balanced()
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=1e-3, metric=metric)
    """

    def __init__(self, *, frame: Frame | FrameName = "balanced") -> None:
        super().__init__(power=0.0, frame=frame)
