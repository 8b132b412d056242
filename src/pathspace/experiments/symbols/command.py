"""`pathspace reproduce symbols`: every cell once, in parallel, continued where it was stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pathspace.children import deaf_children, end_with_parent, hear_quietly
from pathspace.experiments import folders
from pathspace.experiments.configuration import versions
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.published import load_published
from pathspace.experiments.storage import make_folder, write_json
from pathspace.experiments.symbols.cells import Cell, Score, cells, compute
from pathspace.experiments.symbols.protocol import Protocol, protocol_from
from pathspace.experiments.symbols.report import PAGE, as_json, print_table, write_report
from pathspace.experiments.terminal import output_console

if TYPE_CHECKING:
    from pathspace.experiments.commands import Surroundings
    from pathspace.experiments.recipes import Recipe

CELLS = "cells"


def reproduce(
    recipe: Recipe, size: str, options: tuple[str, Mapping[str, Any]], around: Surroundings
) -> list[Score]:
    """Fill the table and report.

    Args:
        recipe: Its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        around: Where to write, how many processes, and whether to continue.

    Raises:
        ConfigurationError: A setting is impossible, packages are missing, or the folder holds something else.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    missing = [name for name in ("numba", "constriction", "hmmlearn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"The package {missing[0]!r} is missing: pip install 'pathspace[experiments,sequences]'."
        )
    size = size or next(iter(recipe.sizes), "")
    protocol = protocol_from(*recipe.layers(size), options)
    configuration = {
        "command": "reproduce",
        "recipe": recipe.name,
        "size": size,
        "protocol": protocol.as_dict(),
        "versions": versions(),
    }
    output = folders.place(
        around.output,
        around.default,
        fresh=around.fresh,
        resume=around.resume,
        goes_on=lambda folder: not (folder / PAGE).exists() and _is_same(folder, configuration),
    )
    _check(output, configuration, around)
    make_folder(output)
    with folders.alone_in(output):
        _check(output, configuration, around)
        finished = (output / PAGE).exists()
        (output / PAGE).unlink(missing_ok=True)
        if around.fresh or (finished and not around.resume):
            for file in (output / CELLS).glob("*.json"):
                file.unlink()
        write_json(output / folders.FILE, configuration)
        around.chosen(output)
        scores = _all_scores(protocol, output / CELLS, around.processes)
        published = load_published(recipe.name)
        table = write_report(
            protocol, scores, output, title=recipe.title, configuration=configuration, published=published
        )
    if around.as_json:
        print(json.dumps(as_json(protocol, scores, configuration, published), indent=2, allow_nan=False))
    else:
        console = output_console()
        print_table(table, console)
        console.print(f"Report: {output / PAGE}", highlight=False, soft_wrap=True)
    return scores


def _is_same(output: Path, configuration: dict[str, Any]) -> bool:
    content = json.loads((output / folders.FILE).read_text(encoding="utf-8"))
    return content == json.loads(json.dumps(configuration))


def _check(output: Path, configuration: dict[str, Any], around: Surroundings) -> None:
    """Refuse a folder that holds scores with other settings."""
    if around.fresh:
        return
    if not folders.is_own(output):
        if around.resume:
            raise folders.nothing_to_resume(output)
    elif not _is_same(output, configuration):
        raise ConfigurationError(
            f"The folder {str(output)!r} holds scores with other settings or of other versions: give another "
            "--output, or start over with --fresh."
        )


def _all_scores(protocol: Protocol, folder: Path, processes: int) -> list[Score]:
    make_folder(folder)
    wanted = cells(protocol)
    done: dict[str, Score] = {}
    for cell in wanted:
        file = folder / f"{cell.key}.json"
        if file.exists():
            done[cell.key] = _stored(file)
    open_cells = [cell for cell in wanted if cell.key not in done]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    display = Progress(*columns, console=console, transient=True) if console.is_terminal else None
    with display or nullcontext():
        bar = display.add_task("scoring", total=len(wanted), completed=len(done)) if display else None
        for score in _computed(open_cells, protocol, processes):
            done[score.cell.key] = score
            write_json(folder / f"{score.cell.key}.json", score.as_dict())
            if display is not None and bar is not None:
                display.update(bar, advance=1, description=f"scored {score.cell.row} on {score.cell.text}")
            else:
                size = f", size {score.cell.size}" if score.cell.size else ""
                console.print(
                    f"[{len(done)}/{len(wanted)}] {score.cell.row} on {score.cell.text}{size}: {score.test:.1f} bits, "
                    f"{score.seconds:.1f} s",
                    highlight=False, markup=False,
                )  # fmt: skip
    return [done[cell.key] for cell in wanted]


def _stored(file: Path) -> Score:
    try:
        return Score.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The score {str(file)!r} cannot be read ({error!r}): delete it and start the command again."
        ) from error


def _computed(open_cells: Sequence[Cell], protocol: Protocol, processes: int) -> Iterator[Score]:
    if processes == 1 or len(open_cells) < 2:
        for cell in open_cells:
            yield compute(cell, protocol)
        return
    # fork would copy the threads' locks of the linear algebra libraries
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(open_cells)), mp_context=context, initializer=_start) as pool:
        with deaf_children():
            jobs = [pool.submit(compute, cell, protocol) for cell in open_cells]
        try:
            for job in as_completed(jobs):
                yield job.result()
        except BrokenProcessPool as error:
            raise ConfigurationError(
                "A worker process died, perhaps for want of memory: give the command again, with --workers 1."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start() -> None:
    end_with_parent()
    hear_quietly()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"
