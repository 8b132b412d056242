"""One cell of the table: a model of one size, trained on one text, scored on two others.

All three texts are drawn from the same generator. The validation text stops the training and
chooses among sizes; the test text is scored once. Scores are regrets: bits beyond the code length
under the generator.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pathspace.experiments.monitor import ProgressCallback, unheard
from pathspace.experiments.symbols.protocol import BASELINES, LENGTHS, MERGED, RULES, Protocol

LOOKS = 200  # points of a curve
DRAWN, SHOWN = 4000, 600  # symbols that a network writes, and signs of it on the page


@dataclass(frozen=True)
class Cell:
    """What is to be scored: a row of the table, a text, the size of the model (0 where there is none), and the draw."""

    row: str
    text: str
    size: int
    draw: int = 0

    @property
    def key(self) -> str:
        """A file name."""
        name = (
            f"{self.row}-{self.text}-{self.size}".replace(", ", "-")
            .replace("+", "-")
            .replace(" ", "-")
            .lower()
        )
        return f"{name}-draw{self.draw}" if self.draw else name


@dataclass(frozen=True)
class Score:
    """What came out.

    Attributes:
        cell: What was scored.
        validation: Regret on the validation text, in bits; by this sizes are chosen.
        test: Regret on the test text, in bits.
        seconds: Processor time of training and scoring.
        passes: Passes over the training text, or 0 for a baseline.
        broke_off: Whether a training ended because its gradient was not finite; its best parameters
            until then count. Of merged networks, whether one of theirs did.
        tries: Passes with those that were undone; 0 for a baseline.
        curve: Of the network that was chosen: (pass, processor seconds, regret on the validation
            text) at its looks.
        sample: What the network writes, runs of a symbol shortened.
    """

    cell: Cell
    validation: float
    test: float
    seconds: float
    passes: int
    broke_off: bool = False
    tries: int = 0
    curve: tuple[tuple[int, float, float], ...] = ()
    sample: str = ""

    @property
    def words(self) -> str:
        """The result as one line of text."""
        cell = self.cell
        size = f", size {cell.size}" if cell.size else ""
        size += f", draw {cell.draw}" if cell.draw else ""
        return f"{cell.row} on {cell.text}{size}: {self.test:.1f} bits, {self.seconds:.1f} s"


@dataclass(frozen=True)
class _Trained:
    """A network and its code lengths, in bits; the order is that of preference."""

    held: float
    test: float
    model: Any = None
    broke_off: bool = False
    curve: tuple[tuple[int, float, float], ...] = ()


class _SpentError(Exception):
    """The processor time of a training is spent."""


def cells(protocol: Protocol) -> list[Cell]:
    """Return all cells with all sizes: one draw after the other, of each those that take longest first."""
    sizes = {"bzip2": (0,), "CTW": protocol.depths, "dense HMM": protocol.states}
    found = [
        Cell(row, text, size, draw)
        for draw in range(protocol.seeds)
        for text in protocol.texts
        for row in protocol.rows
        for size in (
            (protocol.merged[text]["units"],) if row == MERGED else sizes.get(row, protocol.units)
        )
    ]
    slow = ("anbn", "music", "alphabet", "alphabet-9")
    return sorted(
        found,
        key=lambda cell: (-cell.draw, cell.row == MERGED, slow.index(cell.text), cell.size),
        reverse=True,
    )


def fill(protocol: Protocol, do: Callable[..., list[Score]], folder: Path) -> list[Score]:  # noqa: ARG001
    """Return the scores of all cells; see `tables`."""
    return do(Score, cells(protocol), partial(compute, protocol=protocol))


def best(scores: Sequence[Score]) -> dict[tuple[str, str, int], Score]:
    """Return by row, text and draw the score of the size that the validation text prefers."""
    chosen: dict[tuple[str, str, int], Score] = {}
    for score in scores:
        place = (score.cell.row, score.cell.text, score.cell.draw)
        if place not in chosen or (score.validation, score.cell.size) < (
            chosen[place].validation,
            chosen[place].cell.size,
        ):
            chosen[place] = score
    return chosen


def texts(name: str, protocol: Protocol) -> tuple[str, str, str]:
    """Return the training, the validation and the test text of a column."""
    import numpy as np

    from pathspace.sequences.tasks import TASKS

    length = {LENGTHS[name]: protocol.lengths[name]} if name in protocol.lengths else {}
    text, held, test = (
        TASKS[name].generate(np.random.default_rng([protocol.data_seed, k]), **length)
        for k in (1, 2, 3)
    )
    return text, held, test


def shown(text: str) -> str:
    """Return the beginning of a text, with runs of a symbol written as their length.

    Example:
        >>> shown("ab" + 9 * "c" + "d")
        'ab[9 c]d'
    """
    return re.sub(r"([^\n])\1{4,}", lambda run: f"[{len(run[0])} {run[1]}]", text)[:SHOWN]


def compute(cell: Cell, protocol: Protocol, report: ProgressCallback = unheard) -> Score:
    """Train and score; the same numbers each time, on one machine and version, but for a budget of seconds."""
    from pathspace.sequences.tasks import regret

    protocol = protocol.drawn(cell.draw)
    text, held, test = texts(cell.text, protocol)
    began = time.process_time()
    if cell.row in BASELINES:
        found = _baseline(cell, protocol, text, held, test)
    else:
        train = _merged if cell.row == MERGED else _network
        found = train(cell, protocol, text, held, test, report)
    training = None if found.model is None else found.model.training_
    return Score(
        cell,
        regret(cell.text, held, found.held),
        regret(cell.text, test, found.test),
        round(time.process_time() - began, 2),
        training.passes if training is not None else 0,
        found.broke_off,
        training.tries if training is not None else 0,
        tuple((passes, at, regret(cell.text, held, bits)) for passes, at, bits in found.curve),
        shown(found.model.sample(DRAWN, seed=0)) if found.model is not None else "",
    )


def _baseline(cell: Cell, protocol: Protocol, text: str, held: str, test: str) -> _Trained:
    from pathspace.sequences import baselines
    from pathspace.sequences.text import Alphabet

    if cell.row == "bzip2":
        parts = (
            baselines.compressed_bits("bzip2", part.encode(), text.encode())
            for part in (held, test)
        )
    else:
        alphabet = Alphabet.of([text, held, test])
        before, *encoded = (alphabet.encode(part) for part in (text, held, test))
        if cell.row == "CTW":
            parts = (
                baselines.context_tree_bits(part, len(alphabet), cell.size, before)
                for part in encoded
            )
        else:
            if cell.row == "HMM":
                hidden = baselines.SparseHiddenMarkov(
                    cell.size, iterations=protocol.iterations, seed=protocol.seed
                )
            else:
                hidden = baselines.HiddenMarkov(cell.size, protocol.iterations)
            hidden.fit(before, len(alphabet))
            parts = (hidden.bits(part) for part in encoded)
    held_bits, test_bits = parts
    return _Trained(held_bits, test_bits)


def _network(
    cell: Cell, protocol: Protocol, text: str, held: str, test: str, report: ProgressCallback
) -> _Trained:
    from pathspace import sequences

    kind, rule = cell.row.split(", ")
    writing, metric = RULES[rule]
    if kind == "RNN" and metric != "fb":
        metric += "-qd"  # its metric is defined in the quasi-diagonal form alone
    passes, restarts = protocol.passes[cell.text], protocol.restarts.get(cell.text, 1)
    heat = min(protocol.heat, passes) if restarts > 1 else 0
    kept = -(-restarts // 4) if heat else restarts
    counted = _Counted(report, restarts * heat + kept * (passes - heat))
    entries = []
    for start in range(restarts):
        model = getattr(sequences, kind)(
            cell.size,
            protocol.connectivity,
            metric=metric,
            writing=writing,
            passes=heat or passes,
            patience=protocol.patience,
            seed=protocol.seed + start,
        )
        fit = _Fit(model, protocol.seconds.get(cell.text), counted)
        fit(text, held, test)
        entries.append((model.training_.result_bits, start, fit))
    if heat:
        entries = sorted(entries, key=lambda entry: entry[:2])[:kept]
    found = []
    for _, _, fit in entries:
        if heat and not fit.ended:
            fit.model.set_params(passes=passes)
            fit(text, held, test, resume=True)
        model = fit.model
        found.append(
            _Trained(model.bits(held), model.bits(test), model, fit.broke_off, fit.thinned())
        )
    return min(found, key=lambda one: (one.held, one.test))


def _merged(
    cell: Cell, protocol: Protocol, text: str, held: str, test: str, report: ProgressCallback
) -> _Trained:
    """Train networks of which half learn one text and stop on the other, and make them one."""
    from pathspace.sequences import PCNN
    from pathspace.sequences.tasks import TASKS

    options = protocol.merged[cell.text]
    model = PCNN(connectivity=protocol.connectivity, folds=2, seed=protocol.seed, **options)
    heat = min(options["heat"], options["passes"])
    rest = options["ensemble"] * (options["passes"] - heat)
    counted = _Counted(report, options["restarts"] * heat + rest)
    with _broken_off_quietly():
        model.fit([text, held], alphabet=test, report=counted)
    # what the halves did not learn is both texts together
    validation = model.training_.result_bits - TASKS[cell.text].true_bits(text)
    return _Trained(validation, model.bits(test), model, model.training_.broke_off)


@contextmanager
def _broken_off_quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the table marks what broke off
        yield


class _Counted:
    """Reports how many passes the networks of a cell have done, of the most that they may take."""

    def __init__(self, report: ProgressCallback, most: int) -> None:
        self._report = report
        self._most = most
        self._done = 0

    def __call__(self, training: Any) -> None:
        """Count a pass."""
        del training
        self._done += 1
        words = f"{self._done:,} of at most {self._most:,} passes"
        self._report(self._done / self._most, words)


class _Fit:
    """A training that may go on: how far it is, and why it ended.

    Attributes:
        model: What is trained.
        broke_off: Whether its gradient was not finite.
        ended: Whether it is not to go on.
    """

    def __init__(self, model: Any, seconds: float | None, counted: Callable[[Any], None]) -> None:
        self.model, self.broke_off, self.ended = model, False, False
        self._budget, self._curve, self._spent = seconds, [], 0.0
        self._counted = counted

    def __call__(self, text: str, held: str, test: str, *, resume: bool = False) -> None:
        """Train, or go on."""
        latest: list[Any] = [self.model.training_ if resume else None]
        began: float | None = None
        before = self._spent

        def remember(training: Any) -> None:
            nonlocal began
            # after the first pass: nothing is compiled then
            began = time.process_time() if began is None else began
            latest[0], self._spent = training, before + time.process_time() - began
            self._counted(training)
            if training.passes % self.model.validate_every == 0:
                self._curve.append(
                    (training.passes, round(self._spent, 3), training.validation_bits)
                )
            if self._budget is not None and self._spent > self._budget:
                raise _SpentError

        try:
            with _broken_off_quietly():
                # of the test text, its symbols alone
                self.model.fit(text, held, alphabet=test, resume=resume, report=remember)
        except _SpentError:
            self.model.training_, self.ended = latest[0], True
        else:
            self.broke_off = self.ended = self.model.training_.broke_off

    def thinned(self) -> tuple[tuple[int, float, float], ...]:
        """Return the looks at the validation text, at most `LOOKS` of them, the last one included."""
        looks = [look for look in self._curve if math.isfinite(look[2])]
        every = -(-len(looks) // LOOKS) or 1
        return tuple(looks[::-1][::every][::-1])
