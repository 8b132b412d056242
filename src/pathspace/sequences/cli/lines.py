"""The command ``pathspace sequence lines``: which lines of a file surprise a model."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pathspace.sequences.cli.console import errors, per_symbol
from pathspace.sequences.cli.files import (
    AsJson,
    InputPath,
    ModelPath,
    argument_for,
    kind_read,
    masks_numbers,
    with_numbers_masked,
)
from pathspace.sequences.estimators import load
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.stream import bits_of_each
from pathspace.sequences.text import Alphabet
from pathspace.sequences.tokens import TokenAlphabet


@dataclass(frozen=True, order=True)
class _Line:
    """A line and its bits; the first entry is what lines are ranked by."""

    surprise: float
    number: int
    bits: float
    symbols: int
    text: str

    def shown(self, as_json: bool) -> str:
        """Return what is printed of it."""
        each = per_symbol(self.bits, self.symbols)
        if not as_json:
            return f"{self.bits:9.2f} {each:8.4f} {self.number:7d}  {self.text}"
        figures = {
            "line": self.number,
            "bits": self.bits,
            "bits_per_symbol": each,
            "text": self.text,
        }
        return json.dumps(figures)


def lines(
    model: ModelPath,
    file: InputPath,
    top: Annotated[
        int | None, typer.Option(help="Show the most surprising lines alone, at the end.", min=1)
    ] = None,
    frozen: Annotated[
        bool,
        typer.Option("--frozen", help="Learn nothing from the lines: each is scored by itself."),
    ] = False,
    each_symbol: Annotated[
        bool,
        typer.Option("--per-symbol", help="Rank by bits per symbol, not by the bits of the line."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score each line of a file: its bits, bits per symbol, number and text.

    A line that the model has not seen the like of takes many bits. They are printed as they are
    read, so that a log may be piped in while it is written; with --top at the end. Without --frozen
    a mixture learns each line once it is scored, and what happens often surprises once. Numbers are
    masked where the model was fitted with --mask-numbers, which finds more than numbers that are
    new. With --json each line is an object of its own.

    \b
    Examples:
      pathspace sequence lines log.safetensors other.txt --top 20 --per-symbol
      tail -f log.txt | pathspace sequence lines log.safetensors - --frozen
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        found = _scored(load(model), file, frozen, each_symbol)
        if top is None:
            for line in found:
                typer.echo(line.shown(as_json))
            return
        for line in heapq.nlargest(top, found):
            typer.echo(line.shown(as_json))


def _scored(
    estimator: SequenceModel | Mixed, file: Path, frozen: bool, each_symbol: bool
) -> Iterator[_Line]:
    place = estimator.frozen() if frozen else estimator.begin(0)
    alphabet = estimator.alphabet_
    masked = masks_numbers(estimator)
    with file.open("rb") as opened:
        # readline returns a line of a pipe as soon as it is there
        for number, content in enumerate(iter(opened.readline, b""), 1):
            if frozen:
                place.restart()
            text = _symbols(estimator, with_numbers_masked(content) if masked else content)
            bits = float(bits_of_each(place, alphabet, text).sum())
            surprise = bits / max(len(text), 1) if each_symbol else bits
            yield _Line(surprise, number, bits, len(text), _without_newline(content))


def _symbols(estimator: SequenceModel | Mixed, content: bytes) -> Any:
    """Return the symbols of a line, with its newline where the model knows one."""
    kind = kind_read(estimator)
    if kind == "bytes":
        return content if _knows_newline(estimator.alphabet_) else content.rstrip(b"\n")
    text = content.decode("utf-8", "replace")
    if kind == "characters" and _knows_newline(estimator.alphabet_):
        return text
    return argument_for(estimator, text.rstrip("\n"))


def _knows_newline(alphabet: Alphabet) -> bool:
    return not isinstance(alphabet, TokenAlphabet) and ord("\n") in alphabet.codes


def _without_newline(content: bytes) -> str:
    return content.decode("utf-8", "backslashreplace").rstrip("\n")
