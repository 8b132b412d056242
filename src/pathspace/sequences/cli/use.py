"""Commands that use a model file: sample, bits, predict, compress, decompress."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pathspace.sequences.cli.console import errors, say, symbols_shown
from pathspace.sequences.cli.files import (
    STANDARD_INPUT,
    After,
    AsJson,
    Force,
    InputPath,
    ModelPath,
    Quiet,
    argument_for,
    mask_after,
    may_overwrite,
    read_for,
    standard_input,
    standard_output,
    writable,
    write,
)
from pathspace.sequences.compression import MAX_BYTES
from pathspace.sequences.compression import compress as compress_bytes
from pathspace.sequences.compression import decompress as decompress_bytes
from pathspace.sequences.estimators import load
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.tokens import joined

_LENGTH = 200
"""Symbols of a sample."""

_LONGEST = 100_000
"""Most symbols of a sample of whole lines."""


def sample(
    model: ModelPath,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Symbols to draw, with --lines at most; default {_LENGTH}, with --lines {_LONGEST:,}.",
            min=0,
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(help="Stop after so many ends of lines, the prompt's apart.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)] = 0,
    prompt: Annotated[str, typer.Option(help="Text to read first.")] = "",
    temperature: Annotated[
        float,
        typer.Option(help="1: the model's probabilities; below 1 likely symbols become likelier."),
    ] = 1.0,
) -> None:
    """Write text drawn from the model to the standard output.

    \b
    Examples:
      pathspace sequence sample log.safetensors --length 500
      pathspace sequence sample log.safetensors --lines 5
      pathspace sequence sample log.safetensors --prompt "GET /" --temperature 0.8
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        estimator = load(model)
        read = argument_for(estimator, prompt)

        def draw(count: int) -> bytes:
            drawn = estimator.sample(count, seed, prompt=read, temperature=temperature)
            if isinstance(drawn, list):
                drawn = joined(drawn, True)
            # half a surrogate pair, which is no UTF-8, is written as its code
            return drawn.encode(errors="backslashreplace") if isinstance(drawn, str) else drawn

        if lines is None:
            drawn = draw(_LENGTH if length is None else length)
        else:
            drawn = _whole_lines(draw, lines, _LONGEST if length is None else length)
    stream = typer.get_binary_stream("stdout")
    stream.write(drawn)
    # without it the shell goes on in the same line
    if stream.isatty() and not drawn.endswith(b"\n"):
        stream.write(b"\n")
    stream.flush()


def _whole_lines(draw: Callable[[int], bytes], lines: int, longest: int) -> bytes:
    """Draw text until so many lines have ended, or all of ``longest`` symbols.

    A longer draw begins as a shorter one does, because the seed is the same.
    """
    length = min(lines * _LENGTH, longest)
    drawn = draw(length)
    while drawn.count(b"\n") < lines and length < longest:
        length = min(2 * length, longest)
        drawn = draw(length)
    parts = drawn.split(b"\n", lines)
    if len(parts) <= lines:
        return drawn
    return b"\n".join(parts[:lines]) + b"\n"


def bits(model: ModelPath, file: InputPath, after: After = None, as_json: AsJson = False) -> None:
    """Score a file: its code length under the model.

    \b
    Examples:
      pathspace sequence bits log.safetensors other.txt
      pathspace sequence bits xor.safetensors xor.txt --after =
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        estimator = load(model)
        text = read_for(estimator, file)
        mask = mask_after(text, after, file)
        total = estimator.bits(text, mask)
        unknown = ~estimator.alphabet_.numbers(text)[1]
    counted = len(text) if mask is None else int(mask.sum())
    foreign = int(unknown.sum() if mask is None else unknown[mask].sum())
    total = max(0.0, total)
    figures = {
        "bits": total,
        "bits_per_symbol": total / counted,
        "symbols": counted,
        "unknown_symbols": foreign,
    }
    told = (
        f", {foreign} of them unknown to the model (fit --alphabet FILE knows them)"
        if foreign
        else ""
    )
    say(
        as_json,
        figures,
        f"{total:.3f} bits, {total / counted:.5f} bits/symbol, {counted} symbols{told}",
    )


def predict(
    model: ModelPath,
    context: Annotated[str, typer.Argument(help="What has been read.")] = "",
    top: Annotated[int, typer.Option(help="Symbols to show.", min=1)] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the most probable next symbols.

    In JSON a byte that is no character stands as its code, such as \\xff, a tuple as a list, and
    infinity as inf.

    \b
    Examples:
      pathspace sequence predict log.safetensors "GET /" --top 5
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        estimator = load(model)
        prediction = estimator.predict(argument_for(estimator, context))
    best = sorted(prediction.items(), key=lambda entry: -entry[1])[:top]
    are_bytes = isinstance(estimator.alphabet_.symbols, bytes)
    symbols = [bytes([symbol]) if are_bytes else symbol for symbol, _ in best]
    shown = [repr(symbol)[1:] if are_bytes else repr(symbol) for symbol in symbols]
    named = [_json_symbol(symbol) for symbol in symbols]
    figures = {
        "context": context,
        "next": [[name, p] for name, (_, p) in zip(named, best, strict=True)],
    }
    say(as_json, figures, *(f"{p:.6f} {name}" for (_, p), name in zip(best, shown, strict=True)))


def _json_symbol(symbol: Any) -> Any:
    """Return a symbol as JSON can hold it: text for bytes and for infinity, lists for tuples."""
    if isinstance(symbol, bytes):
        return symbol.decode("utf-8", "backslashreplace")
    if isinstance(symbol, tuple):
        return [_json_symbol(part) for part in symbol]
    if isinstance(symbol, float) and not math.isfinite(symbol):
        return str(symbol)
    return symbol


def compress(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|FILE", help="Model file written by `fit`; without one, the file to read."
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to read; -: standard input.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Default: FILE.psq; -: standard output.",
            callback=standard_output,
        ),
    ] = None,
    records: Annotated[
        bool,
        typer.Option(
            "--records",
            help="Compress each line by itself: the model can read any line without the others.",
        ),
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compress a file by arithmetic coding, with or without a model.

    Without a model the coder learns from the file itself as it goes, and decompress needs no model
    either. Asks before it overwrites a file; in a script, where nobody can answer, give --force.

    \b
    Examples:
      pathspace sequence compress other.txt
      pathspace sequence compress log.safetensors other.txt
      pathspace sequence compress log.safetensors other.txt --records -o other.records
      cat other.txt | pathspace sequence compress - -o - > other.psq
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        model, file = _model_and_file(first, second)
        if output is None and file == STANDARD_INPUT:
            raise ValueError(
                "compressed standard input has no name of its own: give --output, - for standard output"
            )
        output = output or file.with_name(file.name + ".psq")
        if records and model is None:
            raise ValueError(
                "--records needs a model that the lines share: compress MODEL FILE --records"
            )
        writable(output, model, file)
        may_overwrite(output, force)
        estimator = None if model is None else load(model)
        data = file.read_bytes()
        with symbols_shown("compress", quiet, not isinstance(estimator, SequenceModel)) as progress:
            packed = compress_bytes(estimator, data, progress, by_record=records)
        write(output, packed)
    each = 8 * len(packed) / max(len(data), 1)
    figures = {
        "output": str(output),
        "bytes": len(data),
        "compressed": len(packed),
        "bits_per_byte": each,
    }
    say(
        as_json,
        figures,
        f"{output}: {len(data)} bytes to {len(packed)}, {each:.4f} bits/byte",
        output=output,
    )


def decompress(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|FILE",
            help="The model file that compressed it; without one, the file to read.",
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to read; -: standard input.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Default: FILE without .psq; -: standard output.",
            callback=standard_output,
        ),
    ] = None,
    max_bytes: Annotated[
        int, typer.Option(help="Refuse a file that claims more bytes than this.", min=0)
    ] = MAX_BYTES,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Bring back a compressed file; refuse one that is damaged or belongs to another model.

    Asks before it overwrites a file, as compress does.

    \b
    Examples:
      pathspace sequence decompress other.txt.psq
      pathspace sequence decompress log.safetensors other.txt.psq -o other.txt
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        model, file = _model_and_file(first, second)
        if output is None and file.suffix != ".psq":
            raise ValueError(f"{file} has no ending .psq that could be left out: give --output")
        output = output or file.with_suffix("")
        writable(output, model, file)
        may_overwrite(output, force)
        estimator = None if model is None else load(model)
        packed = file.read_bytes()
        with symbols_shown(
            "decompress", quiet, not isinstance(estimator, SequenceModel)
        ) as progress:
            data = decompress_bytes(estimator, packed, progress, max_bytes)
        write(output, data)
    say(False, {}, f"{output}: {len(data)} bytes", output=output)


def _model_and_file(first: Path, second: Path | None) -> tuple[Path | None, Path]:
    """Return the model file, None if one file alone was given, and the file to read."""
    if second is None:
        return None, standard_input(first)
    if not first.is_file():
        raise typer.BadParameter(f"there is no model file '{first}': write one by `fit`")
    return first, standard_input(second)
