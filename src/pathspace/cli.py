"""The command `pathspace`; nothing heavy is imported until a command needs it, so that help comes at once."""

from __future__ import annotations

import io
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        "Error: the command line needs more packages: pip install 'pathspace[experiments]'"
    ) from error

from pathspace.experiments.devices import chosen_device
from pathspace.experiments.errors import ConfigurationError, LostProcessError, StorageError
from pathspace.experiments.methods import method
from pathspace.experiments.options import (
    AddressOption,
    BatchOption,
    ClipStepOption,
    DataOption,
    DeviceOption,
    EngineOption,
    EpochsOption,
    FreshOption,
    JsonOption,
    ListMethodsOption,
    MethodsOption,
    OutputOption,
    PatienceOption,
    PlainOption,
    QuietOption,
    RatesOption,
    ResumeOption,
    SeedsOption,
    SetOption,
    TaskOption,
    ThreadsOption,
    WorkersOption,
    names_in,
    numbers_in,
)
from pathspace.experiments.processes import PATIENCE, expect_one, is_first, joined, started_by_torchrun
from pathspace.experiments.starts import STARTS, check_start

if TYPE_CHECKING:
    from pathspace.experiments.compare import Comparison
    from pathspace.experiments.run import RunResult

DIVERGED, WRONG_USE, BROKEN, INTERRUPTED = 1, 2, 70, 130
TRACEBACK = "PATHSPACE_TRACEBACK"
COMMAND_LINE = "the command line"
EXTRAS = {"optuna": "sweep", "ray": "ray"}  # of packages that only some options need
LARGEST_SEED = 2**32 - 1

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Train ReLU and recurrent networks in a geometry free of how their weights are scaled.

    \b
    Examples:
      pathspace compare
      pathspace train --task mnist --data-dir data --method path-muon --epochs 5
      pathspace check-invariance --networks rnn
      pathspace sequence fit log.txt -o log.safetensors
    """,
)


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show, it shows as its code
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: in the background
        signal.signal(signal.SIGINT, _Interrupts())
    try:
        app()
    except MemoryError:
        typer.echo(
            "Error: There is not enough memory for this: make it smaller, or give fewer workers.", err=True
        )
        sys.exit(WRONG_USE)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        said = " ".join(str(error).split())
        typer.echo(
            f"Error: {type(error).__name__}: {said}\nThis is a mistake in pathspace and not in your command. Please "
            f"report it, with what the command prints with {TRACEBACK}=1 set.",
            err=True,
        )
        sys.exit(BROKEN)


class _Interrupts:
    """Ctrl-C: the first interrupts what is being done, another one, while that is being put away, ends it quietly."""

    def __init__(self) -> None:
        self._heard = False

    def __call__(self, _number: int, _frame: object) -> None:
        if not self._heard:
            self._heard = True
            raise KeyboardInterrupt
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # the cursor that a progress bar has hidden
        os._exit(INTERRUPTED)


def _print_version(wanted: bool) -> None:
    if wanted:
        import pathspace

        typer.echo(f"pathspace {pathspace.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def compare(
    task: TaskOption = None,
    methods: MethodsOption = None,
    seeds: SeedsOption = None,
    epochs: EpochsOption = None,
    batch_size: BatchOption = None,
    learning_rates: RatesOption = None,
    clip_step: ClipStepOption = None,
    settings: SetOption = None,
    output: OutputOption = None,
    data_dir: DataOption = None,
    threads: ThreadsOption = None,
    plain_rnn: PlainOption = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = "",
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    _listed: ListMethodsOption = False,
) -> None:
    """Train one network by several optimizers from two starts of the same function, and report.

    The exit code is 1 when every run of the table was lost, as `train` says of one.

    \b
    Examples:
      pathspace compare
      pathspace compare --list
      pathspace compare --task mnist --data-dir data
      pathspace compare --task mnist --set task_options.steps=98 --set task_options.permuted=true
      pathspace compare --methods sgd,path-sgd --seeds 5 --learning-rates 0.03,0.1,0.3
      pathspace compare --resume --output runs/compare
    """  # noqa: D301 (click wants the character, not the letters)
    with _clear_errors("compare") as folders:
        from pathspace.experiments.commands import run_compare

        options = _options(
            settings,
            task=task,
            methods=names_in(methods, "--methods"),
            seeds=seeds,
            epochs=epochs,
            batch_size=batch_size,
            learning_rates=numbers_in(learning_rates, "--learning-rates"),
            clip_step=clip_step,
            threads=threads,
            plain_rnn=plain_rnn,
        )
        around = _surroundings(
            "compare",
            output,
            data_dir,
            resume,
            fresh,
            workers,
            threads,
            as_json,
            device,
            quiet,
            engine,
            address,
        )
        _expect_survivors([run_compare((COMMAND_LINE, options), replace(around, chosen=folders.append))])


@app.command()
def train(
    task: TaskOption = None,
    method_name: Annotated[
        str | None, typer.Option("--method", help="A name that --list has; default path-sgd.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", help=f"{', '.join(STARTS)}; default default.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Learning rate; default by method.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=LARGEST_SEED, help="Decides weights and batches; default 0."),
    ] = None,
    epochs: EpochsOption = None,
    batch_size: BatchOption = None,
    clip_step: ClipStepOption = None,
    settings: SetOption = None,
    output: OutputOption = None,
    data_dir: DataOption = None,
    threads: ThreadsOption = None,
    plain_rnn: PlainOption = None,
    device: DeviceOption = "cpu",
    patience: PatienceOption = PATIENCE,
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    _listed: ListMethodsOption = False,
) -> None:
    """Train one network once, with checkpoints; continue it exactly after it was stopped or killed.

    The exit code is 1 when the loss or a step is not finite (the run ends there, and its report says so), and when the
    loss rose above ten times its beginning and the run ended no better than it began.

    \b
    Examples:
      pathspace train --method path-sgd --lr 0.3
      pathspace train --method path-sgd --clip-step 1 --quiet --json
      pathspace train --task mnist --data-dir data --epochs 20 --set checkpoint_every=100
      pathspace train --resume --output runs/train
      torchrun --nproc-per-node 2 -m pathspace train --task mnist --data-dir data
    """  # noqa: D301 (click wants the character, not the letters)
    with _clear_errors("train") as folders:
        from pathspace.experiments.commands import run_train
        from pathspace.experiments.pool import follow

        options = _options(
            settings,
            task=task,
            epochs=epochs,
            batch_size=batch_size,
            clip_step=clip_step,
            threads=threads,
            plain_rnn=plain_rnn,
        )
        if learning_rate is not None and not 0 < learning_rate < math.inf:
            raise ConfigurationError(f"The option --lr is {learning_rate:g}: give a positive number.")
        around = _surroundings("train", output, data_dir, resume, fresh, 1, threads, as_json, device, quiet)
        chosen = method(method_name or "path-sgd", "--method")
        check_start(start or "default", "--start")
        with joined(chosen_device(device), patience) as processes:
            if processes.rank:
                follow(processes, folders.append)
                return
            with processes.leading():
                done = run_train(
                    method_name or "path-sgd",
                    start or "default",
                    chosen.learning_rate if learning_rate is None else learning_rate,
                    seed or 0,
                    (COMMAND_LINE, options),
                    replace(around, chosen=folders.append, joined=processes),
                    given=any(value is not None for value in (method_name, start, learning_rate, seed)),
                )
        (run,) = done.rows[0].runs
        if run.lost_at is not None:
            _say_lost(run)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The recipe; without it, all of them are listed.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List recipes, sizes, costs and what has been run.")
    ] = False,
    size: Annotated[str, typer.Option("--size", help="A size of the recipe; default the first one.")] = "",
    methods: MethodsOption = None,
    seeds: SeedsOption = None,
    epochs: EpochsOption = None,
    learning_rates: RatesOption = None,
    clip_step: ClipStepOption = None,
    settings: SetOption = None,
    output: OutputOption = None,
    data_dir: DataOption = None,
    threads: ThreadsOption = None,
    plain_rnn: PlainOption = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = "",
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a published experiment and set the published numbers beside ours.

    The exit code is 1 when every run of the table was lost, as `train` says of one.

    \b
    Examples:
      pathspace reproduce
      pathspace reproduce mnist-rows --data-dir data
      pathspace reproduce adding --size paper-100
      pathspace reproduce adding --methods sgd,path-adam --learning-rates 0.003,0.01
      pathspace reproduce smnist-784 --set task_options.train_size=5000
    """  # noqa: D301 (click wants the character, not the letters)
    if name is None or listed:
        _list_recipes()
        return
    with _clear_errors(f"reproduce {name}") as folders:
        from pathspace.experiments.commands import run_reproduce

        options = _options(
            settings,
            methods=names_in(methods, "--methods"),
            seeds=seeds,
            epochs=epochs,
            learning_rates=numbers_in(learning_rates, "--learning-rates"),
            clip_step=clip_step,
            threads=threads,
            plain_rnn=plain_rnn,
        )
        around = _surroundings(
            name, output, data_dir, resume, fresh, workers, threads, as_json, device, quiet, engine, address
        )
        comparisons = run_reproduce(
            name, size, (COMMAND_LINE, options), replace(around, chosen=folders.append)
        )
        _expect_survivors(comparisons.values())


@app.command()
def sweep(
    name: Annotated[
        str, typer.Argument(help="A recipe, or else a task; default digits.", show_default=False)
    ] = "",
    size: Annotated[str, typer.Option("--size", help="A size of the recipe; default the first one.")] = "",
    methods: MethodsOption = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Runs at each point.")] = None,
    learning_rates: RatesOption = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            help="What else to search, or a range of rates: NAME=LOW:HIGH, LOW:HIGH:log, LOW:HIGH:log:POINTS or A,B,C; "
            "NAME as for --set, or learning_rate, weight_decay. Repeatable.",
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", help="grid (every combination), random or tpe; default grid.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", help="Points for each optimizer and start, if drawn; default 20."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune", help="median: end runs worse than the median at the same step; default none."
        ),
    ] = None,
    epochs: EpochsOption = None,
    batch_size: BatchOption = None,
    clip_step: ClipStepOption = None,
    settings: SetOption = None,
    output: OutputOption = None,
    data_dir: DataOption = None,
    threads: ThreadsOption = None,
    plain_rnn: PlainOption = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    address: AddressOption = "",
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    _listed: ListMethodsOption = False,
) -> None:
    """Search learning rates, and any other settings, for several optimizers on the validation split.

    Seeds times points times optimizers are run; the same command goes on where it was stopped or killed. A run that
    fails is reported with its reason and stops nothing; the exit code is 1 when all failed.

    \b
    Examples:
      pathspace sweep digits
      pathspace sweep adding --methods sgd,path-sgd-short --learning-rates 0.01,0.03,0.1 --seeds 3
      pathspace sweep adding --search learning_rate=1e-4:1:log --search damping=0.01,0.1
      pathspace sweep digits --sampler tpe --trials 30 --prune median
      pathspace sweep mnist-rows --engine ray --address auto
      pathspace sweep --resume --output runs/sweep
    """  # noqa: D301 (click wants the character, not the letters)
    with _clear_errors("sweep") as folders:
        from pathspace.experiments.sweep.command import run_sweep

        options = _options(
            settings,
            methods=names_in(methods, "--methods"),
            seeds=seeds,
            epochs=epochs,
            batch_size=batch_size,
            learning_rates=numbers_in(learning_rates, "--learning-rates"),
            clip_step=clip_step,
            threads=threads,
            plain_rnn=plain_rnn,
        )
        around = _surroundings(
            "sweep",
            output,
            data_dir,
            resume,
            fresh,
            workers,
            threads,
            as_json,
            device,
            quiet,
            engine,
            address,
        )
        done = run_sweep(
            name,
            size,
            (COMMAND_LINE, options),
            replace(around, chosen=folders.append),
            search=search or (),
            sampler=sampler,
            trials=trials,
            prune=prune,
        )
        if done.all_failed:
            typer.echo(f"Error: Every run failed, the first one so: {done.trials[0].reason}.", err=True)
            raise typer.Exit(DIVERGED)


@app.command("check-invariance")
def check_invariance(
    optimizers: Annotated[
        str | None, typer.Option("--optimizers", help="Separated by commas; default all.")
    ] = None,
    networks: Annotated[
        str | None, typer.Option("--networks", help="Separated by commas; default all.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of each check.")] = 100,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Decides weights, inputs and factors.")
    ] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the optimizers and networks, and do nothing else.")
    ] = False,
) -> None:
    """Check which optimizers train alike from a rescaled start, on small networks of every kind.

    Every network is trained twice, the second time after a random rescaling by powers of two between 2^-10
    and 2^10. The exit code is 1 when an optimizer that claims invariance fails.

    \b
    Examples:
      pathspace check-invariance
      pathspace check-invariance --list
      pathspace check-invariance --networks rnn,stacked-rnn --steps 20
      pathspace check-invariance --optimizers sgd,path-sgd-momentum --json
    """  # noqa: D301 (click wants the character, not the letters)
    with _clear_errors("check-invariance"):
        if listed:
            typer.echo(import_module("pathspace.experiments.invariance").list_candidates())
            return
        from pathspace.experiments.commands import run_check_invariance

        if not run_check_invariance(
            names_in(optimizers, "--optimizers"),
            names_in(networks, "--networks"),
            steps=steps,
            seed=seed,
            as_json=as_json,
            quiet=quiet,
        ):
            raise typer.Exit(1)


@app.command()
def paths(
    model: Annotated[
        str,
        typer.Argument(help="A built-in network, FILE.py:FUNCTION or MODULE:FUNCTION.", show_default=False),
    ],
    shape: Annotated[
        str | None, typer.Option("--input", help="Shape of one example, for a function that returns none.")
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", help="Of the skeleton: largest, cyclic or random.")
    ] = "largest",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most paths to list for the rank.")] = 10_000,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Decides weights and drawn examples.")
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the reduction graph into this PNG file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count paths, basis paths, degrees of freedom and dead units of a model, and draw its skeleton.

    The built-in networks are those of check-invariance. A function takes no arguments and returns a model, or a
    model and a batch of examples; the file runs as Python does. Files of weights are not opened.

    \b
    Examples:
      pathspace paths rnn
      pathspace paths mlp --rule cyclic --picture mlp.png
      pathspace paths my_model.py:build --input 3,32,32 --json
    """  # noqa: D301 (click wants the character, not the letters)
    with _clear_errors("paths"):
        from pathspace.experiments.path_summary import run_paths

        sizes = None
        if shape is not None:
            numbers = numbers_in(shape, "--input", "28,28") or []
            if any(n < 1 or n != int(n) for n in numbers):
                raise ConfigurationError(
                    f"The option --input is {shape!r}: give whole numbers, such as 28,28."
                )
            sizes = [int(n) for n in numbers]
        run_paths(model, sizes, rule=rule, limit=limit, seed=seed, picture=picture, as_json=as_json)


@app.command(
    "sequence",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def sequence(context: typer.Context) -> None:
    """Model, generate and compress symbolic sequences."""
    # Handed on as a whole: its imports are too heavy to pay for in every other command.
    with _clear_errors("sequence", extra="sequences"):
        import_module("pathspace.sequences.cli").app(args=context.args, prog_name="pathspace sequence")


@contextmanager
def _clear_errors(command: str, *, extra: str = "experiments") -> Iterator[list[Path]]:
    """Turn the errors that a user can mend into one sentence and an exit code; wants the folder in use told."""
    folders: list[Path] = []
    try:
        if command != "train":
            expect_one(command)
        yield folders
    except LostProcessError as error:
        typer.echo(f"Error: {error}{_continuation(command, folders, 'Continue')}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except ConfigurationError as error:
        kept = "Finished runs are kept; then continue" if isinstance(error, StorageError) else ""
        if is_first():
            typer.echo(f"Error: {error}{kept and _continuation(command, folders, kept)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pathspace"):
            raise
        extra = EXTRAS.get(error.name or "", extra)
        typer.echo(
            f"Error: the package {error.name!r} is missing: pip install 'pathspace[{extra}]'", err=True
        )
        raise typer.Exit(WRONG_USE) from None
    except KeyboardInterrupt:
        if is_first():
            typer.echo(f"Stopped.{_continuation(command, folders, 'Continue')}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _expect_survivors(comparisons: Iterable[Comparison]) -> None:
    """End the command if no run came through; a recipe without comparisons has told itself what it saw."""
    runs = [run for comparison in comparisons for row in comparison.rows for run in row.runs]
    if not runs or any(run.lost_at is None for run in runs):
        return
    rates = sorted({run.config.learning_rate for run in runs})
    shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    typer.echo(
        f"Error: Every run was lost, at rates of {shown}: its loss or a step was not finite, or it ended no better "
        "than it began. Give lower --learning-rates, or a bound: --set clip_norm=1.",
        err=True,
    )
    raise typer.Exit(DIVERGED)


def _say_lost(run: RunResult) -> None:
    """Say where a run was lost, and what to try; ends the command."""
    config = run.config
    bound = (
        "--clip-step 1 bounds the length of a step on balanced weights"
        if method(config.method).clips_steps
        else "--set clip_norm=1 bounds the gradient"
    )
    what = (
        f"The loss or the step was not finite after {run.diverged_at} steps, where the run ended"
        if run.diverged_at is not None
        else f"The run ended no better than it began: its loss rose above ten times the first one at step {run.lost_at}"
    )
    typer.echo(
        f"Error: {what}: give a lower --lr than {config.learning_rate:g}, or a bound: {bound}.", err=True
    )
    raise typer.Exit(DIVERGED)


def _continuation(command: str, folders: list[Path], opening: str) -> str:
    """The command that goes on with what is in the folder in use; empty if there is none."""
    count = started_by_torchrun()
    program = "pathspace" if count == 1 else f"torchrun --nproc-per-node {count} -m pathspace"
    return "".join(f" {opening} with: {program} {command} --resume --output {folder}" for folder in folders)


def _options(assignments: list[str] | None, **named: Any) -> dict[str, Any]:
    from pathspace.experiments.commands import parse_settings
    from pathspace.experiments.settings import check_setting

    for name, value in named.items():
        if value is not None:
            check_setting(name, value, f"--{name.replace('_', '-')}")
    return {**parse_settings(assignments or []), **{name: v for name, v in named.items() if v is not None}}


def _surroundings(
    name: str,
    output: Path | None,
    data_dir: Path | None,
    resume: bool,
    fresh: bool,
    workers: int | None,
    threads: int | None,
    as_json: bool,
    device: str,
    quiet: bool,
    engine: str = "local",
    address: str = "",
) -> Any:
    from pathspace.experiments.commands import Surroundings
    from pathspace.experiments.engines import check_engine

    check_engine(engine, address)

    if workers is not None and workers < 1:
        raise ConfigurationError(f"The option --workers is {workers}: give a whole number from 1 on.")
    if workers is None and not address:
        workers = max(1, min(2, (os.cpu_count() or 1) // max(1, threads or 1)))
    default = Path("runs") / name
    if engine == "ray":  # whose processes work in other folders
        output, data_dir = (path and path.absolute() for path in (output, data_dir))
        default = default.absolute()
    return Surroundings(
        output,
        default,
        data_dir,
        resume,
        fresh,
        workers,
        as_json,
        device,
        quiet,
        engine=engine,
        address=address,
    )


def _list_recipes() -> None:
    from pathspace.experiments.listing import listing

    typer.echo("\n".join(listing(shutil.get_terminal_size((100, 24)).columns)))


if __name__ == "__main__":
    sys.exit(main())
