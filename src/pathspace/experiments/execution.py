"""What `pathspace compare` and `pathspace train` do, and how any command does its runs and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pathspace.experiments.compare import Comparison, compare, train
from pathspace.experiments.configuration import Configuration, begun
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.folders import Context
from pathspace.experiments.layers import Layer
from pathspace.experiments.monitor import Shown
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import Recipe
from pathspace.experiments.report.comparison import comparison_report
from pathspace.experiments.report.document import Report, Section, print_report, write_report
from pathspace.experiments.settings import OF_A_TABLE, refuse_unused, settings_from
from pathspace.experiments.studies import run_study

COMPARE_TITLE = "The same network from two starts of the same function"


@dataclass(frozen=True)
class Done:
    """A comparison, its report, and the folder of both."""

    comparison: Comparison
    report: Report
    folder: Path


def execute(
    asked: Configuration, context: Context, *, given: bool, studied: Recipe | None = None
) -> Done:
    """Do all runs, and the study of a recipe that has one, and write the report."""
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
    return Done(comparison, report, output)


def _runs(configuration: Configuration, output: Path, context: Context) -> Comparison:
    settings = configuration.settings
    with Shown(Console(stderr=True), quiet=context.quiet) as monitor:
        runs = context.runs(output, monitor, settings.threads)
        if configuration.seed is None:
            return compare(settings, runs)
        return train(settings, configuration.seed, runs)


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
    done = execute(asked, context, given=bool(options[1]))
    print_report(done.report, done.folder, as_json=context.as_json)
    return done.comparison


def run_train(
    method: str,
    start: str,
    learning_rate: float,
    seed: int,
    options: Layer,
    context: Context,
    *,
    given: bool,
) -> Comparison:
    """Do what `pathspace train` was asked for; see there. `given`: whether any of the settings was chosen."""
    where, values = options
    one = {
        "methods": [method],
        "starts": [start],
        "learning_rates": [learning_rate],
        "seeds": 1,
        "tuning_seeds": 1,
    }
    refuse_unused(
        (*one, *OF_A_TABLE, "method_rates", "tuning_epochs"),
        values,
        "A single run has no setting {!r}: leave it out, and choose by --method, --start, --lr and --seed.",
    )
    settings = settings_from((where, {**values, **one}))
    if len(settings.weight_decays) > 1:
        raise ConfigurationError(
            "A single run has one weight decay: give one, such as --set weight_decays=[0.1]."
        )
    asked = Configuration(
        "train", f"One run of {method} from the {start} start", settings, seed=seed
    )
    done = execute(asked, context, given=given or bool(values))
    print_report(done.report, done.folder, as_json=context.as_json)
    return done.comparison
