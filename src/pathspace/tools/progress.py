"""Progress of long work, by rich: a bar on a terminal; in a pipe or a log a line about every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich_progress
from rich.console import Console

SECONDS = 10.0
"""Between two lines in a pipe; the first one comes after a second."""
FIRST = 1.0
MEMORY = 1e9
"""Seconds over which rich measures the speed: all of them, as two jobs may end hours apart."""


class Progress:
    """Progress of some work, and the time that is left; use it in a `with` statement.

    A pipe gets its lines though the work says nothing, as while it loads or compiles.

    Args:
        console: Where to show it.
        quiet: Show nothing but what is said.
        bound: `"about"`, or `"at most"` for work that may end before all of it is done.
        clock: Seconds.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> now, stream = [0.0], io.StringIO()
        >>> with Progress(Console(file=stream, width=80), clock=lambda: now[0]) as progress:
        ...     progress.stage("Training", 4)
        ...     for now[0], done in ((10.0, 1), (15.0, 2), (20.0, 3)):
        ...         progress.update(done, "a run")
        >>> print(stream.getvalue(), end="")
        Training: a run, 25 %, 0:10 so far
        Training: a run, 75 %, 0:20 so far, about 0:05 left
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        bound: str = "about",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._bound = bound
        self._clock = clock
        self._has_bar = console.is_terminal and not quiet
        self._has_lines = not console.is_terminal and not quiet
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("{task.fields[left]}", markup=False),
            rich_progress.TextColumn("{task.fields[note]}", markup=False),
            console=console,
            get_time=clock,
            speed_estimate_period=MEMORY,
        )
        self._task: rich_progress.Task | None = None
        self._due = clock() + FIRST
        self._printing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._lines, daemon=True)

    def __enter__(self) -> Progress:
        if self._has_bar:
            self._bars.start()
        if self._has_lines:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_bar:
            self._bars.stop()
        if self._has_lines:
            self._over.set()
            self._thread.join()

    def stage(self, title: str, total: float, done: float = 0, note: str = "") -> None:
        """Begin some work, of which a part is done already and took no time."""
        self._end_step()
        number = self._bars.add_task(title, total=total, note=note, left=f"{self._bound} ? left")
        self._bars.reset(number, total=total, completed=int(done))
        self._task = self._bars.tasks[-1]
        self._due = self._clock() + FIRST

    def step(self, title: str) -> None:
        """Begin some work that cannot say how much of it is done; it ends when other work begins."""
        self._end_step()
        self._bars.add_task(title, total=None, note="", left="")
        self._task = self._bars.tasks[-1]
        if len(self._bars.tasks) == 1:
            self._due = self._clock() + FIRST

    def _end_step(self) -> None:
        if self._task is not None and self._task.total is None:
            self._bars.update(self._task.id, total=1.0, completed=1.0)

    def update(self, completed: float, note: str = "", *, last: bool = False) -> None:
        """Say how much is done, and a few words about it.

        Speed is measured from the first call on, so that loading and compiling do not count. The
        `last` call of some work prints a line in any case.
        """
        task = self._task
        if task is None:
            return
        self._bars.update(task.id, completed=completed, note=note)
        left = task.time_remaining
        time_left = "?" if left is None else clock_time(left)
        self._bars.update(task.id, left=f"{self._bound} {time_left} left")
        self.line(last=last)

    def line(self, *, last: bool = False) -> None:
        """Print a progress line if the output is a pipe and a line is due, or if this is the `last` one."""
        task = self._task
        if task is None or not self._has_lines:
            return
        with self._printing:
            now = self._clock()
            if now < self._due and not last:
                return
            self._due = now + SECONDS
        left = task.fields["left"]
        share = "" if task.total is None else f"{task.percentage:.0f} %"
        spent = f"{clock_time(task.elapsed or 0.0)} so far"
        words = [task.fields["note"], share, spent, "" if "?" in left else left]
        self.say(f"{task.description}: {', '.join(filter(None, words))}")

    def _lines(self) -> None:
        while not self._over.wait(FIRST):
            self.line()

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def shown(
    name: str, console: Console, *, quiet: bool = False, bound: str = "about"
) -> Iterator[Callable[[float, str], None]]:
    """Show how far some work is while the block runs.

    Args:
        name: What is done.
        console: Where to show it.
        quiet: Show nothing.
        bound: See `Progress`.

    Yields:
        What to call with the part that is done, in [0, 1], and a few words about it.
    """
    with Progress(console, quiet=quiet, bound=bound) as progress:
        progress.stage(name, 1.0)
        yield progress.update


@contextmanager
def steps_shown(console: Console, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show which step of some work is being done while the block runs; steps last as long as they need.

    Args:
        console: Where to show it.
        quiet: Show nothing.

    Yields:
        What to call with the name of each step as it begins.
    """
    with Progress(console, quiet=quiet) as progress:
        yield progress.step


def clock_time(seconds: float) -> str:
    """Print seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
