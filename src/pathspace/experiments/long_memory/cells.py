"""The cells of the comparison: runs of one method that are computed together, of some seeds at some rates each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """Runs that are computed together: every seed at every rate."""

    setting: Setting
    method: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def key(self) -> str:
        """A file name."""
        s = self.setting
        rates = "-".join(f"{rate:g}" for rate in self.rates)
        seeds = f"{self.seeds[0]}-to-{self.seeds[-1]}"
        return f"{s.problem}-{s.length}-{s.hidden}-{self.method}-at-{rates}-seeds-{seeds}"


@dataclass(frozen=True)
class Result:
    """What became of a cell's runs, and the processor time that they took."""

    cell: Cell
    outcomes: tuple[Outcome, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """Undo `as_dict`."""
        cell = values["cell"]
        return cls(
            Cell(Setting(**cell["setting"]), cell["method"], tuple(cell["rates"]), tuple(cell["seeds"])),
            tuple(Outcome(**outcome) for outcome in values["outcomes"]),
            values["seconds"],
        )


def settings(protocol: Protocol) -> list[Setting]:
    """Return all settings, in the order of the tables."""
    return [
        Setting(problem, length, hidden)
        for length, hidden, problem in product(protocol.lengths, protocol.hidden, protocol.problems)
    ]


def tuning_cells(protocol: Protocol, setting: Setting) -> list[Cell]:
    """Return the runs by which the rates of a setting are chosen."""
    rates = tuple(sorted(protocol.learning_rates))
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + protocol.tuning_seeds)
    return [cell for m in protocol.methods for cell in _cells(setting, m, rates, seeds, protocol.together)]


def reported_cells(protocol: Protocol, setting: Setting, rates: Mapping[str, float]) -> list[Cell]:
    """Return the runs that are reported, of every method at its rate."""
    seeds = range(protocol.seeds)
    return [
        cell for m in protocol.methods for cell in _cells(setting, m, (rates[m],), seeds, protocol.together)
    ]


def _cells(
    setting: Setting, method: str, rates: tuple[float, ...], seeds: range, together: int
) -> Iterable[Cell]:
    count = max(1, together // len(rates))
    return (Cell(setting, method, rates, tuple(seeds[i : i + count])) for i in range(0, len(seeds), count))


def by_rate(results: Sequence[Result], method: str) -> dict[float, list[Outcome]]:
    """Return all runs of a method by their rate."""
    found: dict[float, list[Outcome]] = {}
    for result in results:
        for outcome in result.outcomes if result.cell.method == method else ():
            found.setdefault(outcome.rate, []).append(outcome)
    return dict(sorted(found.items()))


def chosen_rate(results: Sequence[Result], method: str) -> float:
    """Return the rate at which most runs learned, of equals the one that took fewest steps, a failure counting as all.

    Where none learned, it is the rate of the least median error.
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
    runs = [(rate, seed) for rate in cell.rates for seed in cell.seeds]
    outcomes, seconds = train(cell.method, runs, setup)
    return Result(cell, tuple(outcomes), round(seconds, 2))
