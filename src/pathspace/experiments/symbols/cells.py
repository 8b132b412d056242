"""The cells of the table: texts, sizes and budgets, and a model of one size that is trained and scored.

A model is trained on one text and scored on two others, all drawn from the same generator. The
validation text stops the training and chooses among sizes; the test text is scored once. Scores are
regrets: bits beyond the code length under the generator.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass as validated
from typing_extensions import TypedDict

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import (
    CONFIG,
    Count,
    Natural,
    NotNegative,
    Positive,
    Several,
    expected,
    known,
    wrong,
)
from pathspace.experiments.terminal import ProgressCallback, unheard

TEXTS = ("alphabet", "music", "anbn")
# Not in the paper: the alphabet without capitals after the last digit, as its true code length
# suggests.
KNOWN_TEXTS = (*TEXTS, "alphabet-9")
# What a text's length counts.
LENGTHS = {"alphabet": "lines", "alphabet-9": "lines", "music": "bars", "anbn": "blocks"}
NETWORKS = ("RNN", "CNN", "PCNN")
# The paper's names: how writing weights are stepped, then transition weights.
RULES = {"DH+FB": ("dh", "fb"), "QDH+RUTSD": ("qdh", "rutsd"), "QDH+RBP": ("qdh", "rbp")}
INVARIANT = ("QDH+RUTSD", "QDH+RBP")
# the last one not in the paper: hmmlearn's, from its own start
BASELINES = ("bzip2", "CTW", "HMM", "dense HMM")
ROWS = (*BASELINES, *(f"{network}, {rule}" for network in NETWORKS for rule in RULES))
# Not in the paper: several networks made one, which have learned the training and the validation
# text in turn.
MERGED = "PCNN, merged"
# What the paper says has fewer bits than what: invariant steps than backpropagation, its network
# than others.
COMPARED = (
    *((f"{network}, {rule}", f"{network}, DH+FB") for network in NETWORKS for rule in INVARIANT),
    *((f"PCNN, {rule}", f"{network}, {rule}") for network in NETWORKS[:2] for rule in INVARIANT),
    *((f"PCNN, {rule}", baseline) for baseline in BASELINES for rule in INVARIANT),
)
SEEDS_APART = 1000  # between two draws: more than the networks of one


def _even(value: int) -> int:
    if value % 2:  # half of them learn either text
        raise expected("an even number")
    return value


Text = Annotated[str, known(KNOWN_TEXTS)]
Even = Annotated[int, Field(ge=2), AfterValidator(_even)]


@with_config(ConfigDict(extra="forbid"))
class Merged(TypedDict):
    """Options of `pathspace.sequences.PCNN` for the row `MERGED`."""

    units: Count
    restarts: Even
    ensemble: Even
    heat: Natural
    passes: Count
    patience: Count
    prior_writing: NotRequired[NotNegative]
    prior_transition: NotRequired[NotNegative]


@validated(frozen=True, config=CONFIG)
class Protocol:
    """The settings of the table.

    Attributes:
        texts: Columns, names in `KNOWN_TEXTS`.
        rows: Rows, names in `ROWS`, or `MERGED`.
        lengths: Lines, bars or blocks of a text; one that is missing has the paper's length.
        units: Sizes of network to choose from, on the validation text; of hidden Markov model, too,
            as in the paper.
        connectivity: Edges that leave each unit, its loop included.
        passes: Passes over the training text, for each text.
        seconds: Processor time of one start of a network of one size, for each text, from its first
            pass on; passes that were undone count. No bound where a text is missing.
        patience: Passes without a better validation text after which a training ends.
        restarts: Networks of each size to choose from, for each text; 1 where a text is missing.
        heat: Passes after which the better quarter of the restarts goes on alone; 0 lets all go on.
        states: Sizes of dense hidden Markov model to choose from.
        iterations: Of both hidden Markov models.
        depths: Longest contexts of the context trees to choose from.
        merged: For each text, what the row `MERGED` takes instead of the above: see `Merged`.
        data_seed: Decides the texts.
        seed: Decides graphs and start values of the networks.
        seeds: How often everything is drawn anew, texts, graphs and start values: `data_seed` and
            the ones after it, with `seed` and the thousands after it. The table has means over
            them.
    """

    texts: Several[Text] = TEXTS
    rows: Several[Annotated[str, known((*ROWS, MERGED))]] = ROWS
    lengths: Mapping[Text, Count] = field(default_factory=dict)
    units: Several[Count] = (8, 16)
    connectivity: Count = 3
    passes: Mapping[Text, Count] = field(default_factory=lambda: dict.fromkeys(TEXTS, 100))
    seconds: Mapping[Text, Positive] = field(default_factory=dict)
    patience: Count = 300
    restarts: Mapping[Text, Count] = field(default_factory=dict)
    heat: Natural = 0
    states: Several[Count] = (8, 16)
    iterations: Count = 50
    depths: Several[Count] = (8, 16)
    merged: Mapping[Text, Merged] = field(default_factory=dict)
    data_seed: Natural = 21
    seed: Natural = 1000
    seeds: Count = 1

    def __post_init__(self) -> None:
        if min(self.units) < self.connectivity:
            raise wrong("units", self.units, f"whole numbers from {self.connectivity} on")
        for text, options in self.merged.items():
            if options["units"] < self.connectivity:
                least = f"a whole number from {self.connectivity} on"
                raise wrong(f"merged.{text}.units", options["units"], least)
            if options["ensemble"] > options["restarts"]:
                most = f"at most the {options['restarts']} of its restarts"
                raise wrong(f"merged.{text}.ensemble", options["ensemble"], most)
        wanted: dict[str, Mapping[str, object]] = {"passes": self.passes}
        if MERGED in self.rows:
            wanted["merged"] = self.merged
        for name, given in wanted.items():
            missing = [text for text in self.texts if text not in given]
            if missing:
                raise ConfigurationError(
                    f"The setting {name!r} lacks {missing[0]!r}: say what it takes."
                )

    def drawn(self, draw: int) -> Protocol:
        """Return the protocol of one draw alone, the first of which is 0."""
        return replace(
            self, data_seed=self.data_seed + draw, seed=self.seed + SEEDS_APART * draw, seeds=1
        )


Drawn = tuple[str, str, str]
"""A training, a validation and a test text."""
LOOKS = 200  # points of a curve
DRAWN, SHOWN = 4000, 600  # symbols that a network writes, and signs of it on the page


@dataclass(frozen=True)
class Cell:
    """A row of the table, a text, the size of the model (0 where there is none), and the draw."""

    row: str
    text: str
    size: int
    draw: int = 0

    @property
    def key(self) -> str:
        """A file name."""
        name = re.sub(r", |\+| ", "-", f"{self.row}-{self.text}-{self.size}").lower()
        return f"{name}-draw{self.draw}" if self.draw else name


@dataclass(frozen=True)
class Score:
    """The score of a cell.

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
    """A network, if it is one, and its code lengths, in bits; see `Score`."""

    held: float
    test: float
    model: Any = None
    curve: tuple[tuple[int, float, float], ...] = ()


class _SpentError(Exception):
    """The processor time of a training is spent, which is its argument."""


def cells(protocol: Protocol) -> list[Cell]:
    """Return all cells with all sizes: one draw after the other, of each those that take longest first."""
    sizes = {"bzip2": (0,), "CTW": protocol.depths, "dense HMM": protocol.states}
    found = []
    for draw, text, row in product(range(protocol.seeds), protocol.texts, protocol.rows):
        own = sizes.get(row, protocol.units)
        if row == MERGED:
            own = (protocol.merged[text]["units"],)
        found += [Cell(row, text, size, draw) for size in own]
    slow = ("anbn", "music", "alphabet", "alphabet-9")
    return sorted(
        found,
        key=lambda cell: (-cell.draw, cell.row == MERGED, slow.index(cell.text), cell.size),
        reverse=True,
    )


def fill(protocol: Protocol, do: Callable[..., list[Score]], folder: Path) -> list[Score]:  # noqa: ARG001
    """Return the scores of all cells; see `execution`."""
    return do(Score, cells(protocol), partial(compute, protocol=protocol))


def best(scores: Sequence[Score]) -> dict[tuple[str, str, int], Score]:
    """Return by row, text and draw the score of the size that the validation text prefers."""
    chosen: dict[tuple[str, str, int], Score] = {}
    for score in sorted(scores, key=lambda score: (score.validation, score.cell.size)):
        chosen.setdefault((score.cell.row, score.cell.text, score.cell.draw), score)
    return chosen


def texts(name: str, protocol: Protocol) -> Drawn:
    """Return the training, the validation and the test text of a column."""
    import numpy as np

    from pathspace.sequences.tasks import TASKS

    length = {LENGTHS[name]: protocol.lengths[name]} if name in protocol.lengths else {}
    generators = [np.random.default_rng([protocol.data_seed, k]) for k in (1, 2, 3)]
    text, held, test = (TASKS[name].generate(generator, **length) for generator in generators)
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
    drawn = texts(cell.text, protocol)
    began = time.process_time()
    if cell.row in BASELINES:
        held_bits, test_bits = _baseline(cell, protocol, drawn)
        found = _Trained(held_bits, test_bits)
    elif cell.row == MERGED:
        found = _merged(cell, protocol, drawn, report)
    else:
        found = _network(cell, protocol, drawn, report)
    _, held, test = drawn
    score = Score(
        cell,
        regret(cell.text, held, found.held),
        regret(cell.text, test, found.test),
        round(time.process_time() - began, 2),
        passes=0,
    )
    if found.model is None:
        return score
    training = found.model.training_
    curve = [(passes, at, regret(cell.text, held, bits)) for passes, at, bits in found.curve]
    return replace(
        score,
        passes=training.passes,
        broke_off=training.broke_off,
        tries=training.tries,
        curve=tuple(curve),
        sample=shown(found.model.sample(DRAWN, seed=0)),
    )


def _baseline(cell: Cell, protocol: Protocol, drawn: Drawn) -> list[float]:
    """Return the code lengths of the validation and of the test text."""
    from pathspace.sequences import baselines
    from pathspace.sequences.text import Alphabet

    if cell.row == "bzip2":
        text, *parts = (part.encode() for part in drawn)
        return [baselines.compressed_bits("bzip2", part, text) for part in parts]
    alphabet = Alphabet.of(drawn)
    text, *parts = (alphabet.encode(part) for part in drawn)
    if cell.row == "CTW":
        return [baselines.context_tree_bits(p, len(alphabet), cell.size, text) for p in parts]
    hidden = baselines.HiddenMarkov(cell.size, protocol.iterations)
    if cell.row == "HMM":
        options = {"iterations": protocol.iterations, "seed": protocol.seed}
        hidden = baselines.SparseHiddenMarkov(cell.size, **options)
    hidden.fit(text, len(alphabet))
    return [hidden.bits(part) for part in parts]


def _network(cell: Cell, protocol: Protocol, drawn: Drawn, report: ProgressCallback) -> _Trained:
    from pathspace import sequences

    kind, rule = cell.row.split(", ")
    writing, metric = RULES[rule]
    if kind == "RNN" and metric != "fb":
        metric += "-qd"  # its metric is defined in the quasi-diagonal form alone
    passes, restarts = protocol.passes[cell.text], protocol.restarts.get(cell.text, 1)
    heat = min(protocol.heat, passes) if restarts > 1 else 0
    kept = -(-restarts // 4) if heat else restarts
    counted = _counted(report, restarts * heat + kept * (passes - heat))
    seconds = protocol.seconds.get(cell.text, math.inf)
    fits = []
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
        fits.append(_Fit(model, drawn, seconds, counted))
        fits[-1].train()
    if heat:
        fits = sorted(fits, key=lambda fit: fit.model.training_.result_bits)[:kept]
        for fit in fits:
            if not fit.ended:
                fit.model.set_params(passes=passes)
                fit.train(resume=True)
    found = (fit.trained() for fit in fits)
    return min(found, key=lambda one: (one.held, one.test))


def _merged(cell: Cell, protocol: Protocol, drawn: Drawn, report: ProgressCallback) -> _Trained:
    """Train networks of which half learn one text and stop on the other, and make them one."""
    from pathspace.sequences import PCNN
    from pathspace.sequences.tasks import TASKS

    text, held, test = drawn
    options = protocol.merged[cell.text]
    model = PCNN(connectivity=protocol.connectivity, folds=2, seed=protocol.seed, **options)
    heat = min(options["heat"], options["passes"])
    rest = options["ensemble"] * (options["passes"] - heat)
    counted = _counted(report, options["restarts"] * heat + rest)
    # the table marks what broke off
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        model.fit([text, held], alphabet=test, report=counted)
    # what the halves did not learn is both texts together
    validation = model.training_.result_bits - TASKS[cell.text].true_bits(text)
    return _Trained(validation, model.bits(test), model)


def _counted(report: ProgressCallback, most: int) -> Callable[[Any], None]:
    """Return what reports how many passes the networks of a cell have done, of the most that they may take."""
    numbers = count(1)

    def told(_training: Any) -> None:
        done = next(numbers)
        report(done / most, f"{done:,} of at most {most:,} passes")

    return told


@dataclass
class _Fit:
    """A training that may go on.

    Attributes:
        model: What is trained.
        drawn: The training, the validation and the test text; of the last one, its symbols alone.
        seconds: Processor time of the training, from its first pass on.
        counted: Told about each pass.
        curve: Looks at the validation text: (pass, processor seconds, bits).
        spent: Processor time so far.
        ended: Whether the time is spent, or the gradient was not finite.
    """

    model: Any
    drawn: Drawn
    seconds: float
    counted: Callable[[Any], None]
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    spent: float = 0.0
    ended: bool = False

    def train(self, *, resume: bool = False) -> None:
        """Train for the passes of the model."""
        text, held, test = self.drawn
        began: float | None = None
        before = self.spent

        def remember(training: Any) -> None:
            nonlocal began
            # after the first pass: nothing is compiled then
            began = time.process_time() if began is None else began
            self.spent = before + time.process_time() - began
            self.counted(training)
            if training.passes % self.model.validate_every == 0:
                look = (training.passes, round(self.spent, 3), training.validation_bits)
                self.curve.append(look)
            if self.spent > self.seconds:
                raise _SpentError(training)

        try:
            # the table marks what broke off
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                self.model.fit(text, held, alphabet=test, resume=resume, report=remember)
        except _SpentError as spent:
            (self.model.training_,) = spent.args
            self.ended = True
        else:
            self.ended = self.model.training_.broke_off

    def trained(self) -> _Trained:
        """Return the network, with at most `LOOKS` looks at the validation text, the last one included."""
        _, held, test = self.drawn
        looks = [look for look in self.curve if math.isfinite(look[2])]
        every = -(-len(looks) // LOOKS) or 1
        thinned = tuple(looks[::-1][::every][::-1])
        return _Trained(self.model.bits(held), self.model.bits(test), self.model, thinned)
