"""Options of the command line, each declared once, groups of them, and the ends of commands.

A group is a dataclass for options that several commands take together: the command line sees its
fields. A command ends with an exit code, and one sentence for each error that a user can mend.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from pathspace.experiments.context import option
from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.methods import list_methods
from pathspace.experiments.tasks import OWN, TASKS
from pathspace.extras import EXTRA_OF, install

LARGEST_SEED = 2**32 - 1
_BY_TASK = "default by task or recipe"
_BY_NAME = Parameter.KEYWORD_ONLY


def task_option() -> Any:
    """Return the field of the option --task."""
    return option(f"{', '.join(task for task in TASKS if task != OWN)}; default digits.")


def argument(help: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a dataclass that is an argument of the command line."""
    return field(default=default, metadata={"given": typer.Argument(help=help, **more)})


def _print_methods(wanted: bool) -> None:
    if wanted:
        typer.echo(list_methods())
        raise typer.Exit


@dataclass(frozen=True)
class ListOption:
    """The option that lists the methods instead of training by them."""

    listed: bool = option(
        "List the methods, and do nothing else.",
        "--list",
        default=False,
        callback=_print_methods,
        is_eager=True,
    )


def names_in(text: str | None, where: str) -> list[str] | None:
    """Split names at commas; None stands for an option that was not given."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"The option {where} is empty: give at least one name.")
    return names


def numbers_in(text: str | None, where: str, example: str = "0.03,0.1,0.3") -> list[float] | None:
    """Read numbers between commas; None stands for an option that was not given."""
    try:
        return None if text is None else [float(part) for part in names_in(text, where) or []]
    except ValueError:
        raise ConfigurationError(
            f"The option {where} is {text!r}: give numbers separated by commas, such as {example}."
        ) from None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclasses as parameters of their own, for typer to read.

    Each parameter of the command is a dataclass, and stands for one parameter for each field, with
    its name, type and default.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = [parameter.annotation for parameter in signature.parameters.values()]
    flat = []
    for group in groups:
        types = get_type_hints(group)
        for each in fields(group):
            hint = Annotated[types[each.name], each.metadata["given"]]
            flat.append(Parameter(each.name, _BY_NAME, default=each.default, annotation=hint))

    def flattened(**values: Any) -> None:
        command(*(group(**{f.name: values[f.name] for f in fields(group)}) for group in groups))

    flattened.__name__, flattened.__doc__ = command.__name__, command.__doc__
    flattened.__annotations__ = {p.name: p.annotation for p in flat}
    flattened.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return flattened


@dataclass(frozen=True)
class SettingOptions:
    """Options of training."""

    epochs: int | None = option(f"Passes over the training split; {_BY_TASK}.")
    batch_size: int | None = option(f"Sequences per step; {_BY_TASK}.")
    clip_step: float | None = option(
        "Largest step of Path-SGD and DDP-SGD: its length on balanced weights, before the learning rate; default none."
    )
    settings: list[str] | None = option(
        "Any other setting: NAME=VALUE or TABLE.NAME=VALUE, as in a recipe. A wrong NAME lists all names. Repeatable.",
        "--set",
    )
    threads: int | None = option("Threads of each run; default 1.")
    plain_rnn: bool | None = option(
        "Run ReLU recurrent layers as torch.nn.RNN, not in compiled loops.", "--plain-rnn"
    )

    def _by_name(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def chosen(self, **more: Any) -> dict[str, Any]:
        """Return the settings that were given, with more of them by name; None stands for one that was not."""
        from pathspace.experiments.layers import check_setting, parse_settings
        from pathspace.experiments.settings import Settings

        named = more | self._by_name()
        given = {name: value for name, value in named.items() if value is not None}
        for name, value in given.items():
            check_setting(Settings, name, value, f"--{name.replace('_', '-')}")
        by_set = parse_settings(self.settings or [])
        if twice := sorted(given.keys() & by_set.keys()):
            name = twice[0].replace("_", "-")
            raise ConfigurationError(
                f"{twice[0]!r} is given by --{name} and by --set: leave one of them out."
            )
        return {**by_set, **given}


@dataclass(frozen=True)
class TableOptions(SettingOptions):
    """Options of training by several methods."""

    methods: str | None = option(
        "Names separated by commas, of those that `pathspace compare --list` shows; default SGD, AdamW and Muon, each "
        "on the weights and in the path metric, or what the recipe has."
    )
    seeds: int | None = option(f"Runs per row of the table, or per point of a sweep; {_BY_TASK}.")
    learning_rates: str | None = option(
        "Grid of learning rates, separated by commas, for all methods without a grid of their own (setting "
        f"method_rates); {_BY_TASK}."
    )

    def _by_name(self) -> dict[str, Any]:
        return super()._by_name() | {
            "methods": names_in(self.methods, "--methods"),
            "learning_rates": numbers_in(self.learning_rates, "--learning-rates"),
        }


DIVERGED, WRONG_USE, BROKEN, INTERRUPTED, TERMINATED = 1, 2, 70, 130, 143


@contextmanager
def clear_errors(command: str, *, extra: str = "experiments") -> Iterator[None]:
    """Turn the errors that a user can mend into one sentence and an exit code.

    The last note of an error says by which options the command goes on, see `configuration.begun`.
    """
    try:
        _expect_one_process(command)
        yield
    except ConfigurationError as error:
        kept = "Finished runs are kept; then continue" if isinstance(error, StorageError) else ""
        typer.echo(f"Error: {error}{kept and _continuation(command, error, kept)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pathspace"):
            raise
        extra = EXTRA_OF.get(error.name or "", extra)
        typer.echo(f"Error: the package {error.name!r} is missing: {install(extra)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except KeyboardInterrupt as stop:
        typer.echo(f"Stopped.{_continuation(command, stop, 'Continue')}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _expect_one_process(command: str) -> None:
    """Refuse to do the same work in each of the processes that torchrun starts."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if count > 1:
        raise ConfigurationError(
            f"torchrun started {count} processes, and `pathspace {command}` runs in one: start it without torchrun. "
            "docs/trainers.md has a training loop for several processes."
        )


def _continuation(command: str, error: BaseException, opening: str) -> str:
    """The command that goes on with what is in the folder in use; empty if there is none."""
    notes = getattr(error, "__notes__", [])
    return f" {opening} with: pathspace {command} --resume {notes[-1]}" if notes else ""
