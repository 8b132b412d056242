"""The cells of the comparison, a run each of a method at a rate from a seed, and what they show.

All methods see the same seeds, hence the same starts and batches, so every test is one of pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from pathspace.experiments.long_memory.protocol import Cell, Protocol, Setting
from pathspace.experiments.long_memory.training import Outcome, train
from pathspace.experiments.monitor import ProgressCallback, unheard
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test
from pathspace.experiments.settings import FIRST_TUNING_SEED


@dataclass(frozen=True)
class Result:
    """What became of a run, and the processor time that it took."""

    cell: Cell
    outcome: Outcome
    seconds: float

    @property
    def words(self) -> str:
        """What came out, in a line."""
        cell, steps = self.cell, self.outcome.steps
        where = f"{cell.setting.problem}, T = {cell.setting.length}, H = {cell.setting.hidden}"
        how = "did not learn it" if steps is None else f"learned it in {steps} steps"
        return f"{cell.method} at {cell.rate:g}, seed {cell.seed} ({where}): {how}, {self.seconds:.0f} s"


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

    Ties go to the fewest steps, a failure counting as all; where no run learned, to the least
    median error.
    """

    def order(item: tuple[float, list[Outcome]]) -> tuple[float, ...]:
        rate, outcomes = item
        steps = [outcome.steps for outcome in outcomes if outcome.steps is not None]
        errors = sorted(math.inf if o.error is None else o.error for o in outcomes)
        return -len(steps), sum(steps), errors[len(errors) // 2], rate

    return min(by_rate(results, method).items(), key=order)[0]


def compute(cell: Cell, protocol: Protocol, report: ProgressCallback = unheard) -> Result:
    """Train; the same numbers each time, on one machine and version."""
    began = time.process_time()
    outcome = train(cell, protocol, report)
    return Result(cell, outcome, round(time.process_time() - began, 2))


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
        rates = chosen_rates(protocol, tuning)
        reported = do(Result, reported_cells(protocol, setting, rates), of_protocol)
        rows[setting] = compared(protocol, setting, tuning, reported)
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
    tuning, reported = (
        [r for r in results if r.cell.setting == setting] for results in (tuning, reported)
    )
    rows = {
        method: Row(method, rate, by_rate(tuning, method), by_rate(reported, method)[rate], {})
        for method, rate in chosen_rates(protocol, tuning).items()
    }
    against = _against_reference(rows, protocol.reference)
    return [replace(row, against=against[method]) for method, row in rows.items()]


def _against_reference(rows: Mapping[str, Row], name: str) -> dict[str, dict[str, Against]]:
    """Return by method, and by what is compared, each method but the reference against it."""
    measures: dict[str, Callable[[Row], Sequence[float]]] = {
        "learned": lambda row: [outcome.steps is not None for outcome in row.reported],
        # never: minus infinity
        "steps": lambda row: [-_steps(outcome) for outcome in row.reported],
        "window": rates_learned,
    }
    others = [method for method in rows if method != name]
    against: dict[str, dict[str, Against]] = {method: {} for method in rows}
    for what, measure in measures.items():
        reference = measure(rows[name])
        tests = [_signs(measure(rows[method]), reference) for method in others]
        adjusted = holm([sign_test(*signs) for signs in tests])
        for method, signs, p in zip(others, tests, adjusted, strict=True):
            against[method][what] = Against(*signs, p)
    return against


def _steps(outcome: Outcome) -> float:
    return math.inf if outcome.steps is None else outcome.steps


def _signs(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int]:
    pairs = list(zip(ours, theirs, strict=True))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
