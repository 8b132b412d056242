"""The second half of a refresh on a GPU, from kappa' to the factors of optimizers, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.gauge import Gauge
from pathspace.metrics.power import Shift
from pathspace.paths.kernel.recording import Recording

Finish = Callable[[Mapping[str, Tensor], Mapping[str, Sequence[Shift]]], dict[str, Tensor]]
"""From kappa' and shifts to the factors of optimizers, by name."""


class FinishRecording(Recording):
    """A recording of operations whose numbers change from one refresh to the next.

    A recording repeats operations on the same memory. So these numbers are put into a tensor that
    stays where it is, and everything else that decides which operations run is named.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Tensor | None = None

    def finish(
        self,
        evaluate: Finish,
        values: Mapping[str, Tensor],
        shifts: Mapping[str, Sequence[Shift]],
        decisions: tuple[Any, ...],
        gauges: tuple[Gauge, ...],
    ) -> dict[str, Tensor]:
        """Return what a function makes of kappa', from a recording if there is one.

        Args:
            evaluate: the function.
            values: kappa', all on one device.
            shifts: of each parameter, or of its blocks.
            decisions: what else decides which operations run.
            gauges: of the parameters.
        """
        every = [shift for name in values for shift in shifts[name]]
        numbers = self._on_device(
            torch.tensor([(shift.normalizer, shift.added) for shift in every], dtype=torch.float64),
            next(iter(values.values())).device,
        )
        rows = iter(numbers)
        moved: dict[str, list[Shift]] = {}
        for name in values:
            moved[name] = [_moved(shift, next(rows)) for shift in shifts[name]]
        is_empty = tuple(shift.is_empty for shift in every)
        return self(
            [*values.values(), numbers],
            (tuple(values), is_empty, *decisions),
            lambda: evaluate(values, moved),
            gauges,
        )

    def _on_device(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return numbers in memory that stays where it is."""
        kept = self._numbers
        if kept is None or kept.device != device or kept.shape != numbers.shape:
            kept = self._numbers = numbers.to(device, copy=True)
        return kept.copy_(numbers)


def _moved(shift: Shift, row: Tensor) -> Shift:
    """Return a shift whose numbers are those of a tensor, [normalizer, added]."""
    return Shift(row[0], row[1], shift.is_empty)
