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
from typing import Any

from pathspace.experiments.long_memory.protocol import Cell, Protocol, Setting
from pathspace.experiments.long_memory.training import Result, compute
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test
from pathspace.experiments.settings import FIRST_TUNING_SEED
from pathspace.experiments.storage import finite


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
) -> dict[Setting, dict[str, Row]]:
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
    """The row of one method.

    Attributes:
        rate: The chosen rate.
        tuning: By rate how many runs learned the problem, on seeds that are not reported.
        rates_learned: For each of these seeds at how many rates it learned the problem.
        window: At how many rates at least half of the tuning runs learned it.
        learned: How many of the runs at the chosen rate learned it.
        runs: How many there are.
        median_steps: Their median steps; None where it is that of a run that never learned.
        against_reference: By what is compared, "learned", "steps" and "window"; empty for the
            reference.
        reported: The runs at the chosen rate.
    """

    rate: float
    tuning: Mapping[str, int]
    rates_learned: Sequence[int]
    window: int
    learned: int
    runs: int
    median_steps: float | None
    against_reference: Mapping[str, Against]
    reported: Sequence[Mapping[str, Any]]


def compared(
    protocol: Protocol, tuning: Sequence[Result], reported: Sequence[Result]
) -> dict[str, Row]:
    """Return the rows of a setting by method."""
    rows = {}
    measures: dict[str, dict[str, Sequence[float]]] = {"learned": {}, "steps": {}, "window": {}}
    for method in protocol.methods:
        runs = [run for run in reported if run.cell.method == method]
        steps = [math.inf if run.steps is None else run.steps for run in runs]
        rows[method] = _row(by_rate(tuning, method), runs, steps)
        measures["learned"][method] = [math.isfinite(step) for step in steps]
        measures["steps"][method] = [-step for step in steps]  # never: minus infinity
        measures["window"][method] = rows[method].rates_learned
    for what, values in measures.items():
        for method, test in _against(values, protocol.reference).items():
            against = {**rows[method].against_reference, what: test}
            rows[method] = replace(rows[method], against_reference=against)
    return rows


def _row(
    tuning: Mapping[float, Sequence[Result]], runs: Sequence[Result], steps: Sequence[float]
) -> Row:
    """Return the row of a method, not compared yet.

    Args:
        tuning: Its runs that chose the rate, by rate.
        runs: Its runs at the chosen rate.
        steps: How many steps each of these took, infinity where it never learned.
    """
    tried = {rate: [run.steps is not None for run in some] for rate, some in tuning.items()}
    return Row(
        rate=runs[0].cell.rate,
        tuning={f"{rate:g}": sum(learned) for rate, learned in tried.items()},
        rates_learned=[sum(of_seed) for of_seed in zip(*tried.values(), strict=True)],
        window=sum(2 * sum(learned) >= len(learned) for learned in tried.values()),
        learned=sum(map(math.isfinite, steps)),
        runs=len(runs),
        median_steps=finite(statistics.median(steps)),
        against_reference={},
        reported=[_reported(run) for run in runs],
    )


def _reported(run: Result) -> dict[str, Any]:
    """Return what the JSON of a row says of a run."""
    cell = run.cell
    return {"rate": cell.rate, "seed": cell.seed, "steps": run.steps, "error": run.error}


def _against(values: Mapping[str, Sequence[float]], reference: str) -> dict[str, Against]:
    """Return each method but the reference against it, by values of pairs, of which the greater is better."""
    others = [method for method in values if method != reference]
    signs: list[tuple[int, int]] = []
    for method in others:
        pairs = list(zip(values[method], values[reference], strict=True))
        signs.append((sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)))
    adjusted = holm([sign_test(*each) for each in signs])
    tests = zip(others, signs, adjusted, strict=True)
    return {method: Against(*each, p) for method, each, p in tests}
