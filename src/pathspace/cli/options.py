"""Options of the command line, each declared once, and what their values are read as."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pathspace.experiments.devices import DEVICES
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import list_methods
from pathspace.experiments.runner import ENGINES
from pathspace.experiments.tasks import OWN, TASKS
from pathspace.extras import install

LARGEST_SEED = 2**32 - 1
_BY_TASK = "default by task or recipe"

TaskOption = Annotated[
    str | None, typer.Option("--task", help=f"{', '.join(t for t in TASKS if t != OWN)}; default digits.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A first table in half a minute: one seed, three rates, few passes.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Folder for runs and report; default runs/NAME, or runs/NAME-2 and so on beside others.",
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Folder with the data sets (MNIST in `mnist`); default the environment variable PATHSPACE_DATA.",
    ),
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", help=f"Passes over the training split; {_BY_TASK}.")
]
BatchOption = Annotated[int | None, typer.Option("--batch-size", help=f"Sequences per step; {_BY_TASK}.")]
SeedsOption = Annotated[
    int | None,
    typer.Option("--seeds", help=f"Runs per row of the table, or per point of a sweep; {_BY_TASK}."),
]
MethodsOption = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help="Names separated by commas, of those that `pathspace compare --list` shows; default SGD, AdamW and "
        "Muon, each on the weights and in the path metric, or what the recipe has.",
    ),
]
RatesOption = Annotated[
    str | None,
    typer.Option(
        "--learning-rates",
        help="The grid, separated by commas, of all methods but those with a grid of their own (the setting "
        f"method_rates); {_BY_TASK}.",
    ),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Threads of each run; default 1.")]
PlainOption = Annotated[
    bool | None,
    typer.Option("--plain-rnn", help="Run ReLU recurrent layers as torch.nn.RNN, not in compiled loops."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="Runs at a time; default 2, or 1 where there are too few cores; with --engine ray all processors.",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option("--engine", help=f"What does the runs: {', '.join(ENGINES)} ({install('ray')})."),
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        help="Address of a Ray cluster, such as auto or 10.0.0.1:6379; without it, Ray is started here.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help=f"Where runs compute: {', '.join(DEVICES)} (a GPU where there is one); may change when resuming.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other setting: NAME=VALUE or TABLE.NAME=VALUE, as in a recipe; a wrong NAME lists all. "
        "Repeatable.",
    ),
]
ClipStepOption = Annotated[
    float | None,
    typer.Option(
        "--clip-step",
        help="Bound of Path-SGD and DDP-SGD on the length of a step, before the learning rate and measured on "
        "balanced weights; default none.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Continue what was stopped in the --output folder, or in the last one."),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start over, whatever the folder holds.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress, only results and errors.")
]


def _print_methods(wanted: bool) -> None:
    if wanted:
        typer.echo(list_methods())
        raise typer.Exit


ListMethodsOption = Annotated[
    bool,
    typer.Option(
        "--list", callback=_print_methods, is_eager=True, help="List the methods, and do nothing else."
    ),
]


def names_in(text: str | None, where: str) -> list[str] | None:
    """Split names at commas; None stands for an option that was not given.

    Raises:
        ConfigurationError: There is not a single one.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"The option {where} is empty: give at least one name.")
    return names


def numbers_in(text: str | None, where: str, example: str = "0.03,0.1,0.3") -> list[float] | None:
    """Read numbers between commas; None stands for an option that was not given.

    Raises:
        ConfigurationError: Something between commas is no number.
    """
    try:
        return None if text is None else [float(part) for part in names_in(text, where) or []]
    except ValueError:
        raise ConfigurationError(
            f"The option {where} is {text!r}: give numbers separated by commas, such as {example}."
        ) from None
