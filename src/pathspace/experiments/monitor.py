"""What somebody who watches runs is told."""

from __future__ import annotations

from typing import Protocol

from pathspace.experiments.run import RunConfig, RunResult


class Monitor(Protocol):
    """Somebody who watches."""

    def stage(self, title: str, runs: int) -> None:
        """A stage of so many runs begins."""

    def started(self, config: RunConfig, steps: int) -> None:
        """A run begins that will take so many steps."""

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """A run has done so many steps."""

    def noted(self, config: RunConfig, sentence: str) -> None:
        """Something happened to a run that its user should know."""

    def finished(self, result: RunResult) -> None:
        """A run is over, or its result was there already."""
