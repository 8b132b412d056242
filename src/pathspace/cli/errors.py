"""Ends of commands: exit codes, and one sentence for each error that a user can mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.extras import EXTRA_OF, install

DIVERGED, WRONG_USE, BROKEN, INTERRUPTED, TERMINATED = 1, 2, 70, 130, 143


@contextmanager
def clear_errors(command: str, *, extra: str = "experiments") -> Iterator[list[str]]:
    """Turn the errors that a user can mend into one sentence and an exit code.

    Wants to be told the folder in use, as the options by which the command goes on with it.
    """
    folders: list[str] = []
    try:
        _expect_one_process(command)
        yield folders
    except ConfigurationError as error:
        kept = "Finished runs are kept; then continue" if isinstance(error, StorageError) else ""
        typer.echo(f"Error: {error}{kept and _continuation(command, folders, kept)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pathspace"):
            raise
        extra = EXTRA_OF.get(error.name or "", extra)
        typer.echo(f"Error: the package {error.name!r} is missing: {install(extra)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except KeyboardInterrupt:
        typer.echo(f"Stopped.{_continuation(command, folders, 'Continue')}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _expect_one_process(command: str) -> None:
    """Refuse to do the same work in each of the processes that torchrun starts.

    Raises:
        ConfigurationError: torchrun started several.
    """
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if count > 1:
        raise ConfigurationError(
            f"torchrun started {count} processes, and `pathspace {command}` runs in one: start it without torchrun. "
            "docs/trainers.md has a training loop for several processes."
        )


def _continuation(command: str, folders: list[str], opening: str) -> str:
    """The command that goes on with what is in the folder in use; empty if there is none."""
    return "".join(
        f" {opening} with: pathspace {command} --resume {options}" for options in folders
    )
