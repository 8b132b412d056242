"""Commands that train: compare, train, reproduce and sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pathspace.cli.options import (
    DIVERGED,
    LARGEST_SEED,
    ListOption,
    SettingOptions,
    TableOptions,
    argument,
    clear_errors,
    grouped,
    task_option,
)
from pathspace.experiments.context import Context, EngineContext, option
from pathspace.experiments.methods import STARTS, method

if TYPE_CHECKING:
    from pathspace.experiments.compare import Comparison
    from pathspace.experiments.run import RunConfig, RunResult

COMMAND_LINE = "the command line"


def _size_option() -> Any:
    return option("A size of the recipe; default the first one.", default="")


@dataclass(frozen=True)
class CompareOptions:
    """Options of `pathspace compare` alone."""

    file: Path | None = argument(
        "A Python file with model() and batches(); default a built-in task.", show_default=False
    )
    task: str | None = task_option()
    quick: bool = option(
        "A first table in half a minute: one seed, three rates, few passes.",
        "--quick",
        default=False,
    )


@grouped
def compare(
    own: CompareOptions, settings: TableOptions, where: EngineContext, _listed: ListOption
) -> None:
    """Train one network by several optimizers from two starts of the same function, and report.

    A file of your own has `def model()`, which returns a new nn.Module, and `def batches()`, which
    yields pairs of tensors (inputs, targets). Class numbers (N,) are trained by cross-entropy, real
    numbers by the squared error, and anything else by a `def loss(outputs, targets)` in the file.

    The exit code is 1 when every run was lost: its loss or a step was not finite, or its loss rose
    above ten times its beginning and the run ended no better than it began.

    \b
    Examples:
      pathspace compare
      pathspace compare --list
      pathspace compare mine.py --quick
      pathspace compare --task mnist --data-dir data
      pathspace compare --task mnist --set task_options.steps=98 --set task_options.permuted=true
      pathspace compare --methods sgd,path-sgd --seeds 5 --learning-rates 0.03,0.1,0.3
      pathspace compare --resume --output runs/compare
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("compare"):
        from pathspace.experiments.execution import run_compare
        from pathspace.experiments.own import with_own_file

        options = with_own_file(settings.chosen(task=own.task), own.file, quick=own.quick)
        _expect_survivors([run_compare((COMMAND_LINE, options), where)])


@dataclass(frozen=True)
class TrainOptions:
    """Options of `pathspace train` alone."""

    task: str | None = task_option()
    method: str | None = option("A name that --list has; default path-sgd.")
    start: str | None = option(
        f"Start weights: {', '.join(STARTS)}; without it default, the weights as initialised."
    )
    learning_rate: float | None = option("Learning rate; default by method.", "--lr")
    seed: int | None = option("Seed of weights and batches; default 0.", min=0, max=LARGEST_SEED)


@grouped
def train(own: TrainOptions, settings: SettingOptions, where: Context, _listed: ListOption) -> None:
    """Train one network once, with checkpoints; continue it exactly after it was stopped or killed.

    The exit code is 1 when the loss or a step is not finite (the run ends there, and its report
    says so), and when the loss rose above ten times its beginning and the run ended no better than
    it began.

    \b
    Examples:
      pathspace train --method path-sgd --lr 0.3
      pathspace train --method path-sgd --clip-step 1 --quiet --json
      pathspace train --task mnist --data-dir data --epochs 20 --set checkpoint_every=100
      pathspace train --resume --output runs/train
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("train"):
        from pathspace.experiments.execution import run_train

        one = vars(own).copy()
        options = settings.chosen(task=one.pop("task"))
        done = run_train(one, (COMMAND_LINE, options), where)
        (run,) = done.runs
        if run.lost_at is not None:
            _say_lost(run)


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of `pathspace reproduce` alone."""

    name: str | None = argument("The recipe; without it, all of them are listed.")
    listed: bool = option(
        "List recipes, sizes, costs and what has been run.", "--list", default=False
    )
    size: str = _size_option()


@grouped
def reproduce(own: ReproduceOptions, settings: TableOptions, where: EngineContext) -> None:
    """Run a published experiment and set the published numbers beside ours.

    The exit code is 1 when every run was lost: its loss or a step was not finite, or its loss rose
    above ten times its beginning and the run ended no better than it began.

    \b
    Examples:
      pathspace reproduce
      pathspace reproduce mnist-rows --data-dir data
      pathspace reproduce adding --size paper-100
      pathspace reproduce adding --methods sgd,path-adam --learning-rates 0.003,0.01
      pathspace reproduce smnist-784 --set task_options.train_size=5000
    """  # noqa: D301 (click wants the character, not the letters)
    if own.name is None or own.listed:
        _list_recipes(where.as_json)
        return
    with clear_errors(f"reproduce {own.name}"):
        from pathspace.experiments.execution import run_reproduce

        options = COMMAND_LINE, settings.chosen()
        _expect_survivors(run_reproduce(own.name, own.size, options, where).values())


@dataclass(frozen=True)
class SweepOptions:
    """Options of `pathspace sweep` alone."""

    name: str = argument("A recipe, or else a task; default digits.", "", show_default=False)
    size: str = _size_option()
    search: list[str] | None = option(
        "A setting to search, and its values: NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=LOW:HIGH:log:POINTS or "
        "NAME=A,B,C. NAME is learning_rate, weight_decay or as for --set. Repeatable."
    )
    sampler: str | None = option("grid (every combination), random or tpe; default grid.")
    trials: int | None = option(
        "Points to try for each optimizer and start, with random and tpe; default 20."
    )
    prune: str | None = option(
        "median: end a point whose first run is worse than the median of earlier ones at the same step; default none."
    )


@grouped
def sweep(
    own: SweepOptions, settings: TableOptions, where: EngineContext, _listed: ListOption
) -> None:
    """Search learning rates, and any other settings, for several optimizers on the validation split.

    There is a run for each combination of optimizer, point and seed. After a stop or a kill the same
    command continues. A run that fails is reported with its reason, and the others go on. The exit
    code is 1 when all failed.

    \b
    Examples:
      pathspace sweep digits
      pathspace sweep adding --methods sgd,path-sgd-short --learning-rates 0.01,0.03,0.1 --seeds 3
      pathspace sweep adding --search learning_rate=1e-4:1:log --search damping=0.01,0.1
      pathspace sweep digits --sampler tpe --trials 30 --prune median
      pathspace sweep mnist-rows --engine ray --address auto
      pathspace sweep --resume --output runs/sweep
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("sweep"):
        from pathspace.experiments.sweep import run_sweep

        done = run_sweep(options=(COMMAND_LINE, settings.chosen()), context=where, **vars(own))
        if done.all_failed:
            reason = done.points[0].runs[0].reason
            stop = "." * (not reason.endswith((".", "?")))  # some are sentences
            typer.echo(f"Error: Every run failed, the first one so: {reason}{stop}", err=True)
            raise typer.Exit(DIVERGED)


def _expect_survivors(comparisons: Iterable[Comparison]) -> None:
    """End the command if no run came through; a recipe without comparisons has told itself what it saw."""
    runs = [run for comparison in comparisons for run in comparison.runs]
    if not runs or any(run.lost_at is None for run in runs):
        return
    rates = sorted({run.config.learning_rate for run in runs})
    shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    bound = next(filter(None, (_missing_bound(run.config) for run in runs)), "")
    typer.echo(
        f"Error: Every run was lost, at rates of {shown}: its loss or a step was not finite, or it ended no better "
        f"than it began. Give lower --learning-rates{bound}.",
        err=True,
    )
    raise typer.Exit(DIVERGED)


def _say_lost(run: RunResult) -> None:
    """Say where a run was lost, and what to try; ends the command."""
    config = run.config
    what = (
        f"The loss or the step was not finite after {run.diverged_at} steps, where the run ended"
        if run.diverged_at is not None
        else f"The run ended no better than it began: its loss rose above ten times the first one at step {run.lost_at}"
    )
    typer.echo(
        f"Error: {what}: give a lower --lr than {config.learning_rate:g}{_missing_bound(config)}.",
        err=True,
    )
    raise typer.Exit(DIVERGED)


def _missing_bound(config: RunConfig) -> str:
    """Return what else may keep such a run from diverging; nothing if it has that bound already."""
    chosen = method(config.method)
    if chosen.presumes and config.start != chosen.presumes:
        return f", or the start that the rule presumes, {chosen.presumes}"
    if not chosen.takes_bounds:
        return ""
    if chosen.clips_steps:
        return (
            ""
            if config.clip_step
            else ", or a bound: --clip-step 1 bounds the length of a step on balanced weights"
        )
    return "" if config.clip_norm else ", or a bound: --set clip_norm=1 bounds the gradient"


def _list_recipes(as_json: bool) -> None:
    from pathspace.experiments.recipes import listing, listing_as_json

    if as_json:
        typer.echo(json.dumps(listing_as_json(), indent=2))
        return
    typer.echo("\n".join(listing(shutil.get_terminal_size((100, 24)).columns)))
