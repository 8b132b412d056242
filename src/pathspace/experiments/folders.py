"""The output folder of a command, which no other command shares.

A folder of runs is known by its `config.json`. Commands without `--output` write to `runs/NAME`, or
to the first of `runs/NAME-2`, `runs/NAME-3` and so on that holds nothing yet; what is in the others
stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pathspace.experiments.context import Context
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.storage import make_folder, writable_folder
from pathspace.tools.files import clear_leftovers, locked

FILE = "config.json"
PAGE = "report.html"  # written last: without it the same command goes on
FILES = ".report.json"  # the names of the files of the last report
COMMANDS = ("compare", "train", "reproduce", "sweep")


class BusyError(ConfigurationError):
    """Another command is at work in a folder."""


@contextmanager
def taken(
    wanted: Context, name: str, goes_on: Callable[[Path], bool], check: Callable[[Path], object]
) -> Iterator[Path]:
    """Choose the folder that a command writes to, make it, and keep other commands out of it.

    Where none is given and another command was faster, it is the next one.

    Args:
        wanted: Where no output is given, it is to start over in a folder that holds nothing yet.
        name: Of the folder in `runs` where no output is given.
        goes_on: Says of a folder of runs whether the command would continue what was stopped there.
        check: Refuses a folder before it is made, by a `ConfigurationError`.

    Raises:
        ConfigurationError: See `check`; or it cannot be written to, or holds something that is not
            ours.
        BusyError: Another command is at work in the folder that was asked for.
    """
    if wanted.resume and wanted.fresh:
        raise ConfigurationError("--resume and --fresh contradict each other: give one of them.")
    named = wanted.output is not None or wanted.resume
    while True:
        folder = wanted.output or _choose(wanted, Path("runs") / name, goes_on)
        writable_folder(folder, "--output")
        if not wanted.fresh:
            _check_own(folder)
        check(folder)
        make_folder(folder)
        with ExitStack() as stack:
            try:
                stack.enter_context(alone_in(folder))
            except BusyError:
                if named:
                    raise
                continue
            # the faster one may be done already, and what it wrote stays
            if named or _is_free(folder, wanted, goes_on):
                yield folder
                return


def _is_free(folder: Path, wanted: Context, goes_on: Callable[[Path], bool]) -> bool:
    """Return whether a command may write to a folder that was not asked for by its name."""
    if _is_empty(folder):
        return True
    return not wanted.fresh and is_own(folder) and goes_on(folder)


def _choose(wanted: Context, default: Path, goes_on: Callable[[Path], bool]) -> Path:
    *used, free = _series(default)
    if wanted.fresh:
        return free
    own = [folder for folder in reversed(used) if is_own(folder)]
    found = [folder for folder in own if not is_busy(folder) and goes_on(folder)]
    if wanted.resume:
        found += [*own, default]
    return next(iter(found), free)


def _series(default: Path) -> Iterator[Path]:
    """Go through the numbered folders until one holds nothing."""
    number, folder = 1, default
    while folder.exists() and (not folder.is_dir() or not _is_empty(folder) or is_busy(folder)):
        yield folder
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    yield folder


def _is_empty(folder: Path) -> bool:
    return all(path.name.startswith(".") for path in folder.iterdir())


def read_content(folder: Path) -> dict[str, Any]:
    """Return what the `config.json` of a folder says.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: It is no JSON, or no object.
    """
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is no object")
    return content


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two contents of `config.json` are the same, in whatever order; 1 and 1.0 are one number."""
    kept = (json.loads(json.dumps(content)) for content in (one, other))  # a tuple is a list there
    return next(kept) == next(kept)


def is_own(folder: Path) -> bool:
    """Say whether a folder holds the configuration of a command of ours."""
    try:
        content = read_content(folder)
    except (OSError, ValueError):
        return False
    return content.get("command") in COMMANDS and "versions" in content


def _check_own(folder: Path) -> None:
    """Raise a `ConfigurationError` if a folder holds something, and not the configuration of a command of ours."""
    if not folder.is_dir() or _is_empty(folder) or is_own(folder):
        return
    held = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    broken = f"; its {FILE!r} is no configuration of runs" if FILE in held else ""
    more = " and more" if len(held) > 3 else ""
    raise ConfigurationError(
        f"The folder {str(folder)!r} holds {', '.join(map(repr, held[:3]))}{more}, which no command of pathspace is "
        f"known to have written{broken}: give another --output, or write there all the same with --fresh."
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder, and clear it of the half-written files of those that were killed.

    Raises:
        BusyError: Another command is at work there.
    """
    with locked(folder) as held:
        if not held:
            raise BusyError(
                f"Another command is at work in the folder {str(folder)!r}: wait until it is done, or give another "
                "--output."
            )
        for each in (folder, *folder.glob("cells/"), *folder.glob("runs/*/")):
            if each.is_dir():
                clear_leftovers(each)
        yield


def is_busy(folder: Path) -> bool:
    """Say whether another command is at work in a folder."""
    with locked(folder) as held:
        return not held
