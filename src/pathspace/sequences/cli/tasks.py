"""Commands of the synthetic tasks and of what networks are measured against: generate-task, baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pathspace.sequences import baselines
from pathspace.sequences.cli.console import errors, per_symbol, say
from pathspace.sequences.cli.files import (
    AsJson,
    Force,
    may_overwrite,
    read,
    standard_output,
    writable,
    write,
)
from pathspace.sequences.tasks import TASKS
from pathspace.sequences.text import Alphabet


def generate_task(
    task: Annotated[str, typer.Argument(help="alphabet, alphabet-9, music, xor or anbn.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write; -: standard output.", callback=standard_output
        ),
    ],
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic text of the paper's size and print its true code length.

    Asks before it overwrites a file, as compress does.

    \b
    Examples:
      pathspace sequence generate-task xor -o xor.txt
      pathspace sequence generate-task music -o music.txt --seed 1
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}, choose from {', '.join(sorted(TASKS))}")
        writable(output)
        may_overwrite(output, force)
        text = TASKS[task].generate(np.random.default_rng(seed))
        write(output, text.encode())
        length = TASKS[task].true_bits(text)
    different = len(set(text))
    part = " for the symbols that others determine" if TASKS[task].mask else ""
    figures = {
        "output": str(output), "symbols": len(text), "different": different, "true_code_length_bits": length
    }  # fmt: skip
    say(
        as_json,
        figures,
        f"{output}: {len(text)} symbols, {different} different, true code length {length:.4f} bits{part}",
        output=output,
    )


def baseline(
    training: Annotated[
        Path, typer.Argument(help="File to learn from.", exists=True, dir_okay=False)
    ],
    file: Annotated[Path, typer.Argument(help="File to score.", exists=True, dir_okay=False)],
    depth: Annotated[
        int, typer.Option(help="Longest context of the context trees.", min=0, max=1000)
    ] = 8,
    states: Annotated[int, typer.Option(help="Hidden states of the HMMs; 0: no HMM.", min=0)] = 0,
    iterations: Annotated[int, typer.Option(help="Iterations of the HMMs.", min=1)] = 100,
    task: Annotated[
        str | None,
        typer.Option(help="Name of a synthetic task, whose true code length is subtracted."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a file by bzip2, xz, context tree weighting and two hidden Markov models, after a training file.

    Where a file is so short that what a compressor makes of both is no longer than of the first
    alone, that row is left out.

    \b
    Examples:
      pathspace sequence baseline log.txt other.txt
      pathspace sequence baseline log.txt other.txt --depth 4 --states 8
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        seen = read(training, "bytes")
        text = read(file, "bytes")
        assert isinstance(seen, bytes)
        assert isinstance(text, bytes)
        true = 0.0 if task is None else _true_bits(task, file, text)  # baselines may take minutes
        alphabet = Alphabet.of([seen, text])
        x = alphabet.encode(text)
        before = alphabet.encode(seen)
        rows: dict[str, float] = {}
        for name in baselines.COMPRESSORS:
            rows[name] = baselines.compressed_bits(name, text)
            after = baselines.compressed_bits(name, text, seen)
            if after > 0:  # files of whole blocks may get no longer, or shorter, by a few symbols
                rows[f"{name} after training"] = after
        rows["context trees after training"] = baselines.context_tree_bits(
            x, len(alphabet), depth, before
        )
        if states:
            dense = baselines.HiddenMarkov(states, iterations).fit(before, len(alphabet))
            rows[f"HMM of {states} states"] = dense.bits(x)
            sparse = baselines.SparseHiddenMarkov(states, iterations=iterations).fit(
                before, len(alphabet)
            )
            rows[f"sparse HMM of {states} states"] = sparse.bits(x)
    if as_json:
        figures = {
            "task": task,
            "symbols": len(text),
            "bits": {name: v - true for name, v in rows.items()},
        }
        say(True, figures)
        return
    table = Table(
        "baseline", "bits" if task is None else "bits beyond the true code length", "bits/symbol"
    )
    for name, value in rows.items():
        table.add_row(
            name, f"{round(value - true, 1) + 0.0:.1f}", f"{per_symbol(value, len(text)):.4f}"
        )
    Console().print(table)


def _true_bits(task: str, file: Path, text: bytes) -> float:
    """Return the true code length of a text of a synthetic task; raises ValueError if it is none."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r} in --task, choose from {', '.join(sorted(TASKS))}")
    if TASKS[task].mask:
        raise ValueError(
            f"the true code length of the task {task} is that of a few of its symbols, and baselines score all: leave "
            "--task out"
        )
    try:
        return TASKS[task].true_bits(text.decode())
    except ValueError as error:
        raise ValueError(f"{file} is no text of the task {task}: {error}") from error
