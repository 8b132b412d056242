"""Choosing learning rates: one grid for every method and start, judged on the validation split alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings


@dataclass(frozen=True)
class Choice:
    """The learning rate chosen for a method and a start.

    Attributes:
        learning_rate: The one with the least mean validation error; ties go to the least validation loss.
        scores: The mean validation error of every rate in the grid; infinite where a run diverged.
        at_edge: Whether the choice is the smallest or largest rate of a grid of several: a wider grid may do
            better.
        all_diverged: Whether no rate came through; the choice is then the smallest one.
    """

    learning_rate: float
    scores: dict[float, float]
    at_edge: bool
    all_diverged: bool


def tuning_runs(settings: Settings) -> list[RunConfig]:
    """Return the runs that learning rates are chosen by; none of them looks at the test split."""
    return [
        settings.run_config(method, start, rate, FIRST_TUNING_SEED + seed, evaluate_test=False)
        for method in settings.methods
        for start in settings.starts
        for rate in settings.learning_rates
        for seed in range(settings.tuning_seeds)
    ]


def choose(results: Iterable[RunResult]) -> dict[tuple[str, str], Choice]:
    """Choose a learning rate for every (method, start) among the results of `tuning_runs`."""
    scores: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        config = result.config
        scores[config.method, config.start][config.learning_rate].append(result.validation_score)
    return {pair: _best(by_rate) for pair, by_rate in scores.items()}


def _best(by_rate: dict[float, list[tuple[float, float]]]) -> Choice:
    means = {
        rate: tuple(
            math.fsum(column) / len(column) if all(map(math.isfinite, column)) else math.inf
            for column in zip(*pairs, strict=True)
        )
        for rate, pairs in sorted(by_rate.items())
    }
    rate = min(means, key=lambda rate: (means[rate], rate))
    return Choice(
        learning_rate=rate,
        scores={rate: error for rate, (error, _) in means.items()},
        at_edge=len(means) > 1 and rate in (min(means), max(means)),
        all_diverged=math.isinf(means[rate][0]),
    )
