"""What somebody who watches runs is told, and a monitor that shows it."""

from __future__ import annotations

import sys

from rich.console import Console

from pathspace.experiments.run import RunConfig, Validation
from pathspace.tools.progress import Progress


class Monitor:
    """Somebody who watches runs; this one hears all and shows nothing but what a user has to know."""

    def stage(self, title: str, jobs: int, done: int = 0) -> None:
        """Hear that a stage of so many jobs begins, of which some have their results already."""

    def started(self, config: RunConfig, steps: int) -> None:
        """Hear that a run of this process begins, and how many steps it will take."""

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """Hear how many steps a run of this process has done."""

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """Hear what a run of this process found on the validation split."""

    def noted(self, label: str, sentence: str) -> None:
        """Print what happened to a job that its user should know."""
        print(f"  {label}: {sentence}", file=sys.stderr)

    def finished(self, label: str, words: str) -> None:
        """Hear that a job is over, with a result or without one."""


class Shown(Monitor):
    """Shows how far a command is: what part of the jobs is done, and of the run that this process does.

    Use it in a `with` statement.

    Args:
        console: Where to show it.
        quiet: Show nothing but what a user has to know.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._progress = Progress(console, quiet=quiet)
        self._jobs = 0
        self._done = 0
        self._steps = 1

    def __enter__(self) -> Shown:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def stage(self, title: str, jobs: int, done: int = 0) -> None:
        """See `Monitor`."""
        self._jobs = jobs
        self._done = done
        self._progress.stage(title, jobs, done)

    def started(self, config: RunConfig, steps: int) -> None:
        """See `Monitor`."""
        del config
        self._steps = max(1, steps)

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `Monitor`."""
        words = f"{config.label}: step {step}/{self._steps}, loss {loss:.4g}"
        self._show(self._done + step / self._steps, words)

    def noted(self, label: str, sentence: str) -> None:
        """See `Monitor`."""
        self._progress.say(f"  {label}: {sentence}")

    def finished(self, label: str, words: str) -> None:
        """See `Monitor`."""
        self._done += 1
        self._show(self._done, f"{label}: {words}")

    def _show(self, completed: float, words: str) -> None:
        last = self._done == self._jobs
        self._progress.update(completed, f"{self._done}/{self._jobs}  {words}", last=last)
