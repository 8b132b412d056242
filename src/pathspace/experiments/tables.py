"""Tables that are no comparison of optimizers: cells that do not depend on one another, each kept in a file of its own.

The module of such an engine has `Protocol`, how its table is made, and `NEEDS`, packages; a
function `fill(protocol, do, folder)`, which returns what `do(kind, cells, compute)` computes, in
one call or several; and `sections_of(protocol, results, published)`, which returns the sections of
the report and its numbers for `results.json`. `do` takes the arguments of `StoredCell`, computes
all cells that have no file yet, the first ones first, and returns the results in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pathspace.experiments.configuration import Request, begun
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Layer, laid_over, plain_values
from pathspace.experiments.monitor import Monitor, Shown
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import ENGINES, Recipe
from pathspace.experiments.report.document import Report, TableRow, print_report, write_report
from pathspace.experiments.runner import Job, versions
from pathspace.experiments.storage import make_folder
from pathspace.extras import install

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pathspace.experiments.context import Context

FOLDER = "cells"


@dataclass(frozen=True)
class TableRequest(Request):
    """The request of a command that fills a table.

    Attributes:
        recipe: The name of the recipe.
        size: The size of the recipe, or empty.
        protocol: How the table is made.
    """

    recipe: str
    size: str
    protocol: DataclassInstance
    kind = "protocol"
    command = "reproduce"
    results = (f"{FOLDER}/*.json", "networks/*")

    def as_dict(self) -> dict[str, Any]:
        """See `Request`."""
        return {
            "command": self.command,
            "recipe": self.recipe,
            "size": self.size,
            "protocol": plain_values(self.protocol),
            "versions": versions(),
        }

    def stored(self, content: Mapping[str, Any]) -> TableRequest:
        """See `Request`."""
        protocol = laid_over(type(self.protocol), [("'protocol'", content["protocol"])])
        return TableRequest(str(content["recipe"]), str(content["size"]), protocol)

    def check(self, context: Context) -> None:
        """See `Request`; tables compute on the processor alone."""
        context.runner(device="cpu")

    def has_more_seeds(self, stored: Request) -> bool:
        """See `Request`: no cell depends on how many seeds there are."""
        fewer, more = stored.as_dict(), self.as_dict()
        seeds = [content["protocol"].pop("seeds") for content in (fewer, more)]
        if isinstance(seeds[1], list):
            return fewer == more and set(seeds[0]) < set(seeds[1])
        return fewer == more and seeds[0] < seeds[1]


def reproduce_table(recipe: Recipe, size: str, options: Layer, context: Context) -> None:
    """Fill the table of a recipe, and report.

    Args:
        recipe: Its engine, its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        context: Where to write, how many cells at a time, and whether to continue.

    Raises:
        ConfigurationError: A setting is impossible, a package is missing, the folder holds
            something else, a file cannot be read, or a process died.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    engine = import_module(ENGINES[recipe.engine])
    for name in engine.NEEDS:
        if find_spec(name) is None:
            raise ConfigurationError(
                f"The package {name!r} is missing: {install('experiments', 'sequences')}."
            )
    protocol = laid_over(engine.Protocol, [*recipe.layers(size), options])
    asked = TableRequest(recipe.name, size or next(iter(recipe.sizes), ""), protocol)
    with begun(asked, context, given=bool(size or options[1])) as (settled, output):
        folder = make_folder(output / FOLDER)
        runner = context.runner(device="cpu")

        def do(kind: type, cells: Sequence[Any], compute: Callable[..., Any]) -> list[Any]:
            jobs = [StoredCell(kind, cell, compute, folder) for cell in cells]
            with Shown(Console(stderr=True), quiet=context.quiet) as monitor, runner:
                return runner.all_results(jobs, monitor, "Computing")

        results = engine.fill(settled.protocol, do, output)
        sections, numbers = engine.sections_of(
            settled.protocol, results, load_published(recipe.name)
        )
        configuration = settled.as_dict()
        numbers = {**numbers, "configuration": configuration}
        found = Report(recipe.title, sections, configuration, numbers)
        write_report(found, output)
    print_report(found, output, as_json=context.as_json)


@dataclass(frozen=True)
class StoredCell(Job):
    """A cell as a job; see `runner.Job`.

    Attributes:
        kind: The dataclass of its result, which has a property `words`.
        cell: What is to be computed; its `key` names its file.
        compute: Computes it, telling its `report` how far it is; other processes must be
            able to import it.
        folder: Where the files of cells lie.
    """

    kind: type
    cell: Any
    compute: Callable[..., Any]
    folder: Path

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
        """See `runner.Job`."""
        return self.folder / f"{self.key}.json"

    def __call__(self, monitor: Monitor) -> Any:
        """Compute the cell."""
        return self.compute(self.cell, report=partial(monitor.advanced, self.label))


def grouped_rows(rows: Iterable[Iterable[str]], *, once: bool = False) -> tuple[TableRow, ...]:
    """Return rows of a table whose first cell names a group.

    Args:
        rows: The cells of each.
        once: Whether the name stands in the first row of a group alone, in files too; a terminal
            shows it there alone in any case.
    """
    found = []
    before = None
    for group, *cells in rows:
        begins = group != before
        before = group
        shown = group if begins or not once else ""
        found.append(TableRow((shown, *cells), begins_method=begins))
    return tuple(found)
