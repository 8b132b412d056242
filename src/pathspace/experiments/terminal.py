"""Consoles for standard output that also write where it has no sign but ASCII's, or Latin-1's."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

PLAIN = str.maketrans({"±": "+/-", "\N{EN DASH}": "-", "✓": "ok", "✗": "broken"})


class PlainConsole(Console):
    """A console that says in ASCII what its stream cannot encode, before columns get their widths."""

    def render_str(self, text: str, **options: Any) -> Text:
        """See ``rich.console.Console``."""
        return super().render_str(encodable(text, self.encoding), **options)


def output_console(width: int = 120) -> PlainConsole:
    """Return a console on standard output.

    Args:
        width: Columns of a pipe or a log, which have no width of their own; eighty would break
            names and sentences.
    """
    return PlainConsole(width=None if sys.stdout and sys.stdout.isatty() else width)


def print_line(console: Console, line: str) -> None:
    """Print a line as it is, for a terminal to wrap."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(values: Any) -> None:
    """Print plain values as JSON on standard output."""
    print(json.dumps(values, indent=2, allow_nan=False))


def encodable(text: str, encoding: str) -> str:
    """Return `text`, or where `encoding` has no place for all of it, what says the same."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text
