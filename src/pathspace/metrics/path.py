"""The metric of the path norm, P16's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from pathspace.metrics.metric import Metric, MetricOptions, Normalization
from pathspace.paths.kernel import recording
from pathspace.paths.kernel.kappa import kappa_report
from pathspace.paths.kernel.safe_type import PendingReport, RangeReport
from pathspace.rescaling.frames import Frame, FrameName
from pathspace.squared.sharding import to_local
from pathspace.squared.squares import dense


class PathOptions(MetricOptions, total=False):
    """The options of :class:`Path`, as the named optimizers take them."""

    second_term: bool


class Path(Metric):
    """The metric of the path norm, kappa = half of its second derivative (see :func:`pathspace.paths.kappa`).

    Args:
        power, damping, refresh_every, normalization, frame: see :class:`Metric`.
        second_term: use kappa1 + kappa2 (P16 Section 3) instead of kappa1 alone.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> metric = ps.metrics.Path(power=0.5, refresh_every=10)
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=1e-3, metric=metric)
    """

    def __init__(
        self,
        power: float = 1.0,
        *,
        damping: float | None = None,
        refresh_every: int = 10,
        second_term: bool = False,
        normalization: Normalization = "refreshed",
        frame: Frame | FrameName = "balanced",
    ) -> None:
        super().__init__(
            power,
            damping=damping,
            refresh_every=refresh_every,
            normalization=normalization,
            frame=frame,
        )
        self.second_term = second_term

    @property
    def takes_parts(self) -> bool:
        """True if FSDP may split the parameters over processes."""
        own = type(self).values is not Metric.values
        return not own and not self.second_term and self.frame.name != "measure"

    def _kappa(self, names: Sequence[str]) -> RangeReport:
        """Return kappa' of some parameters, and its means."""
        near = self.near_parameters()
        return kappa_report(
            self.network,
            names,
            second_term=self.second_term,
            parameters=near,
            to_frame=self._in_frame,
            recorded=self._recorded(names) if near is None else None,
        )

    def _recorded(
        self, names: Sequence[str]
    ) -> Callable[[Callable[[], PendingReport]], PendingReport] | None:
        """Return what evaluates kappa' of some parameters on a GPU, in one launch where that is possible."""
        network = self.network
        if network.splits or not all(map(recording.is_launched, network.parameters.values())):
            return None
        reads = [
            *network.parameters.values(),
            *network.tape.read_buffers(network.live, network.parameters),
        ]
        objects = (network.tape, *(self.gauge(name) for name in names))
        return lambda evaluate: self._kappa_recording(
            reads, (tuple(names), self.second_term), evaluate, objects
        )

    def _warn_of_unreached(self, kappa: RangeReport) -> None:
        """Tell of parameters, or parts of one, whose kappa is zero but not their gradient: no traced path leads to it.

        kappa_i = 0 implies dL/dp_i = 0, so a step of 0 loses nothing, if the model runs as it did
        when it was traced.
        """
        for name, value in kappa.values.items():
            g = self.network.parameters[name].grad
            whole = kappa.mean(name) == 0
            if g is None or not (whole or name in self.network.call.unused):
                continue
            if bool(torch.where(dense(value) == 0, to_local(g), 0).count_nonzero()):
                step = (
                    "plain step of the balanced network"
                    if whole
                    else "step that damping alone bounds"
                )
                takes = f"takes the {step}" if self.damping else "does not move"
                warnings.warn(
                    f"{'' if whole else 'part of '}'{name}' {takes}: gradients reach it, but no path of the network as "
                    "it was traced does. If the example was shorter than the data (one time step, a small image), or "
                    "the model in another form, trace it as it is trained and make a new optimizer",
                    stacklevel=2,
                )
