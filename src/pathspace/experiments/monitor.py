"""What somebody who watches runs is told; these hear it and do nothing."""

from __future__ import annotations

from pathspace.experiments.run import RunConfig, RunResult, Validation


class Listener:
    """Somebody whom a run tells how far it is."""

    def started(self, config: RunConfig, steps: int) -> None:
        """A run begins that will take so many steps."""

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """A run has done so many steps."""

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """A run has looked at the validation split."""

    def noted(self, config: RunConfig, sentence: str) -> None:
        """Something happened to a run that its user should know."""


class Monitor(Listener):
    """Somebody who watches many runs."""

    def stage(self, title: str, runs: int) -> None:
        """A stage of so many runs begins."""

    def finished(self, result: RunResult) -> None:
        """A run is over, or its result was there already."""

    def unfinished(self, config: RunConfig, why: str) -> None:
        """A run ended without a result, and others go on."""
