"""Run `pathspace compare`, `train` and `reproduce`: the runs or cells, a recipe's study, and the report.

A table that is no comparison of optimizers has cells that do not depend on one another, each kept
in a file of its own. The module of such an engine has `Protocol`, how its table is made; a
function `fill(protocol, do, folder)`, which returns what `do(kind, cells, compute)` computes, in
one call or several; and `sections_of(protocol, results, published)`, which returns the sections of
the report and its numbers for `results.json`. `do` takes the arguments of `StoredCell`, computes
all cells that have no file yet, the first ones first, and returns the results in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.configuration import Configuration, Parts, Request, begun
from pathspace.experiments.context import Context, chosen_device, is_own
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import LARGEST, Layer, laid_over, plain_values
from pathspace.experiments.methods import check_start, method
from pathspace.experiments.recipes import ENGINES, NEEDED, Recipe, load_published, load_recipe
from pathspace.experiments.report import Report, Section, print_report, write_report
from pathspace.experiments.report.comparison import comparison_report, parts_report
from pathspace.experiments.runner import Job, versions
from pathspace.experiments.settings import OF_A_TABLE, refuse_unused, settings_from
from pathspace.experiments.storage import make_folder
from pathspace.experiments.studies import run_study
from pathspace.experiments.terminal import Monitor, output_console, print_json, print_line
from pathspace.extras import install

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CELLS = "cells"


COMPARE_TITLE = "The same network from two starts of the same function"


def execute(
    asked: Configuration,
    context: Context,
    *,
    given: bool,
    studied: Recipe | None = None,
    shown: bool = True,
) -> tuple[Comparison, Report]:
    """Do all runs, and the study of a recipe that has one, write the report, and print what is to be `shown`."""
    with begun(asked, context, given=given) as (configuration, output):
        comparison = _runs(configuration, output, context)
        report = comparison_report(
            comparison,
            title=configuration.title,
            configuration=configuration.as_dict(),
            published=load_published(configuration.recipe) if configuration.recipe else None,
            more=_study(studied, comparison, configuration.size, context)
            if studied and studied.study
            else (),
        )
        write_report(report, output)  # last: without it the same command goes on here
    if shown:
        print_report(report, output, as_json=context.as_json)
    return comparison, report


def _runs(configuration: Configuration, output: Path, context: Context) -> Comparison:
    settings = configuration.settings
    with context.shown() as monitor:
        runs = context.runs(output, monitor, settings.threads)
        return compare(settings, runs, configuration.seed)


def _study(recipe: Recipe, comparison: Comparison, size: str, context: Context) -> list[Section]:
    # which this machine may lack: the runs may have been a cluster's
    if context.run_device != "cpu":
        Console(stderr=True).print("The study computes on the processor.", highlight=False)
    name = recipe.study["name"]
    options = recipe.study_options(size)
    with context.shown() as monitor:
        monitor.stage(f"Studying the {name}", 1)
        return run_study(name, options, comparison, context.data_dir, monitor)


def run_compare(options: Layer, context: Context) -> Comparison:
    """Do what `pathspace compare` was asked for; see there."""
    asked = Configuration("compare", COMPARE_TITLE, settings_from(options))
    return execute(asked, context, given=bool(options[1]))[0]


def run_train(one: Mapping[str, Any], options: Layer, context: Context) -> Comparison:
    """Do what `pathspace train` was asked for; see there. In `one` are the options of the run, None if not given."""
    where, values = options
    name = one["method"] or "path-sgd"
    start = one["start"] or "default"
    rate = one["learning_rate"]
    chosen = method(name, "--method")
    check_start(start, "--start")
    if rate is None:
        rate = chosen.learning_rate
    if not 0 < rate <= LARGEST:
        raise ConfigurationError(
            f"The option --lr is {rate:g}: give a positive number, at most {LARGEST:g}."
        )
    single = {
        "methods": [name],
        "starts": [start],
        "learning_rates": [rate],
        "seeds": 1,
        "tuning_seeds": 1,
    }
    refuse_unused(
        (*single, *OF_A_TABLE, "method_rates", "tuning_epochs"),
        values,
        "A single run has no setting {!r}: leave it out, and choose by --method, --start, --lr and --seed.",
    )
    settings = settings_from((where, {**values, **single}))
    if len(settings.weight_decays) > 1:
        raise ConfigurationError(
            "A single run has one weight decay: give one, such as --set weight_decays=[0.1]."
        )
    asked = Configuration(
        "train", f"One run of {name} from the {start} start", settings, seed=one["seed"] or 0
    )
    given = bool(values) or any(value is not None for value in one.values())
    return execute(asked, context, given=given)[0]


def run_reproduce(name: str, size: str, options: Layer, context: Context) -> dict[str, Comparison]:
    """Do what `pathspace reproduce` was asked for; see there. Returns the comparisons by recipe, if any."""
    recipe = load_recipe(name)
    if recipe.engine:
        if chosen_device(context.device) != "cpu" and context.device != "auto":
            raise ConfigurationError(
                f"The recipe {name!r} computes on the processor alone: leave --device {context.device} out."
            )
        reproduce_table(recipe, size, options, context)
        return {}
    if recipe.parts:
        return _reproduce_parts(recipe, size, options, context)
    asked = _asked(recipe, size, options)
    given = bool(size or options[1])
    return {name: execute(asked, context, given=given, studied=recipe)[0]}


def _asked(recipe: Recipe, size: str, options: Layer) -> Configuration:
    size = size or next(iter(recipe.sizes), "")
    where, chosen = options
    if "methods" in chosen and "baselines" not in chosen:
        # Whoever picks some of a claim's methods means its baselines among them.
        kept = [
            name
            for name in settings_from(*recipe.layers(size)).baselines
            if name in chosen["methods"]
        ]
        options = where, {**chosen, "baselines": kept}
    settings = settings_from(*recipe.layers(size), options)
    return Configuration("reproduce", recipe.title, settings, recipe=recipe.name, size=size)


def _reproduce_parts(
    recipe: Recipe, size: str, options: Layer, context: Context
) -> dict[str, Comparison]:
    """Run the parts of a recipe, each in a folder of its own, and bring their results together on one page.

    Parts that are done are not done again, so the same command continues what was stopped.
    """
    asked = Parts(
        recipe.name,
        recipe.title,
        {part: _asked(load_recipe(part), size, options) for part in recipe.parts},
    )
    with begun(asked, context, given=bool(size or options[1])) as (settled, output):
        comparisons: dict[str, Comparison] = {}
        results: list[Any] = []
        for part, configuration in settled.parts.items():
            known = is_own(output / part)
            here = replace(
                context,
                output=output / part,
                resume=known,
                fresh=context.fresh and not known,
            )
            shown = not context.as_json
            comparisons[part], report = execute(configuration, here, given=True, shown=shown)
            results.append(report.results)
        found = parts_report(comparisons, title=recipe.title, configuration=settled.as_dict())
        page = write_report(found, output)
    if context.as_json:
        print_json(results[0] if len(results) == 1 else results)
    else:
        print_line(output_console(), f"All parts: {page}")
    return comparisons


@dataclass(frozen=True)
class TableRequest(Request):
    """The request of a command that fills a table of a recipe by a protocol."""

    recipe: str
    size: str
    protocol: DataclassInstance
    kind = "protocol"
    command = "reproduce"
    results = (f"{CELLS}/*.json", "networks/*")

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
        fewer = stored.as_dict()
        more = self.as_dict()
        seeds = [content["protocol"].pop("seeds") for content in (fewer, more)]
        if isinstance(seeds[1], list):
            return fewer == more and set(seeds[0]) < set(seeds[1])
        return fewer == more and seeds[0] < seeds[1]


def reproduce_table(recipe: Recipe, size: str, options: Layer, context: Context) -> None:
    """Fill the table of a recipe, and report.

    Raises:
        ConfigurationError: A setting is impossible, a package is missing, the folder holds
            something else, a file cannot be read, or a process died.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    engine = import_module(ENGINES[recipe.engine])
    for name in NEEDED.get(recipe.engine, ()):
        if find_spec(name) is None:
            raise ConfigurationError(
                f"The package {name!r} is missing: {install('experiments', 'sequences')}."
            )
    protocol = laid_over(engine.Protocol, [*recipe.layers(size), options])
    asked = TableRequest(recipe.name, size or next(iter(recipe.sizes), ""), protocol)
    with begun(asked, context, given=bool(size or options[1])) as (settled, output):
        folder = make_folder(output / CELLS)
        runner = context.runner(device="cpu")

        def do(kind: type, cells: Sequence[Any], compute: Callable[..., Any]) -> list[Any]:
            jobs = [StoredCell(kind, cell, compute, folder) for cell in cells]
            with context.shown() as monitor, runner:
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
        compute: Computes the cell, telling its `report` how far it is; other processes must be able to
            import it.
        folder: Where the files of cells lie, each named by the cell's `key`.
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
    def file(self) -> Path:
        """See `runner.Job`."""
        return self.folder / f"{self.key}.json"

    def __call__(self, monitor: Monitor) -> Any:
        """Compute the cell."""
        return self.compute(self.cell, report=partial(monitor.advanced, self.label))
