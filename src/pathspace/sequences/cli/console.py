"""What the commands say: errors, figures, progress."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turn what a user can mend into one line and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, FloatingPointError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def say(as_json: bool, figures: dict[str, Any], *lines: str) -> None:
    """Print the figures as JSON, or the lines; infinite and undefined figures are null in JSON."""
    if not as_json:
        for line in lines:
            typer.echo(line)
        return
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
    typer.echo(json.dumps(plain, allow_nan=False))


def per_symbol(bits: float, symbols: int) -> float:
    """Return the bits of one symbol, without the minus sign of a rounded zero."""
    each = bits / max(symbols, 1)
    return 0.0 if abs(each) < 5e-6 else each


def progress_bar() -> Progress:
    """Return a bar on the standard error, with what the task calls its state and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def symbols_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs; it is told how many symbols of how many are done."""
    with progress_bar() as bar:
        task = bar.add_task(name, total=None, state="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, state=f"{done}/{total} symbols"
        )
