"""The cells of the comparison: a run each, of a method at a rate from a seed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from pathspace.experiments.long_memory.protocol import Protocol
from pathspace.experiments.long_memory.training import Outcome, Setup, train
from pathspace.experiments.settings import FIRST_TUNING_SEED


@dataclass(frozen=True)
class Setting:
    """What is to be learned: a problem, the length T of its sequences, and the network's hidden units H."""

    problem: str
    length: int
    hidden: int


@dataclass(frozen=True)
class Cell:
    """A run."""

    setting: Setting
    method: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """A file name."""
        s = self.setting
        return f"{s.problem}-{s.length}-{s.hidden}-{self.method}-at-{self.rate:g}-seed-{self.seed}"


@dataclass(frozen=True)
class Result:
    """What became of a run, and the processor time that it took."""

    cell: Cell
    outcome: Outcome
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Undo `as_dict`."""
        cell = {**values["cell"], "setting": Setting(**values["cell"]["setting"])}
        return cls(Cell(**cell), Outcome(**values["outcome"]), values["seconds"])


def settings(protocol: Protocol) -> list[Setting]:
    """Return all settings, in the order of the tables."""
    return [
        Setting(problem, length, hidden)
        for length, hidden, problem in product(protocol.lengths, protocol.hidden, protocol.problems)
    ]


def tuning_cells(protocol: Protocol, setting: Setting) -> list[Cell]:
    """Return the runs by which the rates of a setting are chosen."""
    rates = sorted(protocol.learning_rates)
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + protocol.tuning_seeds)
    return [Cell(setting, *each) for each in product(protocol.methods, rates, seeds)]


def reported_cells(protocol: Protocol, setting: Setting, rates: Mapping[str, float]) -> list[Cell]:
    """Return the runs that are reported, of every method at its rate."""
    return [
        Cell(setting, method, rates[method], seed)
        for method, seed in product(protocol.methods, range(protocol.seeds))
    ]


def by_rate(results: Sequence[Result], method: str) -> dict[float, list[Outcome]]:
    """Return all runs of a method by their rate."""
    found: dict[float, list[Outcome]] = {}
    for result in results:
        if result.cell.method == method:
            found.setdefault(result.cell.rate, []).append(result.outcome)
    return dict(sorted(found.items()))


def chosen_rate(results: Sequence[Result], method: str) -> float:
    """Return the rate with the most successful runs.

    Ties go to the fewest steps, a failure counting as all; where no run learned, to the least median error.
    """

    def order(item: tuple[float, list[Outcome]]) -> tuple[float, ...]:
        rate, outcomes = item
        steps = [outcome.steps for outcome in outcomes if outcome.steps is not None]
        errors = sorted(math.inf if o.error is None else o.error for o in outcomes)
        return -len(steps), sum(steps), errors[len(errors) // 2], rate

    return min(by_rate(results, method).items(), key=order)[0]


def compute(cell: Cell, protocol: Protocol) -> Result:
    """Train; the same numbers each time, on one machine and version."""
    setting = cell.setting
    setup = Setup(
        **asdict(setting),
        steps=protocol.steps_per_length * setting.length,
        batch_size=protocol.batch_size,
        warmup=protocol.warmup,
        clip_norm=protocol.clip_norm,
        refresh_every=protocol.refresh_every,
        damping=protocol.damping,
        test_size=protocol.test_size,
    )
    began = time.process_time()
    outcome = train(cell.method, cell.rate, cell.seed, setup)
    return Result(cell, outcome, round(time.process_time() - began, 2))
