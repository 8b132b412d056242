"""Files that the commands read and write, and the arguments that name them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from pathspace.sequences.mixed import Mixed
from pathspace.sequences.mixed_storage import load as load_stored
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.storage import ModelFileError
from pathspace.sequences.text import Text, marks_after
from pathspace.sequences.tokens import SPLITTERS, Mode, TokenAlphabet, Tokens, sequences_of
from pathspace.tools.files import check_writable, write_atomically

STANDARD_INPUT = Path("/dev/stdin")
STANDARD_OUTPUT = Path("/dev/stdout")


def standard_input(path: Path) -> Path:
    """Return the path of a file to read, where `-` stands for standard input.

    Raises:
        BadParameter: if there is no such file.
    """
    if str(path) == "-":
        return STANDARD_INPUT
    if not path.exists():
        raise typer.BadParameter(f"file '{path}' does not exist.")
    if path.is_dir():
        raise typer.BadParameter(f"file '{path}' is a directory.")
    return path


def standard_output(path: Path | None) -> Path | None:
    """Return the path of a file to write, where `-` stands for standard output."""
    return STANDARD_OUTPUT if str(path) == "-" else path


ModelPath = Annotated[
    Path, typer.Argument(help="Model file written by `fit`.", exists=True, dir_okay=False)
]
InputPath = Annotated[
    Path,
    typer.Argument(help="File to read; -: standard input.", callback=standard_input),
]
AsText = Annotated[
    bool,
    typer.Option("--text", help="Read UTF-8 characters instead of bytes: --tokens characters."),
]
Kind = Literal["bytes", "characters", "words", "lines"]
"""What a symbol of a file is."""
KINDS: tuple[Kind, ...] = ("bytes", "characters", "words", "lines")
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress, only results and errors.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output without asking.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
After = Annotated[
    str | None,
    typer.Option(
        help="Only the symbols right after this one are to be predicted, as in the xor task."
    ),
]


def kind_of(tokens: str | None, as_text: bool) -> Kind:
    """Return what --tokens and --text say a symbol is; raises ValueError if there is no such kind, or they differ."""
    for kind in KINDS:
        if tokens == kind and not (as_text and kind != "characters"):
            return kind
    if tokens is not None and as_text:
        raise ValueError(f"--text reads characters, and --tokens {tokens}: give one of the two")
    if tokens is not None:
        raise ValueError(f"unknown symbols {tokens!r} in --tokens, choose from {', '.join(KINDS)}")
    return "characters" if as_text else "bytes"


def kind_read(model: SequenceModel | Mixed) -> Kind:
    """Return what a symbol is to a model; lines where it was fitted to a list of tokens."""
    alphabet = model.alphabet_
    if isinstance(alphabet, TokenAlphabet):
        return "words" if alphabet.mode == "words" else "lines"
    return "bytes" if isinstance(alphabet.symbols, bytes) else "characters"


def mode_from(kind: Kind) -> Mode:
    """Return the ``tokens`` of a fit to such symbols."""
    return next((splitter for splitter in SPLITTERS if splitter == kind), False)


def with_numbers_masked(content: bytes) -> bytes:
    """Return a text with a 0 in the place of each number.

    Example:
        >>> with_numbers_masked(b"10:07 from 10.0.0.1")
        b'0:0 from 0.0.0.0'
    """
    return re.sub(rb"[0-9]+", b"0", content)


def masks_numbers(model: SequenceModel | Mixed) -> bool:
    """Return whether a model was fitted to a text whose numbers are masked."""
    network = model.model if isinstance(model, Mixed) else model
    return network is not None and bool(network.told_.get("mask_numbers"))


def read(path: Path, kind: Kind, mask_numbers: bool = False) -> Any:
    """Return the symbols of a file; raises ValueError if there are none or it is not UTF-8, as all but bytes are."""
    content = path.read_bytes()
    if mask_numbers:
        content = with_numbers_masked(content)
    if not content:
        raise ValueError(f"the file {path} is empty: it has no symbol to learn or to score")
    if kind == "bytes":
        return content
    try:
        return sequences_of(content.decode("utf-8"), mode_from(kind)).parts[0]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {content[error.start]:#x} at position {error.start}; learn bytes, by fit "
            "without --text and --tokens, or convert it: iconv -f latin1 -t utf-8"
        ) from error


def read_for(model: SequenceModel | Mixed, path: Path) -> Any:
    """Read a file as the model read its training text; a list of tokens as lines, one token on each."""
    return _named(model, read(path, kind_read(model), masks_numbers(model)))


def argument_for(model: SequenceModel | Mixed, said: str) -> Any:
    """Return an argument of the command line in the symbols of a model."""
    kind = kind_read(model)
    if kind == "bytes":
        return os.fsencode(said)
    return _named(model, sequences_of(said, mode_from(kind)).parts[0])


def _named(model: SequenceModel | Mixed, text: Any) -> Any:
    """Return tokens for their names, which the lines of a file are."""
    alphabet = model.alphabet_
    if not isinstance(alphabet, TokenAlphabet) or alphabet.mode is not True:
        return text
    named = {str(symbol): symbol for symbol in alphabet.symbols}
    return Tokens(named.get(line, line) for line in text)


def writable(path: Path, *used: Path | None) -> Path:
    """Return the path if a file can be written there; asked before the work, not after hours of it.

    Args:
        path: where.
        used: files that the command reads, none of which may be lost.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --output a file name")
    if path.is_file() and any(one.samefile(path) for one in used if one is not None):
        raise ValueError(
            f"the output file {path} is one that this command reads: give another --output"
        )
    try:
        check_writable(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"the folder {error.filename} of the output file does not exist: make it first"
        ) from error
    except OSError as error:
        raise ValueError(
            f"the output file {path} cannot be written ({error.strerror}: {error.filename}): give another --output"
        ) from error
    return path


def may_overwrite(path: Path, force: bool) -> None:
    """Ask before a file is overwritten; where nobody can answer, refuse."""
    if force or not _holds_something(path):
        return
    if not _somebody_answers():
        raise ValueError(
            f"the output file {path} exists: give another --output, or --force to overwrite it"
        )
    try:
        agreed = typer.confirm(f"{path} exists. Overwrite it?", err=True)
    except typer.Abort as error:  # Ctrl-C, or the end of the input
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        agreed = False
    if not agreed:
        raise ValueError(f"nothing is written: {path} stays as it is")


def may_become_model(path: Path) -> None:
    """Refuse a file that holds anything but a model, which the next fit may replace."""
    if not _holds_something(path):
        return
    try:
        load_stored(path)
    except ModelFileError as error:
        raise ValueError(
            f"the output file {path} holds no model that could be read, and would be lost: give another --output, or "
            "remove it"
        ) from error


def _holds_something(path: Path) -> bool:
    """Say whether there is anything to lose: not on devices, in pipes and where a shell has just made the file."""
    return path.is_file() and path.stat().st_size > 0


def _somebody_answers() -> bool:
    return sys.stdin.isatty()


def write(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent; devices and pipes are written to as they are."""
    write_atomically(path, lambda file: file.write(content))


def mask_after(text: Text | Tokens, after: str | None, path: Path) -> np.ndarray | None:
    """Mark the symbols of a file that come right after one symbol; None if none is named, ValueError if none comes."""
    if after is None:
        return None
    if isinstance(text, Tokens):
        mask = np.array([False, *(str(token) == after for token in text[:-1])])
    else:
        mark = after if isinstance(text, str) else os.fsencode(after)  # any byte, of UTF-8 or not
        if len(mark) != 1:
            raise ValueError(f"--after takes one symbol, got {after!r}")
        mask = marks_after(text, mark)
    if not mask.any():
        raise ValueError(f"no symbol of {path} comes right after {after!r}, which --after names")
    return mask
