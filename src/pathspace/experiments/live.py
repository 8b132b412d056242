"""Live progress: bars in a terminal, elsewhere a line for every run and now and then one with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
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

from pathspace.experiments.monitor import Monitor
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.terminal import print_line
from pathspace.progress import Lines


class Parts:
    """How much of a stage is done, parts of runs included: else nothing would be known before the first run is over."""

    def __init__(self, runs: int) -> None:
        self.runs, self.done = runs, 0
        self._any_over = False  # of those that began here
        self._steps: dict[str, tuple[int, int]] = {}  # of the runs in progress: steps done, and all

    def started(self, config: RunConfig, steps: int) -> None:
        """A run begins that will take so many steps, perhaps again, as its process died."""
        before, _ = self._steps.get(config.key, (0, steps))
        self._steps[config.key] = (before, steps)

    def advanced(self, config: RunConfig, step: int) -> tuple[int, float, bool] | None:
        """A run has done so many steps; returns all of them, what part of the stage it found done, and what follows.

        That is whether time begins to tell here: a process takes its first step for its first run after loading and
        tracing, which may take longer than all other steps. None of a run that is over: a cluster may tell late.
        """
        if config.key not in self._steps:
            return None
        before, steps = self._steps[config.key]
        self._steps[config.key] = (step, steps)
        found = 0 if before else step - 1  # a run tells its first step
        return steps, found / max(1, steps) / max(1, self.runs), not (before or self._any_over)

    def finished(self, config: RunConfig) -> float:
        """A run is over, or its result was there already; returns what part of the stage took no time therefore."""
        self.done += 1
        if self._steps.pop(config.key, None) is None:
            return 1 / max(1, self.runs)
        self._any_over = True
        return 0.0

    @property
    def in_runs(self) -> float:
        """What is done, with one run as the unit."""
        return self.done + sum(step / max(1, steps) for step, steps in self._steps.values())

    @property
    def share(self) -> float:
        """What is done, as a part of the whole."""
        return self.in_runs / max(1, self.runs)


class Notes(Monitor):
    """Prints what a user has to know, and no progress.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `monitor.Monitor`."""
        self._print(f"  {config.label}: {sentence}")

    def _print(self, line: str) -> None:
        print_line(self._console, line)


class PlainLines(Notes):
    """Prints a line when a stage begins, when a run is over, and now and then in between: for logs and pipes.

    Args:
        console: Where to print.
        clock: Seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._parts, self._working = Parts(0), False
        self._lines = Lines(self._print, clock=clock)

    def stage(self, title: str, runs: int) -> None:
        """See `monitor.Monitor`."""
        self._parts, self._working = Parts(runs), False
        self._print(f"{title}: {runs} run{'s' * (runs != 1)}")

    def started(self, config: RunConfig, steps: int) -> None:
        """See `monitor.Monitor`."""
        if not self._working:  # results that were on disk took no time
            self._working = True
            self._lines.begin(self._parts.share)
        self._parts.started(config, steps)

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `monitor.Monitor`."""
        told = self._parts.advanced(config, step)
        if told is None:
            return
        steps, found, begins = told
        if begins:
            self._lines.prepared(self._parts.share)
        else:
            self._lines.skip(found)
        done = f"{self._parts.done}/{self._parts.runs}"
        self._lines.told(
            self._parts.share, f"  {done}  {config.label}: step {step}/{steps}, loss {loss:.4g}; all runs"
        )

    def finished(self, result: RunResult) -> None:
        """See `monitor.Monitor`."""
        self._over(result.config, outcome(result))

    def unfinished(self, config: RunConfig, why: str) -> None:
        """See `monitor.Monitor`."""
        self._over(config, why)

    def _over(self, config: RunConfig, words: str) -> None:
        self._lines.skip(self._parts.finished(config))
        left = self._lines.left(self._parts.share, "; ") if self._working else ""
        self._print(f"  {self._parts.done}/{self._parts.runs}  {config.label}: {words}{left}")


class Bars(Monitor):
    """Shows a bar for the stage and one for every run in progress, each with the time left.

    Args:
        progress: The display, started by the caller.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage: TaskID | None = None
        self._runs: dict[str, TaskID] = {}
        self._parts, self._working = Parts(0), False

    def stage(self, title: str, runs: int) -> None:
        """See `monitor.Monitor`."""
        self._parts, self._working = Parts(runs), False
        self._stage = self._progress.add_task(f"[bold]{title}", total=runs, note="")

    def started(self, config: RunConfig, steps: int) -> None:
        """See `monitor.Monitor`."""
        if self._stage is not None and not self._working:  # results that were on disk took no time
            self._working = True
            self._progress.reset(self._stage, completed=self._parts.done)
        self._remove(config)  # of a run whose process died
        self._runs[config.key] = self._progress.add_task(f"  {config.label}", total=steps, note="")
        self._parts.started(config, steps)

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `monitor.Monitor`."""
        if config.key in self._runs:
            self._progress.update(self._runs[config.key], completed=step, note=f"loss {loss:.4g}")
            self._parts.advanced(config, step)
            self._show_stage()

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `monitor.Monitor`."""
        self._progress.console.print(f"{config.label}: {sentence}", highlight=False, markup=False)

    def finished(self, result: RunResult) -> None:
        """See `monitor.Monitor`."""
        self._over(result.config)

    def unfinished(self, config: RunConfig, why: str) -> None:
        """See `monitor.Monitor`."""
        self._over(config)
        self.noted(config, why)

    def _over(self, config: RunConfig) -> None:
        self._remove(config)
        self._parts.finished(config)
        self._show_stage()

    def _remove(self, config: RunConfig) -> None:
        bar = self._runs.pop(config.key, None)
        if bar is not None:
            self._progress.remove_task(bar)

    def _show_stage(self) -> None:
        if self._stage is not None:
            self._progress.update(self._stage, completed=self._parts.in_runs)


def monitor(console: Console, *, quiet: bool = False) -> tuple[AbstractContextManager[object], Monitor]:
    """Return the monitor that fits a console, and the context to use it in; a quiet one shows no progress."""
    if quiet:
        return nullcontext(), Notes(console)
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
