"""The display of a command: progress of its jobs, and results on consoles.

A monitor shows progress, or passes it on from another process. The consoles for standard output
also write where it has no sign but ASCII's, or Latin-1's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pathspace.experiments.run import RunConfig, Validation
from pathspace.tools.progress import Progress

PLAIN = str.maketrans({"±": "+/-", "\N{EN DASH}": "-", "✓": "ok", "✗": "broken"})

ProgressCallback = Callable[[float, str], None]
"""Called with the part of some work that is done, in [0, 1], and a few words about it."""
SECONDS_BETWEEN_NOTES = 1.0


def unheard(part: float, words: str) -> None:
    """Tell nobody; see `ProgressCallback`."""


class Monitor:
    """Somebody who watches jobs; this one hears all and shows nothing but what a user has to know."""

    def stage(self, title: str, jobs: int, done: int = 0) -> None:
        """Hear that a stage of so many jobs begins, of which some have their results already."""

    def advanced(self, label: str, part: float, words: str) -> None:
        """Hear what part of a job is done, in [0, 1], and a few words about it."""

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """Hear what a run of this process found on the validation split."""

    def noted(self, label: str, sentence: str) -> None:
        """Print what happened to a job that its user should know."""
        print(f"  {label}: {sentence}", file=sys.stderr)

    def finished(self, label: str, words: str) -> None:
        """Hear that a job is over, with a result or without one."""


UNHEARD = Monitor()


class Part(Monitor):
    """Tells another monitor about one of several equal parts of a job.

    Args:
        monitor: Told about the whole.
        label: Of the whole.
        number: Of this part, from 0.
        count: How many parts there are.
    """

    def __init__(self, monitor: Monitor, label: str, number: int, count: int) -> None:
        self._monitor = monitor
        self._label = label
        self._number = number
        self._count = count
        self.noted = monitor.noted

    def advanced(self, label: str, part: float, words: str) -> None:
        """See `Monitor`; the label is the whole's."""
        del label
        self._monitor.advanced(self._label, (self._number + part) / self._count, words)

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """See `Monitor`."""
        self._monitor.validated(config, validation)


class Shown(Monitor):
    """Shows how far a command is: how many of its jobs are done, and what part of those in progress.

    Use it in a `with` statement.

    Args:
        console: Where to show it.
        quiet: Show nothing but what a user has to know.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._progress = Progress(console, quiet=quiet)
        self._jobs = 0
        self._done = 0
        self._parts: dict[str, float] = {}

    def __enter__(self) -> Shown:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def stage(self, title: str, jobs: int, done: int = 0) -> None:
        """See `Monitor`."""
        self._jobs = jobs
        self._done = done
        self._parts.clear()
        self._progress.stage(title, jobs, done, f"{done}/{jobs}")

    def advanced(self, label: str, part: float, words: str) -> None:
        """See `Monitor`."""
        self._parts[label] = min(part, 1.0)
        self._show(f"{label}: {words}")

    def noted(self, label: str, sentence: str) -> None:
        """See `Monitor`."""
        self._progress.say(f"  {label}: {sentence}")

    def finished(self, label: str, words: str) -> None:
        """See `Monitor`."""
        self._done += 1
        self._parts.pop(label, None)
        self._show(f"{label}: {words}")

    def _show(self, words: str) -> None:
        completed = self._done + sum(self._parts.values())
        last = self._done == self._jobs
        self._progress.update(completed, f"{self._done}/{self._jobs}  {words}", last=last)


class Written(Monitor):
    """Leaves in a file how far a job of this process is, for the process that shows it to read.

    Args:
        file: In a folder that may be missing, as on another machine of a cluster: then nobody is told.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._next = -float("inf")

    def advanced(self, label: str, part: float, words: str) -> None:
        """See `Monitor`."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SECONDS_BETWEEN_NOTES
        with suppress(OSError):
            self._file.write_text(json.dumps([label, part, words]), encoding="utf-8")


def pass_on(folder: Path, monitor: Monitor) -> None:
    """Tell a monitor what `Written` ones have left in the files of a folder."""
    for file in folder.iterdir():
        # one may be half written just now
        with suppress(OSError, ValueError):
            monitor.advanced(*json.loads(file.read_text(encoding="utf-8")))


class PlainConsole(Console):
    """A console that says in ASCII what its stream cannot encode, before columns get their widths."""

    def render_str(self, text: str, **options: Any) -> Text:
        """See ``rich.console.Console``."""
        return super().render_str(encodable(text, self.encoding), **options)


def output_console(width: int = 120) -> PlainConsole:
    """Return a console on standard output; a pipe has no width of its own, and eighty columns would break sentences."""
    return PlainConsole(width=None if sys.stdout and sys.stdout.isatty() else width)


def print_line(console: Console, line: str) -> None:
    """Print a line as it is, for a terminal to wrap."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(values: Any) -> None:
    """Print plain values as JSON on standard output."""
    print(json.dumps(values, indent=2, allow_nan=False))


def encodable(text: str, encoding: str) -> str:
    """Return `text`, or where `encoding` has no place for all of it, what says the same."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text
