"""What the commands of the command line do, once their options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pathspace.experiments import configuration as configurations
from pathspace.experiments import invariance
from pathspace.experiments.compare import Comparison, compare, train
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.live import monitor
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import Recipe, load_recipe
from pathspace.experiments.report import build_table, print_table, write_report
from pathspace.experiments.report.files import PAGE, as_json
from pathspace.experiments.settings import settings_from
from pathspace.experiments.storage import writable_folder
from pathspace.experiments.studies import run_study

COMPARE_TITLE = "The same network from two starts of the same function"
Layer = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Surroundings:
    """Options of every command that do not change results.

    Attributes:
        output: Where runs and report are written.
        data_dir: Where tasks look for data sets.
        resume: Continue what is in `output`, with its settings.
        fresh: Start over, whatever is in `output`.
        processes: Runs at a time.
        as_json: Print the results as JSON on standard output instead of a table.
    """

    output: Path
    data_dir: Path | None = None
    resume: bool = False
    fresh: bool = False
    processes: int = 1
    as_json: bool = False


def run_compare(options: Layer, around: Surroundings) -> Comparison:
    """Do what `pathspace compare` was asked for; see there."""
    asked = Configuration("compare", COMPARE_TITLE, settings_from(options))
    return _execute(asked, around, given=bool(options[1]))


def run_reproduce(name: str, size: str, options: Layer, around: Surroundings) -> Comparison:
    """Do what `pathspace reproduce` was asked for; see there."""
    recipe = load_recipe(name)
    size = size or next(iter(recipe.sizes), "")
    settings = settings_from(*recipe.layers(size), options)
    asked = Configuration("reproduce", recipe.title, settings, recipe=name, size=size)
    comparison = _execute(asked, around, given=bool(options[1]))
    if recipe.study:
        _study(recipe, size, comparison, around)
    return comparison


def _study(recipe: Recipe, size: str, comparison: Comparison, around: Surroundings) -> None:
    console = Console(stderr=True) if around.as_json else _console()
    with Console(stderr=True).status(f"Studying the {recipe.study['name']}"):
        found = run_study(
            recipe.study["name"],
            recipe.study_options(size),
            comparison,
            around.output,
            around.data_dir,
        )
    for part in found:
        console.print(part, highlight=False)


def run_train(
    method: str,
    start: str,
    learning_rate: float,
    seed: int,
    options: Layer,
    around: Surroundings,
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
    settings = settings_from((where, {**values, **one}))
    asked = Configuration("train", f"One run of {method} from the {start} start", settings, seed=seed)
    return _execute(asked, around, given=given or bool(values))


def run_check_invariance(
    optimizers: Sequence[str] | None, networks: Sequence[str] | None, *, steps: int, seed: int, as_json: bool
) -> bool:
    """Do what `pathspace check-invariance` was asked for; None stands for all. Says whether every claim held."""
    optimizers, networks = optimizers or list(invariance.CANDIDATES), networks or list(invariance.NETWORKS)
    for kind, asked, known in (
        ("optimizer", optimizers, invariance.CANDIDATES),
        ("network", networks, invariance.NETWORKS),
    ):
        for name in asked:
            if name not in known:
                raise unknown_name(kind, name, known, f"--{kind}s")
    import torch

    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for each other
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("checking", total=len(optimizers) * len(networks))
        verdicts = invariance.check_all(
            optimizers,
            networks,
            steps=steps,
            seed=seed,
            told=lambda done: progress.update(
                bar, advance=1, description=f"checked {done.optimizer} on {done.network}"
            ),
        )
    if as_json:
        print(json.dumps(invariance.as_json(verdicts), indent=2, allow_nan=False))
    else:
        invariance.print_verdicts(verdicts, _console())
    return not any(verdict.broken for verdict in verdicts)


def _execute(asked: Configuration, around: Surroundings, *, given: bool) -> Comparison:
    output = writable_folder(around.output, "--output")
    configuration, resume = _settle(asked, around, given=given)
    console = Console(stderr=True)
    display, watcher = monitor(console)
    with display:
        if configuration.seed is None:
            comparison = compare(
                configuration.settings,
                output,
                watcher,
                data_dir=around.data_dir,
                resume=resume,
                processes=around.processes,
            )
        else:
            comparison = train(
                configuration.settings,
                configuration.seed,
                output,
                watcher,
                data_dir=around.data_dir,
                resume=resume,
            )
    _report(comparison, configuration, around)
    return comparison


def _settle(asked: Configuration, around: Surroundings, *, given: bool) -> tuple[Configuration, bool]:
    """Decide what to run and whether to continue earlier runs; write `config.json` for a fresh start."""
    output = around.output
    if around.resume and around.fresh:
        raise ConfigurationError("--resume and --fresh contradict each other: give one of them.")
    if around.resume or (configurations.unfinished(output, PAGE) and not around.fresh):
        stored = configurations.read(output)
        if around.resume and not given and stored.command == asked.command:
            return stored, True
        if json.dumps(stored.as_dict()) == json.dumps(asked.as_dict()):
            print(f"Continuing the unfinished runs in {output} (--fresh starts over).", file=sys.stderr)
            return stored, True
        raise ConfigurationError(
            f"The folder {str(output)!r} holds unfinished runs with other settings: continue those by "
            f"`pathspace {' '.join(filter(None, (stored.command, stored.recipe)))} --resume --output "
            f"{output}`, give another --output, or start over with --fresh."
        )
    configurations.clear(output, PAGE)
    configurations.write(asked, output)
    return asked, False


def _report(comparison: Comparison, configuration: Configuration, around: Surroundings) -> None:
    published = load_published(configuration.recipe) if configuration.recipe else None
    content = configuration.as_dict()
    page = write_report(
        comparison, around.output, title=configuration.title, configuration=content, published=published
    )
    if around.as_json:
        print(json.dumps(as_json(comparison, content, published), indent=2, allow_nan=False))
        return
    console = _console()
    print_table(build_table(comparison, published), console, published)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


def _console() -> Console:
    # Pipes and logs have no width; eighty columns would break the names of the methods.
    return Console(width=None if sys.stdout.isatty() else 120)


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `--set NAME=VALUE` options; a value is written as in TOML, and a bare word is a string.

    Raises:
        ConfigurationError: There is no equals sign.
    """
    import tomllib

    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {assignment!r} has no value: write --set NAME=VALUE.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table, dot, option = name.partition(".")
        if dot:
            options = settings.setdefault(table, {})
            if not isinstance(options, dict):
                raise ConfigurationError(
                    f"{table!r} is given both as a value and as a table: give one of them."
                )
            options[option] = value
        else:
            settings[name] = value
    return settings
