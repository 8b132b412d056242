"""The command ``pathspace sequence``: models of text and byte files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import baselines
from .compression import compress as compress_bytes
from .compression import decompress as decompress_bytes
from .estimators import CNN, PCNN, RNN, SequenceModel, load
from .storage import write_atomically
from .tasks import TASKS
from .text import Alphabet, Text
from .training import Training

app = typer.Typer(
    help="Learn, sample, score and compress symbol sequences.", no_args_is_help=True, add_completion=False
)
_console = Console(stderr=True)

_MODELS: dict[str, type[SequenceModel]] = {"pcnn": PCNN, "cnn": CNN, "rnn": RNN}

ModelPath = Annotated[Path, typer.Argument(help="Model file written by `fit`.", exists=True, dir_okay=False)]
InputPath = Annotated[Path, typer.Argument(help="File to read.", exists=True, dir_okay=False)]
AsText = Annotated[bool, typer.Option("--text", help="Read UTF-8 characters instead of bytes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
After = Annotated[
    str | None,
    typer.Option(help="Only the symbols right after this one are to be predicted, as in the xor task."),
]


@contextmanager
def _errors() -> Iterator[None]:
    """Turn what a user can mend into one line and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, FloatingPointError, OSError) as error:
        _console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _read(path: Path, as_text: bool) -> Text:
    content = path.read_bytes()
    if not content:
        raise ValueError(f"the file {path} is empty: it has no symbol to learn or to score")
    if not as_text:
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _writable(path: Path) -> Path:
    """Return the path if a file can be written there; asked before the work, not after hours of it."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --output a file name")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} of the output file does not exist: make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"the folder {path.parent} of the output file cannot be written to")
    return path


def _say(as_json: bool, figures: dict[str, Any], *lines: str) -> None:
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


def _read_for(model: SequenceModel, path: Path) -> Text:
    return _read(path, isinstance(model.alphabet_.symbols, str))


def _mask(text: Text, after: str | None) -> np.ndarray | None:
    if after is None:
        return None
    mark = after if isinstance(text, str) else after.encode()
    if len(mark) != 1:
        raise ValueError(f"--after takes one symbol, got {after!r}")
    code = mark if isinstance(mark, str) else mark[0]
    return np.array([False] + [symbol == code for symbol in text[:-1]])


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=_console,
    )


class _FitReport:
    """The progress bar of a fit."""

    def __init__(self, bar: Progress, passes: int, seconds: float | None, symbols: int, held: int) -> None:
        self._bar, self._passes, self._seconds = bar, passes, seconds
        self._symbols, self._held = symbols, held
        self._task = bar.add_task("fit", total=1.0, state="")
        self._number = 1
        self.last: Training | None = None

    def __call__(self, training: Training) -> None:
        if self.last is not None and training.passes <= self.last.passes:
            self._number += 1
        self.last = training
        done = training.passes / max(self._passes, 1)
        if self._seconds is not None:
            done = max(done, training.seconds / self._seconds)
        shown = f"network {self._number}  " if self._number > 1 else ""
        shown += f"pass {training.passes}  {_each(-training.log_likelihood / math.log(2), self._symbols):.4f}"
        if self._held:
            shown += f" train {_each(training.validation_bits, self._held):.4f} valid"
        shown += f" bits/symbol  rates {training.rate_w:.2g} {training.rate_tau:.2g}"
        self._bar.update(self._task, completed=min(done, 1.0), state=shown)


def _each(bits: float, symbols: int) -> float:
    """Return the bits of one symbol, without the minus sign of a rounded zero."""
    each = bits / max(symbols, 1)
    return 0.0 if abs(each) < 5e-6 else each


@app.command()
def fit(
    file: InputPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write.")] = Path(
        "model.safetensors"
    ),
    model: Annotated[str, typer.Option(help="pcnn, cnn or rnn.")] = "pcnn",
    units: Annotated[int, typer.Option(help="Units.")] = 32,
    connectivity: Annotated[int, typer.Option(help="Edges that leave each unit; 0: all.")] = 3,
    metric: Annotated[str | None, typer.Option(help="rbp, rutsd, rbp-qd, rutsd-qd or fb.")] = None,
    writing: Annotated[str, typer.Option(help="qdh or dh.")] = "qdh",
    damping: Annotated[float, typer.Option(help="Added to the diagonal of the metric.")] = 1.0,
    reach: Annotated[
        float, typer.Option(help="Most that a step changes what a symbol adds to a unit; 0: no bound.", min=0)
    ] = 0.0,
    prior_writing: Annotated[float, typer.Option(help="Precision of a prior on writing weights.")] = 0.0,
    prior_transition: Annotated[
        float, typer.Option(help="Precision of a prior on transition weights.")
    ] = 0.0,
    validation: Annotated[
        Path | None, typer.Option(help="File to stop on; default: the last tenth.", exists=True)
    ] = None,
    share: Annotated[float, typer.Option(help="Share kept back without --validation; 0: none.")] = 0.1,
    passes: Annotated[int, typer.Option(help="Most passes.")] = 1000,
    seconds: Annotated[float | None, typer.Option(help="Most seconds of training.")] = None,
    patience: Annotated[int, typer.Option(help="Passes without improvement; 0: never stop.")] = 300,
    restarts: Annotated[int, typer.Option(help="Trainings to choose from.")] = 1,
    heat: Annotated[int, typer.Option(help="Passes after which the worse restarts end; 0: none does.")] = 100,
    ensemble: Annotated[int, typer.Option(help="Restarts to merge into one model.")] = 1,
    folds: Annotated[
        int, typer.Option(help="Parts of the file that take turns as the validation part; 1: the last tenth.")
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes for the restarts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of graph and start values.")] = 0,
    text: AsText = False,
    after: After = None,
    alphabet: Annotated[
        Path | None,
        typer.Option(help="File whose symbols the model shall know too.", exists=True, dir_okay=False),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the output file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Learn a file and write the model; the best by the validation part is kept."""
    with _errors():
        _writable(output)
        if resume and not output.exists():
            raise ValueError(f"there is no {output} to go on from: leave out --resume, or give its --output")
        if model not in _MODELS:
            raise ValueError(f"unknown model {model!r}, choose from {sorted(_MODELS)}")
        options = {
            "units": units,
            "connectivity": connectivity or None,
            "metric": metric,
            "writing": writing,
            "damping": damping,
            "reach": reach or None,
            "prior_writing": prior_writing,
            "prior_transition": prior_transition,
            "passes": passes,
            "seconds": seconds,
            "patience": patience or None,
            "restarts": restarts,
            "heat": heat,
            "ensemble": ensemble,
            "folds": folds,
            "jobs": jobs,
            "seed": seed,
        }
        estimator = load(output) if resume else _MODELS[model](**options)
        training_text = _read_for(estimator, file) if resume else _read(file, text)
        # folds take turns, and need no validation part of their own
        held: Text | float | None = (share or None) if folds == 1 else None
        if validation is not None:
            held = _read(validation, isinstance(training_text, str))
        mask, held_mask = _mask(training_text, after), None
        counted, held_counted = len(training_text) if mask is None else int(mask.sum()), 0
        if isinstance(held, str | bytes):
            held_mask = _mask(held, after)
            held_counted = len(held) if held_mask is None else int(held_mask.sum())
        elif held is not None:
            size = int(len(training_text) * held)
            held_counted = size if mask is None else int(mask[len(mask) - size :].sum())
            counted -= held_counted
        elif folds > 1:
            held_counted = counted
        with _bar() as bar:
            report = _FitReport(bar, passes, seconds, max(counted, 1), held_counted)
            try:
                estimator.fit(
                    training_text,
                    held,
                    mask=mask,
                    validation_mask=held_mask,
                    alphabet=None if alphabet is None else _read(alphabet, isinstance(training_text, str)),
                    passes=passes if resume else None,
                    seconds=seconds if resume else None,
                    resume=resume,
                    report=report,
                )
            except KeyboardInterrupt:
                if report.last is None:
                    _console.print("interrupted before the first pass was over: nothing is saved")
                    raise
                estimator.training_ = report.last
                if estimator.restarts == 1:
                    told = "interrupted: what has been learned is saved, go on with --resume"
                else:
                    told = f"interrupted: of {estimator.restarts} networks, the last one is saved alone"
                    told += "" if estimator.folds > 1 else ", go on with it by --resume"
                    estimator.set_params(restarts=1, ensemble=1)
                _console.print(told)
        estimator.save(output)
    training = estimator.training_
    nats, held_bits = -training.log_likelihood, training.best_bits
    lines = [
        f"{output}: {training.passes} passes in {training.seconds:.1f} s, {training.result.units} units",
        f"training {_each(nats / math.log(2), counted):.4f} bits/symbol",
    ]
    figures: dict[str, Any] = {
        "model": str(output),
        "passes": training.passes,
        "seconds": training.seconds,
        "units": training.result.units,
        "training_bits_per_symbol": _each(nats / math.log(2), counted),
    }
    if held_counted:
        figures |= {
            "validation_bits_per_symbol": _each(held_bits, held_counted),
            "best_pass": training.best_pass,
        }
        lines.append(
            f"validation {_each(held_bits, held_counted):.4f} bits/symbol, best at pass {training.best_pass}"
        )
    _say(as_json, figures, *lines)


@app.command()
def sample(
    model: ModelPath,
    length: Annotated[int, typer.Option(help="Symbols to draw.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    prompt: Annotated[str, typer.Option(help="Text to read first.")] = "",
    temperature: Annotated[float, typer.Option(help="1: the model; below: bolder.")] = 1.0,
) -> None:
    """Write text drawn from the model to the standard output."""
    with _errors():
        estimator = load(model)
        read = prompt if isinstance(estimator.alphabet_.symbols, str) else prompt.encode()
        drawn = estimator.sample(length, seed, prompt=read, temperature=temperature)
    stream = typer.get_binary_stream("stdout")
    stream.write(drawn.encode() if isinstance(drawn, str) else drawn)
    stream.flush()


@app.command()
def bits(model: ModelPath, file: InputPath, after: After = None, as_json: AsJson = False) -> None:
    """Score a file: its code length under the model."""
    with _errors():
        estimator = load(model)
        text = _read_for(estimator, file)
        mask = _mask(text, after)
        total = estimator.bits(text, mask)
    counted = len(text) if mask is None else int(mask.sum())
    total = max(0.0, total)
    figures = {"bits": total, "bits_per_symbol": total / counted, "symbols": counted}
    _say(as_json, figures, f"{total:.3f} bits, {total / counted:.5f} bits/symbol, {counted} symbols")


@app.command()
def predict(
    model: ModelPath,
    context: Annotated[str, typer.Argument(help="What has been read.")] = "",
    top: Annotated[int, typer.Option(help="Symbols to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the most probable next symbols."""
    with _errors():
        estimator = load(model)
        read = context if isinstance(estimator.alphabet_.symbols, str) else context.encode()
        prediction = estimator.predict(read)
    best = sorted(prediction.items(), key=lambda entry: -entry[1])[:top]
    shown = [repr(bytes([symbol]))[1:] if isinstance(symbol, int) else repr(symbol) for symbol, _ in best]
    # a byte is its number in JSON, which has no bytes
    figures = {"context": context, "next": [[symbol, p] for symbol, p in best]}
    _say(as_json, figures, *(f"{p:.6f} {name}" for (_, p), name in zip(best, shown, strict=True)))


@contextmanager
def _symbols_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    with _bar() as bar:
        task = bar.add_task(name, total=None, state="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, state=f"{done}/{total} symbols"
        )


@app.command()
def compress(
    model: ModelPath,
    file: InputPath,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: FILE.psq.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compress a file with the model's predictions and an arithmetic coder."""
    output = output or file.with_name(file.name + ".psq")
    with _errors():
        _writable(output)
        estimator, data = load(model), file.read_bytes()
        with _symbols_bar("compress") as progress:
            packed = compress_bytes(estimator, data, progress)
        write_atomically(output, packed)
    each = 8 * len(packed) / max(len(data), 1)
    figures = {"output": str(output), "bytes": len(data), "compressed": len(packed), "bits_per_byte": each}
    _say(as_json, figures, f"{output}: {len(data)} bytes to {len(packed)}, {each:.4f} bits/byte")


@app.command()
def decompress(
    model: ModelPath,
    file: InputPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
) -> None:
    """Bring back a compressed file; refuses what is damaged or belongs to another model."""
    with _errors():
        _writable(output)
        estimator, packed = load(model), file.read_bytes()
        with _symbols_bar("decompress") as progress:
            data = decompress_bytes(estimator, packed, progress)
        write_atomically(output, data)
    typer.echo(f"{output}: {len(data)} bytes")


@app.command("generate-task")
def generate_task(
    task: Annotated[str, typer.Argument(help="alphabet, music, xor or anbn.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic text of the paper's size and print its true code length."""
    with _errors():
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}, choose from {sorted(TASKS)}")
        _writable(output)
        text = TASKS[task].generate(np.random.default_rng(seed))
        write_atomically(output, text.encode())
        length = TASKS[task].true_bits(text)
    different = len(set(text))
    figures = {
        "output": str(output), "symbols": len(text), "different": different, "true_code_length_bits": length
    }  # fmt: skip
    _say(
        as_json,
        figures,
        f"{output}: {len(text)} symbols, {different} different, true code length {length:.4f} bits",
    )


@app.command()
def baseline(
    training: Annotated[Path, typer.Argument(help="File to learn from.", exists=True, dir_okay=False)],
    file: Annotated[Path, typer.Argument(help="File to score.", exists=True, dir_okay=False)],
    depth: Annotated[int, typer.Option(help="Longest context of the context trees.")] = 8,
    states: Annotated[int, typer.Option(help="Hidden states of the HMM; 0: no HMM.")] = 0,
    iterations: Annotated[int, typer.Option(help="Iterations of the HMM.")] = 100,
    task: Annotated[str | None, typer.Option(help="Subtract the true code length of this task.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a file by bzip2, xz, context tree weighting and a hidden Markov model, after a training file."""
    with _errors():
        seen, text = _read(training, False), _read(file, False)
        assert isinstance(seen, bytes)
        assert isinstance(text, bytes)
        alphabet = Alphabet.of([seen, text])
        x, before = alphabet.encode(text), alphabet.encode(seen)
        rows: dict[str, float] = {}
        for name in baselines.COMPRESSORS:
            rows[name] = baselines.compressed_bits(name, text)
            rows[f"{name} after training"] = baselines.compressed_bits(name, text, seen)
        rows["context trees after training"] = baselines.context_tree_bits(x, len(alphabet), depth, before)
        if states:
            hidden = baselines.HiddenMarkov(states, iterations).fit(before, len(alphabet))
            rows[f"HMM of {states} states"] = hidden.bits(x)
        true = 0.0
        if task is not None:
            if task not in TASKS:
                raise ValueError(f"unknown task {task!r}, choose from {sorted(TASKS)}")
            try:
                true = TASKS[task].true_bits(text.decode())
            except ValueError as error:
                raise ValueError(f"{file} is no text of the task {task}: {error}") from error
    if as_json:
        figures = {"task": task, "symbols": len(text), "bits": {name: v - true for name, v in rows.items()}}
        _say(True, figures)
        return
    table = Table("baseline", "bits" if task is None else "bits beyond the true code length", "bits/symbol")
    for name, value in rows.items():
        table.add_row(name, f"{round(value - true, 1) + 0.0:.1f}", f"{_each(value, len(text)):.4f}")
    Console().print(table)
