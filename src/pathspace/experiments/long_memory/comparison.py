"""What the runs show: successes, steps and rate windows of every method, each tested against the reference.

All methods see the same seeds, hence the same starts and batches, so every test is one of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pathspace.experiments.long_memory.cells import Result, Setting, by_rate, chosen_rate
from pathspace.experiments.long_memory.protocol import Protocol
from pathspace.experiments.long_memory.training import Outcome
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test


@dataclass(frozen=True)
class Against:
    """A method against the reference, over pairs of runs with the same seed.

    Attributes:
        wins: Pairs in which the method is better.
        losses: Pairs in which the reference is.
        p: Of the exact sign test (for successes McNemar's), adjusted by Holm for all methods of the setting.
    """

    wins: int
    losses: int
    p: float

    @property
    def verdict(self) -> str:
        """Say "better", "worse" or "" of the method."""
        if self.p >= LEVEL:
            return ""
        return "better" if self.wins > self.losses else "worse"


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        method: A name in `methods.METHODS`.
        rate: The chosen rate.
        tuning: Outcomes by rate, on seeds that are not reported.
        reported: Outcomes at the chosen rate.
        against: By what is compared, "learned", "steps" and "window"; empty for the reference.
    """

    method: str
    rate: float
    tuning: Mapping[float, Sequence[Outcome]]
    reported: Sequence[Outcome]
    against: Mapping[str, Against]

    @property
    def window(self) -> int:
        """At how many rates at least half of the tuning runs learned the problem."""
        return sum(2 * learned(outcomes) >= len(outcomes) for outcomes in self.tuning.values())

    @property
    def median_steps(self) -> float:
        """Median steps of all reported runs, infinite for those that never learned."""
        steps = sorted(map(_steps, self.reported))
        half = len(steps) // 2
        return steps[half] if len(steps) % 2 else (steps[half - 1] + steps[half]) / 2


def learned(outcomes: Sequence[Outcome]) -> int:
    """Return how many runs learned the problem."""
    return sum(outcome.steps is not None for outcome in outcomes)


def rates_learned(row: Row) -> list[int]:
    """Return for each tuning seed at how many rates it learned the problem."""
    return [learned(runs) for runs in zip(*row.tuning.values(), strict=True)]


def chosen_rates(protocol: Protocol, tuning: Sequence[Result]) -> dict[str, float]:
    """Return the rate of every method."""
    return {method: chosen_rate(tuning, method) for method in protocol.methods}


def compared(
    protocol: Protocol, setting: Setting, tuning: Sequence[Result], reported: Sequence[Result]
) -> list[Row]:
    """Return the rows of a setting, in the order of the methods."""
    tuning, reported = ([r for r in results if r.cell.setting == setting] for results in (tuning, reported))
    rates = chosen_rates(protocol, tuning)
    rows = {
        method: Row(
            method, rates[method], by_rate(tuning, method), by_rate(reported, method)[rates[method]], {}
        )
        for method in protocol.methods
    }
    reference = rows.pop(protocol.reference)
    measures: dict[str, Callable[[Row], Sequence[float]]] = {
        "learned": lambda row: [outcome.steps is not None for outcome in row.reported],
        "steps": lambda row: [-_steps(outcome) for outcome in row.reported],  # never: minus infinity
        "window": rates_learned,
    }
    against: dict[str, dict[str, Against]] = {method: {} for method in protocol.methods}
    for name, measure in measures.items():
        tests = [_signs(measure(row), measure(reference)) for row in rows.values()]
        adjusted = holm([sign_test(*signs) for signs in tests])
        for method, signs, p in zip(rows, tests, adjusted, strict=True):
            against[method][name] = Against(*signs, p)
    rows[protocol.reference] = reference
    return [
        Row(method, rows[method].rate, rows[method].tuning, rows[method].reported, against[method])
        for method in protocol.methods
    ]


def _steps(outcome: Outcome) -> float:
    return math.inf if outcome.steps is None else outcome.steps


def _signs(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int]:
    pairs = list(zip(ours, theirs, strict=True))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
