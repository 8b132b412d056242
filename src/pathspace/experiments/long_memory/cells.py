"""The cells of the comparison, a run each of a method at a rate from a seed, and what they show.

All methods see the same seeds, hence the same starts and batches, so every test is one of pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from pathspace.experiments.long_memory.protocol import Cell, Protocol, Setting
from pathspace.experiments.long_memory.training import Result, compute
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test
from pathspace.experiments.settings import FIRST_TUNING_SEED


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


def by_rate(results: Sequence[Result], method: str) -> dict[float, list[Result]]:
    """Return all runs of a method by their rate."""
    found: dict[float, list[Result]] = {}
    for result in results:
        if result.cell.method == method:
            found.setdefault(result.cell.rate, []).append(result)
    return dict(sorted(found.items()))


def chosen_rate(results: Sequence[Result], method: str) -> float:
    """Return the rate with the most successful runs.

    Ties go to the fewest steps, a failure counting as all; where no run learned, to the least
    median error.
    """

    def order(item: tuple[float, list[Result]]) -> tuple[float, ...]:
        rate, runs = item
        steps = [run.steps for run in runs if run.steps is not None]
        errors = [math.inf if run.error is None else run.error for run in runs]
        return -len(steps), sum(steps), statistics.median_high(errors), rate

    return min(by_rate(results, method).items(), key=order)[0]


def fill(
    protocol: Protocol,
    do: Callable[..., list[Result]],
    folder: Path,  # noqa: ARG001
) -> dict[Setting, list[Row]]:
    """Return the rows of all settings, choosing rates before the reported runs; see `tables`."""
    rows = {}
    of_protocol = partial(compute, protocol=protocol)
    for setting in settings(protocol):
        tuning = do(Result, tuning_cells(protocol, setting), of_protocol)
        rates = {method: chosen_rate(tuning, method) for method in protocol.methods}
        reported = do(Result, reported_cells(protocol, setting, rates), of_protocol)
        rows[setting] = compared(protocol, tuning, reported)
    return rows


@dataclass(frozen=True)
class Against:
    """A method against the reference, over pairs of runs with the same seed.

    Attributes:
        wins: Pairs in which the method is better.
        losses: Pairs in which the reference is.
        p: Of the exact sign test (for successes McNemar's), adjusted by Holm for all methods of the
            setting.
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
        tuning: Runs by rate, on seeds that are not reported.
        reported: Runs at the chosen rate.
        against: By what is compared, "learned", "steps" and "window"; empty for the reference.
    """

    method: str
    rate: float
    tuning: Mapping[float, Sequence[Result]]
    reported: Sequence[Result]
    against: Mapping[str, Against]

    @property
    def window(self) -> int:
        """At how many rates at least half of the tuning runs learned the problem."""
        return sum(2 * learned(runs) >= len(runs) for runs in self.tuning.values())

    @property
    def median_steps(self) -> float:
        """Median steps of all reported runs, infinite for those that never learned."""
        return statistics.median(map(_steps, self.reported))


def learned(runs: Sequence[Result]) -> int:
    """Return how many runs learned the problem."""
    return sum(run.steps is not None for run in runs)


def rates_learned(row: Row) -> list[int]:
    """Return for each tuning seed at how many rates it learned the problem."""
    return [learned(runs) for runs in zip(*row.tuning.values(), strict=True)]


def compared(protocol: Protocol, tuning: Sequence[Result], reported: Sequence[Result]) -> list[Row]:
    """Return the rows of a setting, in the order of the methods."""
    rows = []
    for method in protocol.methods:
        ((rate, runs),) = by_rate(reported, method).items()
        rows.append(Row(method, rate, by_rate(tuning, method), runs, {}))
    against = _against_reference(rows, protocol.reference)
    return [replace(row, against=against[row.method]) for row in rows]


def _against_reference(rows: Sequence[Row], name: str) -> dict[str, dict[str, Against]]:
    """Return by method, and by what is compared, each method but the reference against it."""
    measures: dict[str, Callable[[Row], Sequence[float]]] = {
        "learned": lambda row: [run.steps is not None for run in row.reported],
        # never: minus infinity
        "steps": lambda row: [-_steps(run) for run in row.reported],
        "window": rates_learned,
    }
    (reference,) = [row for row in rows if row.method == name]
    others = [row for row in rows if row.method != name]
    against: dict[str, dict[str, Against]] = {row.method: {} for row in rows}
    for what, measure in measures.items():
        tests = [_signs(measure(row), measure(reference)) for row in others]
        adjusted = holm([sign_test(*signs) for signs in tests])
        for row, signs, p in zip(others, tests, adjusted, strict=True):
            against[row.method][what] = Against(*signs, p)
    return against


def _steps(run: Result) -> float:
    return math.inf if run.steps is None else run.steps


def _signs(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int]:
    pairs = list(zip(ours, theirs, strict=True))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
