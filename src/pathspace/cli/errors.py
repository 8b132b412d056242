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


def _continuation(command: str, error: BaseException, opening: str) -> str:
    """The command that goes on with what is in the folder in use; empty if there is none."""
    notes = getattr(error, "__notes__", [])
    return f" {opening} with: pathspace {command} --resume {notes[-1]}" if notes else ""
