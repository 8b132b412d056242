"""Progress of long work: a bar in a terminal; for logs and pipes a line now and then, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

FIRST, MOST = 5.0, 60.0
SHARE = 0.1
"""Seconds before the first line and at most between two; in between, a tenth of the time since the beginning."""

LEAST = 1e-4
"""Part of the work below which nothing is said of the rest: it was preparation that took the time."""


class Lines:
    """Says how far some work is, the seldomer the longer it takes.

    Args:
        say: Prints a line.
        bound: `"about"`, or `"at most"` for work that may end before all of it is done.
        clock: Seconds.

    Example:
        >>> now = [0.0]
        >>> lines = Lines(print, clock=lambda: now[0])
        >>> lines.told(0.01, "3/300 steps")  # nothing yet
        >>> now[0] = 60.0
        >>> lines.told(0.25, "75/300 steps")
        75/300 steps, 25 %, 1:00 so far, about 3:00 left
    """

    def __init__(
        self, say: Callable[[str], object], bound: str = "about", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._bound, self._clock = say, bound, clock
        self.begin()

    def begin(self, part: float = 0.0) -> None:
        """Begin to measure the time, with a part of the work that is done already and took none of it."""
        self._begun = self._said = self._clock()
        self.prepared(part)

    def prepared(self, part: float) -> None:
        """Judge the time that is left by what comes after this part; the time so far counts on."""
        self._part, self._since = part, self._clock()

    def skip(self, part: float) -> None:
        """Take another part of the work for done without time."""
        self._part += part

    def told(self, part: float, note: str) -> None:
        """Print a line if one is due; `part` in [0, 1] is what is done of the work."""
        now = self._clock()
        if now - self._said < min(MOST, max(FIRST, SHARE * (now - self._begun))):
            return
        self._said = now
        self._say(
            f"{note}, {100 * part:.0f} %, {clock_time(now - self._begun)} so far{self.left(part, ', ')}"
        )

    def left(self, part: float, opening: str = "") -> str:
        """Return the time left in words after `opening`; nothing where it is unknown, at the beginning."""
        done = part - self._part
        if done < LEAST:
            return ""
        left = (self._clock() - self._since) * max(0.0, 1 - part) / done
        return f"{opening}{self._bound} {clock_time(left)} left"


@contextmanager
def shown(
    name: str, console: Console, *, quiet: bool = False, bound: str = "about"
) -> Iterator[Callable[[float, str], None]]:
    """Show how far some work is while the block runs.

    Args:
        name: What is done.
        console: Where to show it: a bar in a terminal, lines elsewhere.
        quiet: Show nothing.
        bound: See `Lines`.

    Yields:
        What to call with the part that is done, in [0, 1], and a few words about it.
    """
    if quiet:
        yield lambda _part, _state: None
    elif not console.is_terminal:
        lines = Lines(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True), bound)
        ready = False

        def tell(part: float, state: str) -> None:
            nonlocal ready
            if not ready:  # loops were compiled before, perhaps for longer than the work takes
                lines.prepared(part)
                ready = True
            lines.told(part, f"{name}: {state}")

        yield tell
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(name, total=1.0, state="")
            yield lambda part, state: bar.update(task, completed=part, state=state)


def clock_time(seconds: float) -> str:
    """Print seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
