"""Choosing learning rate and decay: one grid for every method and start, judged on the validation split alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import stdev

from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings

Pair = tuple[float, float]
"""A learning rate and a weight decay."""


@dataclass(frozen=True)
class Choice:
    """The learning rate and the weight decay chosen for a method and a start.

    Attributes:
        learning_rate: With `weight_decay`, the pair of the least mean validation error; ties go to
            the least validation loss, or, by one standard error, to the least rate.
        scores: The mean validation error of every rate in the grid, with the decay that is best for
            it; infinite where a run diverged. Empty where nothing was to be chosen.
        at_edge: Whether the choice is the smallest or largest rate of a grid of several: a wider
            grid may do better.
        all_diverged: Whether no rate came through; the choice is then the smallest one.
        weight_decay: See `learning_rate`.
        pairs: The mean validation error of every pair (rate, decay) that was tried.
        tried: How many runs the choice was made by.
        failed: How many of them diverged or ended no better than they began.
    """

    learning_rate: float
    scores: dict[float, float]
    at_edge: bool
    all_diverged: bool
    weight_decay: float = 0.0
    pairs: dict[tuple[float, float], float] = field(default_factory=dict)
    tried: int = 0
    failed: int = 0


def is_tuned(settings: Settings) -> bool:
    """Say whether a method has several rates or decays to choose from."""
    return len(settings.weight_decays) > 1 or any(
        len(settings.rates_of(m)) > 1 for m in settings.methods
    )


def tuning_runs(settings: Settings) -> list[RunConfig]:
    """Return the runs that rates and decays are chosen by; none of them looks at the test split.

    With `tuning = "in turn"` they all have the first decay, and `decay_runs` has the rest. Where
    nothing is tuned there is no run.
    """
    if not is_tuned(settings):
        return []
    decays = settings.weight_decays[:1] if settings.tuning == "in turn" else settings.weight_decays
    points = [
        (method, start, rate, decay)
        for method, start in product(settings.methods, settings.starts)
        for decay, rate in product(decays, settings.rates_of(method))
    ]
    return _tuning(settings, points, settings.tuning_seeds)


def decay_runs(settings: Settings, choices: Mapping[tuple[str, str], Choice]) -> list[RunConfig]:
    """Return the runs that decays are chosen by in turn: the other decays, with the chosen rates.

    Args:
        settings: Of the comparison.
        choices: What was chosen from the results of `tuning_runs`.
    """
    if settings.tuning != "in turn":
        return []
    others = product(choices.items(), settings.weight_decays[1:])
    points = [(*pair, choice.learning_rate, decay) for (pair, choice), decay in others]
    return _tuning(settings, points, settings.tuning_seeds)


def only_choices(settings: Settings) -> dict[tuple[str, str], Choice]:
    """Return the one rate and decay of every (method, start), where there is nothing to choose."""
    return {
        (method, start): Choice(
            settings.rates_of(method)[0], {}, False, False, settings.weight_decays[0]
        )
        for method in settings.methods
        for start in settings.starts
    }


def chosen_runs(
    settings: Settings, choices: Mapping[tuple[str, str], Choice], *, seeds: int
) -> list[RunConfig]:
    """Return runs of the length of tuning runs, with what was chosen, for every method and start."""
    points = [
        (*pair, choice.learning_rate, choice.weight_decay) for pair, choice in choices.items()
    ]
    return _tuning(settings, points, seeds)


def _tuning(
    settings: Settings, points: Iterable[tuple[str, str, float, float]], seeds: int
) -> list[RunConfig]:
    """Return the runs of so many seeds at each point: a method, a start, a rate and a decay."""
    return [
        settings.run_config(
            method,
            start,
            rate,
            FIRST_TUNING_SEED + seed,
            evaluate_test=False,
            weight_decay=decay,
            epochs=settings.tuning_epochs,
        )
        for (method, start, rate, decay), seed in product(points, range(seeds))
    ]


def choose(results: Iterable[RunResult], tuning: str = "grid") -> dict[tuple[str, str], Choice]:
    """Choose rate and decay for every (method, start) among the results of `tuning_runs` and `decay_runs`.

    By `"one standard error"`, which is what the best pair's mean over its seeds is known to, the
    least rate, and of its decays the least, is taken among the pairs that are no further from the
    best: which of two such rates is best is chance, and the larger one may diverge on another seed
    (Breiman, Friedman, Olshen and Stone, 1984).
    """
    grouped: dict[tuple[str, str], list[RunResult]] = defaultdict(list)
    for result in results:
        grouped[result.config.method, result.config.start].append(result)
    return {pair: _best(group, tuning == "one standard error") for pair, group in grouped.items()}


def _best(results: list[RunResult], cautious: bool) -> Choice:
    by_pair: dict[Pair, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        pair = result.config.learning_rate, result.config.weight_decay
        by_pair[pair].append(result.validation_score)
    means = {pair: _means(scores) for pair, scores in sorted(by_pair.items())}
    best = min(means, key=lambda pair: (means[pair], pair))
    if cautious:
        best = _least_within_one_error(means, [error for error, _ in by_pair[best]])
    rate, decay = best
    scores: dict[float, float] = {}
    for (one, _), (error, _) in means.items():
        scores[one] = min(error, scores.get(one, math.inf))
    return Choice(
        learning_rate=rate,
        scores=scores,
        at_edge=len(scores) > 1 and rate in (min(scores), max(scores)),
        all_diverged=math.isinf(means[best][0]),
        weight_decay=decay,
        pairs={pair: error for pair, (error, _) in means.items()},
        tried=len(results),
        failed=sum(result.failed for result in results),
    )


def _means(scores: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean error and the mean loss over seeds; infinite where one is not finite."""
    errors, losses = (
        math.fsum(column) / len(column) if all(map(math.isfinite, column)) else math.inf
        for column in zip(*scores, strict=True)
    )
    return errors, losses


def _least_within_one_error(
    means: dict[Pair, tuple[float, float]], best_errors: list[float]
) -> Pair:
    """Return the least pair that is no further from the best one than a standard error of its mean.

    Args:
        means: By pair, in order, its mean error and loss.
        best_errors: Of the best pair, one for each seed.
    """
    best = min(means, key=lambda pair: (means[pair], pair))
    error = means[best][0]
    if len(best_errors) < 2 or not math.isfinite(error):
        return best
    limit = error + stdev(best_errors) / math.sqrt(len(best_errors))
    return min(pair for pair, mean in means.items() if mean[0] <= limit)
