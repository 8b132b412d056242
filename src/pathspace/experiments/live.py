"""Live progress: bars with the time left in a terminal, one plain line per run elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pathspace.experiments.run import RunConfig, RunResult


class Silent:
    """Shows nothing."""

    def stage(self, title: str, runs: int) -> None:
        """See `pool.Monitor`."""

    def started(self, config: RunConfig, steps: int) -> None:
        """See `pool.Monitor`."""

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `pool.Monitor`."""

    def finished(self, result: RunResult) -> None:
        """See `pool.Monitor`."""

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `pool.Monitor`."""


class PlainLines(Silent):
    """Prints a line when a stage begins and when a run is over: for logs and pipes.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs = self._done = 0

    def stage(self, title: str, runs: int) -> None:
        """See `pool.Monitor`."""
        self._runs, self._done = runs, 0
        self._console.print(f"{title}: {runs} run{'s' * (runs != 1)}", highlight=False)

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `pool.Monitor`."""
        self._console.print(f"  {config.label}: {sentence}", highlight=False, markup=False, soft_wrap=True)

    def finished(self, result: RunResult) -> None:
        """See `pool.Monitor`."""
        self._done += 1
        self._console.print(
            f"  {self._done}/{self._runs}  {result.config.label}: {outcome(result)}",
            highlight=False,
            soft_wrap=True,
        )


class Bars(Silent):
    """Shows a bar for the stage and one for every run in progress, each with the time left.

    Args:
        progress: The display, started by the caller.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage: TaskID | None = None
        self._runs: dict[str, TaskID] = {}
        self._done = 0
        self._parts: dict[str, tuple[int, int]] = {}  # of the runs in progress: steps done, and all

    def stage(self, title: str, runs: int) -> None:
        """See `pool.Monitor`."""
        self._done, self._parts = 0, {}
        self._stage = self._progress.add_task(f"[bold]{title}", total=runs, note="")

    def started(self, config: RunConfig, steps: int) -> None:
        """See `pool.Monitor`."""
        self._runs[config.key] = self._progress.add_task(f"  {config.label}", total=steps, note="")
        self._parts[config.key] = (0, steps)

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `pool.Monitor`."""
        if config.key in self._runs:
            self._progress.update(self._runs[config.key], completed=step, note=f"loss {loss:.4g}")
            self._parts[config.key] = (step, self._parts[config.key][1])
            self._show_stage()

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `pool.Monitor`."""
        self._progress.console.print(f"{config.label}: {sentence}", highlight=False, markup=False)

    def finished(self, result: RunResult) -> None:
        """See `pool.Monitor`."""
        bar = self._runs.pop(result.config.key, None)
        if bar is not None:
            self._progress.remove_task(bar)
        self._parts.pop(result.config.key, None)
        self._done += 1
        self._show_stage()

    def _show_stage(self) -> None:
        # Parts of runs count too: else the time left of the whole would not be known before the first run is over.
        if self._stage is not None:
            parts = sum(step / steps for step, steps in self._parts.values())
            self._progress.update(self._stage, completed=self._done + parts)


def monitor(console: Console) -> tuple[AbstractContextManager[object], Bars | PlainLines]:
    """Return the monitor that fits a console, and the context to use it in."""
    if not console.is_terminal:
        return nullcontext(), PlainLines(console)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
    return progress, Bars(progress)


def outcome(result: RunResult) -> str:
    """Say in a few words how a run ended."""
    if result.diverged_at is not None:
        return f"diverged at step {result.diverged_at}"
    error = result.validations[-1].error
    test = "" if result.test_error is None else f", test error {result.test_error:.4g}"
    return f"validation error {error:.4g}{test}, {result.seconds:.1f} s"
