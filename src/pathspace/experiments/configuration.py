"""The request of a command, stored as `config.json`, and whether it begins or continues in its folder."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pydantic

from pathspace.experiments.compare import check_task_of, is_tuned
from pathspace.experiments.context import (
    CONFIGURATION,
    PAGE,
    REPORT_FILES,
    Context,
    is_own,
    is_same_content,
    read_content,
    taken,
)
from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.layers import CONFIG, plain_values
from pathspace.experiments.run import CHECKPOINT, RESULT
from pathspace.experiments.runner import RUNS, versions
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings, settings_from
from pathspace.experiments.storage import remove_file, write_json

JOURNAL = "sweep.journal"
RESULTS = (f"{RUNS}/*/{RESULT}", f"{RUNS}/*/{CHECKPOINT}", JOURNAL)
"""Patterns of the files with the results of runs, in an output folder."""
KINDS = ("settings", "parts", "protocol")
DAMAGED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors of making something of a `config.json` that somebody has changed."""


class Request:
    """The request of a command, stored as `config.json`.

    Subclasses say how it becomes plain values, `as_dict`, and how those become a request again, `stored`.

    Attributes:
        kind: The key of `config.json` that holds it, one of `KINDS`.
        command: The name of the command.
        recipe: The name of the recipe, or empty.
        results: Patterns of the files in its folder that hold results.
    """

    kind: str
    command: str
    recipe: str
    results: Sequence[str] = RESULTS

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`: plain values with what decides results, and versions."""
        raise NotImplementedError

    def stored(self, content: Mapping[str, Any]) -> Request:
        """Return the request of another command of this kind, whose `config.json` may be damaged."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        """Raise a `ConfigurationError` for what this machine or the task cannot do."""

    def is_own(self, stored: Request) -> bool:
        """Say whether a command that names no settings goes on with these."""
        return (stored.command, stored.recipe) == (self.command, self.recipe)

    def has_more_seeds(self, stored: Request) -> bool:  # noqa: ARG002
        """Say whether results of another command are some of those that this one wants."""
        return False

    def is_same(self, other: Request) -> bool:
        """Say whether another command was asked for the same."""
        return is_same_content(self.as_dict(), other.as_dict())


@pydantic.dataclasses.dataclass(frozen=True, config=CONFIG)
class Configuration(Request):
    """The request of a command that trains by one set of settings, with the headline of its report.

    Attributes:
        seed: The one seed of `train`; None elsewhere.
        sweep: What a sweep searches, as plain values; empty elsewhere.
    """

    command: str
    title: str
    settings: Settings
    recipe: str = ""
    size: str = ""
    seed: int | None = None
    sweep: Mapping[str, Any] = field(default_factory=dict)
    kind = "settings"

    def as_dict(self) -> dict[str, Any]:
        """See `Request`; seeds are spelled out."""
        settings = self.settings
        seeds = list(range(settings.seeds)) if self.seed is None else [self.seed]
        tuning_seeds = [FIRST_TUNING_SEED + i for i in range(settings.tuning_seeds)]
        if self.sweep:  # none of its runs is one to report
            seeds, tuning_seeds = [], [FIRST_TUNING_SEED + i for i in range(settings.seeds)]
        elif self.seed is not None or not is_tuned(settings):
            tuning_seeds = []
        return {
            "command": self.command,
            "title": self.title,
            "recipe": self.recipe,
            "size": self.size,
            "seed": self.seed,
            "settings": plain_values(settings),
            "seeds": seeds,
            "tuning_seeds": tuning_seeds,
            **({"sweep": dict(self.sweep)} if self.sweep else {}),
            "versions": versions(),
        }

    def stored(self, content: Mapping[str, Any]) -> Configuration:
        """See `Request`."""
        kept = {name: content[name] for name in ("command", "title", "recipe", "size", "seed")}
        settings = settings_from(("'settings'", content["settings"]))
        return Configuration(**kept, settings=settings, sweep=content.get("sweep", {}))

    def check(self, context: Context) -> None:
        """See `Request`."""
        context.runner(self.settings.threads)
        check_task_of(self.settings, context.data_dir)

    def is_own(self, stored: Request) -> bool:
        """See `Request`; a sweep that is only resumed names no recipe."""
        return stored.command == self.command and (bool(self.sweep) or stored.recipe == self.recipe)


@dataclass(frozen=True)
class Parts(Request):
    """A recipe of several parts, each asked for in a folder of its own."""

    recipe: str
    title: str
    parts: Mapping[str, Configuration]
    kind = "parts"
    command = "reproduce"

    def as_dict(self) -> dict[str, Any]:
        """See `Request`."""
        return {
            "command": self.command,
            "title": self.title,
            "recipe": self.recipe,
            "parts": {name: part.as_dict() for name, part in self.parts.items()},
            "versions": versions(),
        }

    def stored(self, content: Mapping[str, Any]) -> Parts:
        """See `Request`."""
        first = next(iter(self.parts.values()))
        parts = {name: first.stored(part) for name, part in content["parts"].items()}
        return Parts(content["recipe"], content["title"], parts)

    def check(self, context: Context) -> None:
        """See `Request`: what one part refuses is refused before hours of another."""
        for part in self.parts.values():
            part.check(context)


Command = TypeVar("Command", bound=Request)


@contextmanager
def begun(asked: Command, context: Context, *, given: bool) -> Iterator[tuple[Command, Path]]:
    """Give the folder that a command is to write to, with nobody else at work there.

    Without settings that were `given`, `--resume` takes those of the folder.

    Yields:
        What is to be done, and the folder, with no results in it but those that are taken over.
    """

    def goes_on(folder: Path) -> bool:
        if not unfinished(folder):
            return False
        return (context.resume and not given) or is_same(folder, asked)

    def check(folder: Path) -> None:
        # before the results of an earlier command go
        _settle(asked, folder, context, given=given)[0].check(context)

    name = asked.recipe if asked.command == "reproduce" else asked.command
    with taken(context, name, goes_on, check) as output:
        # Anew: another command may have been at work here while the task was loaded.
        settled, goes_on_here = _settle(asked, output, context, given=given)
        finished = goes_on_here and not unfinished(output)
        if not goes_on_here:
            clear(output, asked)
        elif not is_same(output, settled):  # until the seeds are there that it adds
            remove_file(output / PAGE)
        write_json(output / CONFIGURATION, settled.as_dict())
        if goes_on_here and not (context.resume or context.quiet):
            _say_what_is_taken_over(output, finished=finished)
        try:
            yield settled, context.for_jobs(output)
        except (KeyboardInterrupt, StorageError) as error:
            error.add_note(context.going_on(output))
            raise


def _say_what_is_taken_over(output: Path, *, finished: bool) -> None:
    """Tell whoever did not ask for it that a command takes over the results of an earlier one."""
    if finished:
        said = f"{str(output)!r} was finished already: results that are there are taken"
    else:
        said = f"Continuing the unfinished runs in {output}"
    print(f"{said} (--fresh starts over).", file=sys.stderr)


def _settle(asked: Command, output: Path, context: Context, *, given: bool) -> tuple[Command, bool]:
    """Decide what to do and whether earlier results are taken over, those of a finished command too."""
    if context.fresh or not (context.resume or _holds_results(output)):
        return asked, False
    stored = read(output, asked)
    if context.resume and not given and asked.is_own(stored):
        return stored, True
    if stored.is_same(asked):
        return stored, True
    more = asked.has_more_seeds(stored)
    if more and context.resume:
        return asked, True
    raise _other_settings(output, stored, more=", add to its seeds with --resume" if more else "")


def read(output: Path, asked: Command) -> Command:
    """Read `config.json` as that of a command of the same kind."""
    content = _content(output)
    if any(kind in content for kind in KINDS if kind != asked.kind):
        command = " ".join(str(content[key]) for key in ("command", "recipe") if content.get(key))
        raise ConfigurationError(
            f"The folder {str(output)!r} holds results of `pathspace {command}`: give another --output, or start over "
            "with --fresh."
        )
    try:
        stored = asked.stored(content)
        begun_with = dict(content["versions"])
    except ConfigurationError as error:
        raise ConfigurationError(f"In {str(output / CONFIGURATION)!r}: {error}") from error
    except DAMAGED as error:
        raise _unreadable(output, error) from error
    for name, version in versions().items():
        if begun_with.get(name) != version:
            raise ConfigurationError(
                f"The runs in {str(output)!r} were begun with {name} {begun_with.get(name)}, but this is "
                f"{version}, which may give other results: start again with --fresh, or install "
                "the old version."
            )
    return cast("Command", stored)


def _content(output: Path) -> dict[str, Any]:
    try:
        return read_content(output)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"There is nothing to resume in {str(output)!r}: give the --output folder of the stopped command."
        ) from error
    except (OSError, ValueError) as error:
        raise _unreadable(output, error) from error


def _unreadable(output: Path, why: object) -> ConfigurationError:
    return ConfigurationError(
        f"{str(output / CONFIGURATION)!r} cannot be read ({why}): start over with --fresh."
    )


def _other_settings(output: Path, stored: Request, *, more: str) -> ConfigurationError:
    if not unfinished(output):
        return ConfigurationError(
            f"The folder {str(output)!r} holds finished runs with other settings: give another --output{more}, or "
            "start over with --fresh."
        )
    # the recipe of a sweep would ask for the recipe's own settings
    recipe = "" if stored.command == "sweep" else stored.recipe
    command = filter(None, (stored.command, recipe))
    words = ["pathspace", *command, "--resume", "--output", str(output)]
    return ConfigurationError(
        f"The folder {str(output)!r} holds unfinished runs with other settings: continue those by "
        f"`{shlex.join(words)}`, give another --output{more}, or start over with --fresh."
    )


def is_begun(output: Path) -> bool:
    """Say whether a command has done something in `output`."""
    if not is_own(output):
        return False
    content = _content(output)
    if isinstance(parts := content.get("parts"), dict):
        return any(is_own(output / part) for part in parts)
    return "protocol" in content or any(any(output.glob(pattern)) for pattern in RESULTS)


def unfinished(output: Path) -> bool:
    """Say whether a command has done something in `output` and has not written its report."""
    return is_begun(output) and not (output / PAGE).exists()


def _holds_results(output: Path) -> bool:
    """Say whether a folder of ours holds results, or a report alone, whose runs somebody has deleted."""
    return is_begun(output) or (is_own(output) and (output / PAGE).exists())


def is_same(output: Path, asked: Request) -> bool:
    """Say whether the results in `output` are those that were asked for, of this version."""
    try:
        return read(output, asked).is_same(asked)
    except ConfigurationError:
        return False


def clear(output: Path, asked: Request) -> None:
    """Remove the results and the report of an earlier command, and nothing else, from `output`."""
    if isinstance(asked, Parts):
        for name, part in asked.parts.items():
            if is_own(output / name):
                clear(output / name, part)
                write_json(output / name / CONFIGURATION, part.as_dict())
    _clear_report(output)
    for pattern in asked.results:
        for file in sorted(output.glob(pattern)):
            remove_file(file)
    for folder in sorted((output / RUNS).glob("*/")):
        if not any(folder.iterdir()):
            folder.rmdir()


def _clear_report(output: Path) -> None:
    """Remove the files of the last report, the page first: without it a report is unfinished."""
    remove_file(output / PAGE)
    try:
        names = [Path(name).name for name in json.loads((output / REPORT_FILES).read_text("utf-8"))]
    except (OSError, TypeError, ValueError):  # no report, or a list that somebody has changed
        return
    for name in (*names, REPORT_FILES):
        remove_file(output / name)
