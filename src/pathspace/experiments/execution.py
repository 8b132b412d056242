"""Run `pathspace compare`, `train` and `reproduce`: the runs, a recipe's study, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pathspace.experiments import folders
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.configuration import Configuration, Parts, begun
from pathspace.experiments.context import Context, chosen_device
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.jobs import Runs
from pathspace.experiments.layers import LARGEST, Layer
from pathspace.experiments.methods import method
from pathspace.experiments.monitor import Shown
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import Recipe, load_recipe
from pathspace.experiments.report.comparison import comparison_report, parts_report
from pathspace.experiments.report.document import Report, Section, print_report, write_report
from pathspace.experiments.settings import OF_A_TABLE, refuse_unused, settings_from
from pathspace.experiments.starts import check_start
from pathspace.experiments.studies import run_study
from pathspace.experiments.tables import reproduce_table
from pathspace.experiments.terminal import output_console, print_json, print_line

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
    with Shown(Console(stderr=True), quiet=context.quiet) as monitor:
        runs = Runs.of(context, output, monitor, settings.threads)
        return compare(settings, runs, configuration.seed)


def _study(recipe: Recipe, comparison: Comparison, size: str, context: Context) -> list[Section]:
    # which this machine may lack: the runs may have been a cluster's
    if context.run_device != "cpu":
        Console(stderr=True).print("The study computes on the processor.", highlight=False)
    name = recipe.study["name"]
    options = recipe.study_options(size)
    with Shown(Console(stderr=True), quiet=context.quiet) as monitor:
        monitor.stage(f"Studying the {name}", 1)
        return run_study(name, options, comparison, context.data_dir, monitor)


def run_compare(options: Layer, context: Context) -> Comparison:
    """Do what `pathspace compare` was asked for; see there."""
    asked = Configuration("compare", COMPARE_TITLE, settings_from(options))
    return execute(asked, context, given=bool(options[1]))[0]


def run_train(one: Mapping[str, Any], options: Layer, context: Context) -> Comparison:
    """Do what `pathspace train` was asked for; see there.

    Args:
        one: The options `method`, `start`, `learning_rate` and `seed`; None for one that was not given.
        options: Settings of the command line.
        context: Where to write.
    """
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
            known = folders.is_own(output / part)
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
