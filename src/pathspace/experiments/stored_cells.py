"""Cells of a table: computations that do not depend on one another, in parallel, each kept in a file of its own.

What an engine shares that fills such a table: the folder, where a stopped command left off, and the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from pathspace.experiments import folders
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Laid, Layer, plain_values
from pathspace.experiments.monitor import Monitor, Shown
from pathspace.experiments.runner import versions
from pathspace.experiments.storage import make_folder, read_checked, remove_file, write_checked, write_json

if TYPE_CHECKING:
    from pathspace.experiments.execution import Surroundings
    from pathspace.experiments.recipes import Recipe

FOLDER = "cells"
T = TypeVar("T")


@contextmanager
def begun_table(
    recipe: Recipe,
    size: str,
    options: Layer,
    around: Surroundings,
    protocol_from: Callable[..., Laid],
    *,
    others: Sequence[str] = (),
) -> Iterator[tuple[Laid, dict[str, Any], Path]]:
    """Give the folder of a table, with nobody else at work in it; its cells stay where it was finished, too.

    Cells with other settings are refused, but with `--resume` those of the same with fewer seeds are taken.

    Args:
        recipe: Its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        around: Where to write, and whether to continue or to start over.
        protocol_from: Makes settings in layers a protocol.
        others: Folders in it whose files go with the cells.

    Yields:
        How the table is made, what `config.json` says of that, and the folder.

    Raises:
        ConfigurationError: A setting is impossible, or the folder holds something else, or nothing to resume.
    """
    size, layers = _asked_or_begun(recipe, size, options, around)
    protocol = protocol_from(*layers)
    configuration = {
        "command": "reproduce",
        "recipe": recipe.name,
        "size": size,
        "protocol": plain_values(protocol),
        "versions": versions(),
    }

    def goes_on(folder: Path) -> bool:
        unfinished = not (folder / folders.PAGE).exists()
        return unfinished and folders.is_same(folders.read_content(folder), configuration)

    def check(folder: Path) -> None:
        _check(folder, configuration, around)

    with folders.taken(around, goes_on, check) as output:
        check(output)  # anew: another command may have been at work here
        if around.fresh:
            folders.clear_report(output)
            # before the new configuration is there, with which a command that is stopped now would go on from these
            for name, ours in ((FOLDER, "*.json"), *((name, "*") for name in others)):
                for file in (output / name).glob(ours):
                    remove_file(file)
        elif around.resume:
            remove_file(output / folders.PAGE)  # until the seeds are there that may have been added
        elif (output / folders.PAGE).exists() and not around.quiet:
            folders.say_finished(output)
        write_json(output / folders.FILE, configuration)
        around.chosen(output)
        yield protocol, configuration, output


def _asked_or_begun(
    recipe: Recipe, size: str, options: Layer, around: Surroundings
) -> tuple[str, Sequence[Layer]]:
    """Return the size and the layers of settings of a table: as asked for, or, only resumed, those of the folder."""
    if around.resume and not (size or options[1]):
        folder = folders.place(around, lambda folder: not (folder / folders.PAGE).exists())
        if folders.is_own(folder):
            content = folders.read_content(folder)
            if content.get("recipe") == recipe.name and isinstance(content.get("protocol"), dict):
                return str(content.get("size", "")), [(str(folder / folders.FILE), content["protocol"])]
    size = size or next(iter(recipe.sizes), "")
    return size, [*recipe.layers(size), options]


def _has_fewer_seeds(content: dict[str, Any], configuration: dict[str, Any]) -> bool:
    """Say whether a folder's results are some of those wanted, as no cell depends on how many seeds there are."""
    protocol = configuration["protocol"]
    fewer, more = (content.get("protocol") or {}).get("seeds"), protocol["seeds"]
    if not isinstance(fewer, type(more)):
        return False
    wanted = {**configuration, "protocol": {**protocol, "seeds": fewer}}
    return folders.is_same(content, wanted) and (
        set(fewer) < set(more) if isinstance(fewer, list) else fewer < more
    )


def _check(output: Path, configuration: dict[str, Any], around: Surroundings) -> None:
    """Refuse a folder that holds results with other settings."""
    if around.fresh:
        return
    if not folders.is_own(output):
        if around.resume:
            raise folders.nothing_to_resume(output)
    elif not folders.is_same(content := folders.read_content(output), configuration):
        fewer = _has_fewer_seeds(content, configuration)
        if not (fewer and around.resume):
            more = ", add to its seeds with --resume" if fewer else ""
            raise ConfigurationError(
                f"The folder {str(output)!r} holds results with other settings or of other versions: give another "
                f"--output{more}, or start over with --fresh."
            )


@dataclass(frozen=True)
class StoredCell:
    """A cell as a job; see `runner.Job`.

    Attributes:
        cell: What is to be computed.
        compute: Computes it; other processes must be able to import it.
        folder: Where the files of cells lie.
        read: Undoes a result's `as_dict`.
        told: Says what came out, in a line.
    """

    cell: Any
    compute: Callable[[Any], Any]
    folder: Path
    read: Callable[[Mapping[str, Any]], Any]
    told: Callable[[Any], str]

    @property
    def key(self) -> str:
        """See `runner.Job`."""
        return self.cell.key

    @property
    def label(self) -> str:
        """See `runner.Job`."""
        return self.cell.key

    @property
    def file(self) -> Path:
        """Where the result lies."""
        return self.folder / f"{self.key}.json"

    def __call__(self, monitor: Monitor) -> Any:
        """Compute the cell."""
        del monitor
        return self.compute(self.cell)

    def stored(self) -> Any | None:
        """Return the result that is there already, or None."""
        return read_checked(self.file, self.read) if self.file.exists() else None

    def keep(self, result: Any) -> str:
        """Write the result, and say what came out."""
        write_checked(self.file, result.as_dict())
        return self.told(result)


def all_results(
    wanted: Sequence[Any],
    compute: Callable[[Any], T],
    output: Path,
    around: Surroundings,
    *,
    read: Callable[[Mapping[str, Any]], T],
    told: Callable[[T], str],
) -> list[T]:
    """Compute all cells that have no file yet.

    Args:
        wanted: The cells, those that take longest first; each has a `key`, which names its file.
        compute: Computes one; other processes must be able to import it. Results have a method `as_dict`.
        output: The folder of the table.
        around: Who computes, how many cells at a time, and whether progress is shown.
        read: Undoes a result's `as_dict`.
        told: Says what came out, in a line.

    Returns:
        The results, in the order of the cells.

    Raises:
        ConfigurationError: A file cannot be read, or a process died.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    folder = make_folder(output / FOLDER)
    jobs = [StoredCell(cell, compute, folder, read, told) for cell in wanted]
    runner = replace(around, device="cpu").runner()  # tables compute on the processor alone
    with Shown(Console(stderr=True), quiet=around.quiet) as monitor, runner:
        return runner.all_results(jobs, monitor, "Computing")
