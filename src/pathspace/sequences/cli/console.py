"""Output of the commands: errors, figures, progress."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from pathspace.sequences.kernels import mixing
from pathspace.sequences.kernels.machine_code import is_compiled
from pathspace.tools.progress import shown

console = Console(stderr=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turn what a user can mend into one line and exit status 2, and a warning into a line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RuntimeWarning)
            warnings.showwarning = _shown_as_a_line
            yield
    except BrokenPipeError:  # nobody reads on, as behind `| head`: the command ends without a word
        raise
    except (ValueError, TypeError, FloatingPointError, OSError) as error:
        said = str(error)
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if isinstance(error, OSError) and error.errno in full and error.filename:
            said = f"{error.filename} cannot be written ({error.strerror}): make room there, or give another --output"
        console.print(f"[red]Error:[/red] {escape(said)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _shown_as_a_line(message: Warning | str, *_: Any) -> None:
    console.print(
        f"[yellow]Warning:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True
    )


def say(as_json: bool, figures: dict[str, Any], *lines: str, output: Path | None = None) -> None:
    """Print the figures as JSON, or the lines; infinite and undefined figures are null in JSON.

    Where the output of the command is standard output itself, they go to standard error: they are
    no part of it.
    """
    told = (json.dumps(_plain(figures), allow_nan=False),) if as_json else lines
    for line in told:
        typer.echo(line, err=output is not None and _is_standard_output(output))


def _is_standard_output(path: Path) -> bool:
    with suppress(OSError):  # there is no such file, or no standard output
        return os.path.samestat(path.stat(), os.fstat(1))
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def per_symbol(bits: float, symbols: int) -> float:
    """Return the bits of one symbol, without the minus sign of a rounded zero."""
    each = bits / max(symbols, 1)
    return 0.0 if abs(each) < 5e-6 else each


@contextmanager
def symbols_shown(
    name: str, quiet: bool, contexts: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Show how far a command is while the block runs; it is told how many symbols of how many are done.

    Args:
        name: what is done.
        quiet: whether nothing is shown.
        contexts: whether contexts are read, whose kernel may have to be compiled first.
    """
    if contexts:
        say_if_compiling(quiet, mixing.run)
    with shown(name, console, quiet=quiet) as show:
        yield lambda done, total: show(done / max(total, 1), f"{done}/{total} symbols")


def say_if_compiling(quiet: bool, function: Any) -> None:
    """Say that a kernel is compiled first, which may take longer than what follows."""
    if not quiet and not is_compiled(function):
        console.print("compiling, once after an installation: up to a minute", highlight=False)
