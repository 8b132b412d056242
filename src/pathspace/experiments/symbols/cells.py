"""One cell of the table: a model of one size, trained on one text, scored on two others.

All three texts are drawn from the same generator. The validation text stops the training and chooses among sizes; the
test text is scored once. Scores are regrets: bits beyond the code length under the generator.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pathspace.experiments.symbols.protocol import BASELINES, LENGTHS, RULES, Protocol


@dataclass(frozen=True)
class Cell:
    """What is to be scored: a row of the table, a text, and the size of the model (0 where there is none)."""

    row: str
    text: str
    size: int

    @property
    def key(self) -> str:
        """A file name."""
        return f"{self.row}-{self.text}-{self.size}".replace(", ", "-").replace("+", "-").lower()


@dataclass(frozen=True)
class Score:
    """What came out.

    Attributes:
        cell: What was scored.
        validation: Regret on the validation text, in bits; by this sizes are chosen.
        test: Regret on the test text, in bits.
        seconds: Processor time of training and scoring.
        passes: Passes over the training text, or 0 for a baseline.
        broke_off: Whether a training ended because its gradient was not finite; its best parameters until then count.
    """

    cell: Cell
    validation: float
    test: float
    seconds: float
    passes: int
    broke_off: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """Undo `as_dict`."""
        return cls(**{**values, "cell": Cell(**values["cell"])})


def cells(protocol: Protocol) -> list[Cell]:
    """Return all cells with all sizes, those that take longest first."""
    sizes = {"bzip2": (0,), "CTW": protocol.depths, "HMM": protocol.states}
    found = [
        Cell(row, text, size)
        for text in protocol.texts
        for row in protocol.rows
        for size in sizes.get(row, protocol.units)
    ]
    slow = ("anbn", "music", "alphabet")
    return sorted(found, key=lambda cell: (slow.index(cell.text), cell.size), reverse=True)


def best(scores: Sequence[Score]) -> dict[tuple[str, str], Score]:
    """Return by row and text the score of the size that the validation text prefers."""
    chosen: dict[tuple[str, str], Score] = {}
    for score in scores:
        place = (score.cell.row, score.cell.text)
        if place not in chosen or (score.validation, score.cell.size) < (
            chosen[place].validation,
            chosen[place].cell.size,
        ):
            chosen[place] = score
    return chosen


def compute(cell: Cell, protocol: Protocol) -> Score:
    """Train and score; the same numbers each time, on one machine and version."""
    import numpy as np

    from pathspace.sequences.tasks import TASKS, regret

    task = TASKS[cell.text]
    length = {LENGTHS[cell.text]: protocol.lengths[cell.text]} if cell.text in protocol.lengths else {}
    text, held, test = (
        task.generate(np.random.default_rng([protocol.data_seed, k]), **length) for k in (1, 2, 3)
    )
    began = time.process_time()
    score = _baseline if cell.row in BASELINES else _network
    held_bits, test_bits, passes, broke_off = score(cell, protocol, text, held, test)
    return Score(
        cell,
        regret(cell.text, held, held_bits),
        regret(cell.text, test, test_bits),
        round(time.process_time() - began, 2),
        passes,
        broke_off,
    )


def _baseline(
    cell: Cell, protocol: Protocol, text: str, held: str, test: str
) -> tuple[float, float, int, bool]:
    from pathspace.sequences.baselines import HiddenMarkov, compressed_bits, context_tree_bits
    from pathspace.sequences.text import Alphabet

    if cell.row == "bzip2":
        found = [compressed_bits("bzip2", part.encode(), text.encode()) for part in (held, test)]
        return found[0], found[1], 0, False
    alphabet = Alphabet.of([text, held, test])
    before, *parts = (alphabet.encode(part) for part in (text, held, test))
    if cell.row == "CTW":
        found = [context_tree_bits(part, len(alphabet), cell.size, before) for part in parts]
    else:
        hidden = HiddenMarkov(cell.size, protocol.iterations).fit(before, len(alphabet))
        found = [hidden.bits(part) for part in parts]
    return found[0], found[1], 0, False


def _network(
    cell: Cell, protocol: Protocol, text: str, held: str, test: str
) -> tuple[float, float, int, bool]:
    from pathspace import sequences

    kind, rule = cell.row.split(", ")
    writing, metric = RULES[rule]
    if kind == "RNN" and metric != "fb":
        metric += "-qd"  # its metric is defined in the quasi-diagonal form alone
    passes, restarts = protocol.passes[cell.text], protocol.restarts.get(cell.text, 1)
    heat = min(protocol.heat, passes) if restarts > 1 else 0
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
        broke_off = _fit(model, text, held, test)
        entries.append((model.training_.best_bits, start, model, broke_off))
    if heat:
        entries = sorted(entries, key=lambda entry: entry[:2])[: -(-restarts // 4)]
    found = []
    for _, _, model, broke_off in entries:
        if heat and not broke_off:
            model.set_params(passes=passes)
            broke_off = _fit(model, text, held, test, resume=True)
        found.append((model.bits(held), model.bits(test), model.training_.passes, broke_off))
    return min(found)


def _fit(model: Any, text: str, held: str, test: str, *, resume: bool = False) -> bool:
    """Train; say whether the training broke off, the model then being what it had last been."""
    latest: list[Any] = [model.training_ if resume else None]

    def remember(training: Any) -> None:
        latest[0] = training

    try:
        model.fit(
            text, held, alphabet=test, resume=resume, report=remember
        )  # of the test text, its symbols alone
    except FloatingPointError:
        if latest[0] is None:
            raise
        model.training_ = latest[0]
        return True
    return False
