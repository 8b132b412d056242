"""Cells of a table: computations that do not depend on one another, in parallel, each kept in a file of its own.

What an engine shares that fills such a table: the folder, where a stopped command left off, and the processes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pathspace.children import deaf_children, end_with_parent, ended_after_errors, hear_quietly
from pathspace.experiments import folders
from pathspace.experiments.configuration import versions
from pathspace.experiments.engines import runs_at_a_time
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.executor import TRIES
from pathspace.experiments.layers import Laid, Layer, plain_values
from pathspace.experiments.storage import make_folder, read_checked, remove_file, write_checked, write_json
from pathspace.experiments.terminal import print_line
from pathspace.progress import Lines

if TYPE_CHECKING:
    from pathspace.experiments.execution import Surroundings
    from pathspace.experiments.recipes import Recipe

FOLDER = "cells"


class Cell(Protocol):
    """What is to be computed."""

    @property
    def key(self) -> str:
        """The name of its file, without the ending."""
        ...


class Result(Protocol):
    """What came out."""

    @property
    def cell(self) -> Cell:
        """What was computed."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        ...


ResultT = TypeVar("ResultT", bound=Result)


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


def all_results(
    wanted: Sequence[Any],
    compute: Callable[[Any], ResultT],
    output: Path,
    around: Surroundings,
    *,
    read: Callable[[Mapping[str, Any]], ResultT],
    told: Callable[[ResultT], str],
) -> list[ResultT]:
    """Compute all cells that have no file yet.

    Args:
        wanted: The cells, those that take longest first.
        compute: Computes one; other processes must be able to import it.
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
    done: dict[str, ResultT] = {}
    for cell in wanted:
        file = folder / f"{cell.key}.json"
        if file.exists():
            done[cell.key] = read_checked(file, read)
    open_cells = [cell for cell in wanted if cell.key not in done]
    console = Console(stderr=True, quiet=around.quiet)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    display = Progress(*columns, console=console, transient=True) if console.is_terminal else None
    lines = Lines(console.print)
    lines.begin(len(done) / len(wanted))
    with display or nullcontext():
        bar = display.add_task("computing", total=len(wanted), completed=len(done)) if display else None
        for result in _computed(open_cells, compute, around):
            done[result.cell.key] = result
            write_checked(folder / f"{result.cell.key}.json", result.as_dict())
            line = f"{told(result)}{lines.left(len(done) / len(wanted), '; ')}"
            if display is not None and bar is not None:
                display.update(bar, advance=1, description=line)
            else:
                line = f"[{len(done)}/{len(wanted)}] {line}"
                print_line(console, line)
    return [done[cell.key] for cell in wanted]


def _computed(
    open_cells: Sequence[Any], compute: Callable[[Any], ResultT], around: Surroundings
) -> Iterator[ResultT]:
    if around.engine == "ray" and open_cells:
        from pathspace.experiments.ray_tasks import computed

        yield from computed(compute, open_cells, address=around.address, processes=around.processes)
        return
    processes = around.processes or runs_at_a_time()
    if processes == 1 or len(open_cells) < 2:
        for cell in open_cells:
            yield compute(cell)
        return
    # fork would copy the threads' locks of the linear algebra libraries
    context = multiprocessing.get_context("spawn")
    left = list(open_cells)
    for tries in range(1, TRIES + 1):
        pool = ProcessPoolExecutor(min(processes, len(left)), mp_context=context, initializer=_start)
        with pool, ended_after_errors():
            with deaf_children():
                jobs = {pool.submit(compute, cell): cell for cell in left}
            for job in as_completed(jobs):
                # a process that dies takes the others along, but no result that is there
                if not isinstance(job.exception(), BrokenProcessPool):
                    left.remove(jobs[job])
                    yield job.result()
        if not left:
            return
        if tries < TRIES:
            print_line(Console(stderr=True), "A process died: what it and the others were at begins again.")
    raise ConfigurationError(
        "A worker process died, perhaps for want of memory: give the command again, with --workers 1."
    )


def _start() -> None:
    end_with_parent()
    hear_quietly()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"
