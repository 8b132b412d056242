"""How commands end: errors that a user can mend, in one sentence, and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pathspace.experiments.errors import ConfigurationError, LostProcessError, StorageError
from pathspace.experiments.processes import expect_one, is_first, started_by_torchrun
from pathspace.extras import EXTRA_OF, install

DIVERGED, WRONG_USE, BROKEN, INTERRUPTED, TERMINATED = 1, 2, 70, 130, 143


@contextmanager
def clear_errors(command: str, *, extra: str = "experiments") -> Iterator[list[str]]:
    """Turn the errors that a user can mend into one sentence and an exit code.

    Wants to be told the folder in use, as the options by which the command goes on with it.
    """
    folders: list[str] = []
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
        extra = EXTRA_OF.get(error.name or "", extra)
        typer.echo(f"Error: the package {error.name!r} is missing: {install(extra)}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except KeyboardInterrupt:
        if is_first():
            typer.echo(f"Stopped.{_continuation(command, folders, 'Continue')}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _continuation(command: str, folders: list[str], opening: str) -> str:
    """The command that goes on with what is in the folder in use; empty if there is none."""
    count = started_by_torchrun()
    program = "pathspace" if count == 1 else f"torchrun --nproc-per-node {count} -m pathspace"
    return "".join(f" {opening} with: {program} {command} --resume {options}" for options in folders)
