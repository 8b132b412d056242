"""Commands that train: compare, train, reproduce and sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pathspace.cli.options import (
    DIVERGED,
    LARGEST_SEED,
    ListMethodsOption,
    QuickOption,
    SettingOptions,
    TableOptions,
    TaskOption,
    clear_errors,
    grouped,
)
from pathspace.experiments.context import Context, EngineContext
from pathspace.experiments.methods import STARTS, method

if TYPE_CHECKING:
    from pathspace.experiments.compare import Comparison
    from pathspace.experiments.run import RunConfig, RunResult

COMMAND_LINE = "the command line"
SizeOption = Annotated[
    str, typer.Option("--size", help="A size of the recipe; default the first one.")
]


@grouped
def compare(
    *,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A Python file with model() and batches(); default a built-in task.",
            show_default=False,
        ),
    ] = None,
    task: TaskOption = None,
    quick: QuickOption = False,
    settings: TableOptions,
    where: EngineContext,
    _listed: ListMethodsOption = False,
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

        options = with_own_file(settings.chosen(task=task), file, quick=quick)
        _expect_survivors([run_compare((COMMAND_LINE, options), where)])


@grouped
def train(
    *,
    task: TaskOption = None,
    method_name: Annotated[
        str | None, typer.Option("--method", help="A name that --list has; default path-sgd.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help=f"Start weights: {', '.join(STARTS)}; without it default, the weights as initialised.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Learning rate; default by method.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, max=LARGEST_SEED, help="Seed of weights and batches; default 0."
        ),
    ] = None,
    settings: SettingOptions,
    where: Context,
    _listed: ListMethodsOption = False,
) -> None:
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

        one = {"method": method_name, "start": start, "learning_rate": learning_rate, "seed": seed}
        done = run_train(one, (COMMAND_LINE, settings.chosen(task=task)), where)
        (run,) = done.rows[0].runs
        if run.lost_at is not None:
            _say_lost(run)


@grouped
def reproduce(
    *,
    name: Annotated[
        str | None, typer.Argument(help="The recipe; without it, all of them are listed.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List recipes, sizes, costs and what has been run.")
    ] = False,
    size: SizeOption = "",
    settings: TableOptions,
    where: EngineContext,
) -> None:
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
    if name is None or listed:
        _list_recipes(where.as_json)
        return
    with clear_errors(f"reproduce {name}"):
        from pathspace.experiments.execution import run_reproduce

        options = settings.chosen()
        _expect_survivors(run_reproduce(name, size, (COMMAND_LINE, options), where).values())


@grouped
def sweep(
    *,
    name: Annotated[
        str, typer.Argument(help="A recipe, or else a task; default digits.", show_default=False)
    ] = "",
    size: SizeOption = "",
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            help="A setting to search, and its values: NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=LOW:HIGH:log:POINTS or "
            "NAME=A,B,C. NAME is learning_rate, weight_decay or as for --set. Repeatable.",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option("--sampler", help="grid (every combination), random or tpe; default grid."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            help="Points to try for each optimizer and start, with random and tpe; default 20.",
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            help="median: end a point whose first run is worse than the median of earlier ones at the same step; "
            "default none.",
        ),
    ] = None,
    settings: TableOptions,
    where: EngineContext,
    _listed: ListMethodsOption = False,
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

        options = settings.chosen()
        searched = {"search": search or (), "sampler": sampler, "trials": trials, "prune": prune}
        done = run_sweep(name, size, (COMMAND_LINE, options), where, **searched)
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
