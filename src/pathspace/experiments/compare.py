"""The comparison: choose learning rates, train every method from every start, measure the differences.

Learning rate and decay are chosen from one grid for every method and start, judged on the
validation split alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import stdev

from pathspace.experiments.engine import steps_per_epoch
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import count_weights
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.runner import Runs, load_task
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings
from pathspace.experiments.tasks.task import Task

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
    """Return the runs that decays are chosen by in turn: the other decays, with the rates that `tuning_runs` chose."""
    if settings.tuning != "in turn":
        return []
    others = product(choices.items(), settings.weight_decays[1:])
    points = [(*pair, choice.learning_rate, decay) for (pair, choice), decay in others]
    return _tuning(settings, points, settings.tuning_seeds)


def only_choices(settings: Settings) -> dict[tuple[str, str], Choice]:
    """Return the one rate and decay of every (method, start), where there is nothing to choose."""
    decay = settings.weight_decays[0]
    return {
        (method, start): Choice(settings.rates_of(method)[0], {}, False, False, decay)
        for method, start in product(settings.methods, settings.starts)
    }


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
    """Return the least pair that is no further from the best one than a standard error of its mean over seeds."""
    best = min(means, key=lambda pair: (means[pair], pair))
    error = means[best][0]
    if len(best_errors) < 2 or not math.isfinite(error):
        return best
    limit = error + stdev(best_errors) / math.sqrt(len(best_errors))
    return min(pair for pair, mean in means.items() if mean[0] <= limit)


Run = Callable[[Sequence[RunConfig], str], list[RunResult]]


@dataclass(frozen=True)
class Row:
    """Runs of one method from one start at one learning rate, one per seed.

    Attributes:
        method: A name in `methods.METHODS`.
        start: A name in `methods.STARTS`.
        learning_rate: The rate.
        rate_chosen_from: The start whose validation runs chose the rate.
        runs: One per seed, in the order of the seeds.
        difference: The largest absolute difference between two training-loss curves of the same
            seed and learning rate, this start's and the first start's, over all steps and seeds.
            Exactly 0 for an invariant method; infinite where one curve diverged and the other did
            not; None for the first start, for rates of its own, and where all ended at the first
            loss, which no step has changed.
        weight_decay: The decay, chosen along with the rate.
    """

    method: str
    start: str
    learning_rate: float
    rate_chosen_from: str
    runs: tuple[RunResult, ...] = ()
    difference: float | None = None
    weight_decay: float = 0.0

    @property
    def diverged(self) -> int:
        """The number of runs that diverged."""
        return sum(run.diverged_at is not None for run in self.runs)

    @property
    def mean_test_error(self) -> float | None:
        """The mean over seeds; None as soon as one run diverged: a mean of the others would flatter."""
        errors = [run.test_error for run in self.runs if run.test_error is not None]
        return math.fsum(errors) / len(errors) if len(errors) == len(self.runs) else None

    @property
    def test_error_deviation(self) -> float | None:
        """The sample standard deviation over seeds; None for a single seed or where a run diverged."""
        mean = self.mean_test_error
        if mean is None or len(self.runs) < 2:
            return None
        # perplexities may be so large that their squares are not finite
        apart = [run.test_error - mean for run in self.runs if run.test_error is not None]
        return math.hypot(*apart) / math.sqrt(len(apart) - 1)

    @property
    def mean_seconds(self) -> float:
        """Mean time spent in training steps, of all runs, those that ended early too."""
        return math.fsum(run.seconds for run in self.runs) / len(self.runs)


@dataclass(frozen=True)
class Comparison:
    """All that a comparison found.

    Attributes:
        settings: What was asked for.
        task_description: The task in one line.
        metric: What the test error is, with its unit.
        choices: The learning rate chosen for every (method, start); empty for a single run.
        rows: In the order of methods and starts.
        tuning: The runs that learning rates were chosen by; empty where nothing was to be chosen.
        weights: How many weights the model of each method has.
    """

    settings: Settings
    task_description: str
    metric: str
    choices: dict[tuple[str, str], Choice]
    rows: tuple[Row, ...]
    tuning: tuple[RunResult, ...]
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def runs(self) -> list[RunResult]:
        """The runs that are reported, row by row."""
        return [run for row in self.rows for run in row.runs]

    def own_rows(self, start: str) -> list[Row]:
        """Return `own_row` of every method from a start, in the order of the rows."""
        methods = dict.fromkeys(row.method for row in self.rows if row.start == start)
        return [self.own_row(method, start) for method in methods]

    def own_row(self, method: str, start: str) -> Row:
        """Return the row at the rate that was chosen from its start; the only one where both starts chose the same."""
        rows = [row for row in self.rows if (row.method, row.start) == (method, start)]
        return next((row for row in rows if row.rate_chosen_from == start), rows[0])

    @property
    def differences(self) -> dict[str, float]:
        """The largest `difference` of each method's rows; a method none of whose rows has one is left out."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.difference is not None:
                found[row.method] = max(row.difference, found.get(row.method, 0.0))
        return found


def check_task_of(settings: Settings, data_dir: Path | None) -> Task:
    """Return the task of a comparison, before any of its runs begins."""
    task = load_task(settings.task, settings.task_options, data_dir)
    steps_per_epoch(settings.batch_size, task)
    return task


def compare(settings: Settings, runs: Runs, seed: int | None = None) -> Comparison:
    """Run a whole comparison; a `seed` stands for all of the settings', in a single run.

    The first start runs at the rate chosen from it. Every other start runs at that same rate, for
    the difference of the curves, and, where validation from that start prefers another rate or
    decay, at its own as well; without `shared_rates`, at its own alone.

    Raises:
        ConfigurationError: The task cannot be had, or a setting does not fit it.
        KeyboardInterrupt: The user stopped; the same call continues.
    """
    task = check_task_of(settings, runs.data_dir)
    seeds = range(settings.seeds) if seed is None else [seed]
    with runs.runner:

        def every(configs: Sequence[RunConfig], title: str) -> list[RunResult]:
            return runs.results(configs, title, settings.checkpoint_every)

        def run(configs: Sequence[RunConfig], title: str) -> list[RunResult]:
            if settings.verified_seeds:
                return run_distinct(configs, every, title)
            return every(configs, title)

        tuning: list[RunResult] = []
        choices = only_choices(settings)
        if configs := tuning_runs(settings):
            tuning += run(configs, "Choosing learning rates on the validation split")
            if others := decay_runs(settings, choose(tuning, settings.tuning)):
                tuning += run(others, "Choosing decays on the validation split")
            choices = choose(tuning, settings.tuning)
        if settings.verified_seeds:
            points = [(*pair, one.learning_rate, one.weight_decay) for pair, one in choices.items()]
            checks = _tuning(settings, points, settings.verified_seeds)
            check_symmetry(checks, every, "Checking that equal runs are equal")
        rows = [row for method in settings.methods for row in _rows(settings, method, choices)]
        configs = [_config(settings, row, seed) for row, seed in product(rows, seeds)]
        final = run(configs, "Training with the chosen rates" if tuning else "Training")
    return Comparison(
        settings=settings,
        task_description=task.description,
        metric=task.metric,
        choices=choices if seed is None else {},
        rows=_with_runs(settings, rows, final),
        tuning=tuple(tuning),
        weights=_weights(settings, task),
    )


def _weights(settings: Settings, task: Task) -> dict[str, int]:
    models = {method: settings.model_of(method) for method in settings.methods}
    return {
        method: count_weights(name, task.input_size, task.output_size, options)
        for method, (name, options) in models.items()
    }


def _rows(settings: Settings, method: str, choices: dict[tuple[str, str], Choice]) -> list[Row]:
    """Return the rows of a method, before their runs are done."""
    first, *others = settings.starts
    shared = choices[method, first]
    at_shared = Row(method, first, shared.learning_rate, first, weight_decay=shared.weight_decay)
    rows = [at_shared]
    for start in others:
        choice = choices[method, start]
        own = Row(method, start, choice.learning_rate, start, weight_decay=choice.weight_decay)
        at_first = replace(at_shared, start=start)
        chosen = own.learning_rate, own.weight_decay
        differs = chosen != (shared.learning_rate, shared.weight_decay)
        if settings.shared_rates or not differs:
            rows.append(at_first)
        if differs:
            rows.append(own)
    return rows


def _config(settings: Settings, row: Row, seed: int) -> RunConfig:
    which = row.method, row.start, row.learning_rate, seed
    return settings.run_config(*which, evaluate_test=True, weight_decay=row.weight_decay)


def _with_runs(
    settings: Settings, rows: Sequence[Row], final: Sequence[RunResult]
) -> tuple[Row, ...]:
    found: list[Row] = []
    reference: tuple[RunResult, ...] = ()
    for number, row in enumerate(rows):
        runs = tuple(final[number * settings.seeds : (number + 1) * settings.seeds])
        difference = None
        if row.start == settings.starts[0]:
            reference = runs
        elif row.rate_chosen_from == settings.starts[0]:
            apart = [
                largest_difference(one, other)
                for one, other in zip(reference, runs, strict=True)
                if one.diverged_at != other.diverged_at or len(one.losses) > 1
            ]
            difference = max(apart, default=None)
        found.append(replace(row, runs=runs, difference=difference))
    return tuple(found)


def largest_difference(one: RunResult, other: RunResult) -> float:
    """Return the largest absolute difference between two training-loss curves.

    Infinite when one run diverged at a step that the other one passed.
    """
    if one.diverged_at != other.diverged_at:
        return math.inf
    return max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)), default=0.0)


def representative(config: RunConfig) -> RunConfig:
    """Return the run that is the same computation as `config`, from the balanced start; or `config` itself.

    Factors that are powers of two round nothing. With them an invariant method, and one that
    balances first, sees the rescaled start as it sees the balanced one; and balancing leaves a
    balanced start alone. That is a claim about code, so every comparison that uses it checks it by
    runs of its own: see `Settings.verified_seeds`.
    """
    method = METHODS[config.method]
    if config.start not in ("balanced", "rescaled") or config.rescale_factor:
        return config
    if method.balances_first and method.otherwise:
        return replace(config, start="balanced", method=method.otherwise)
    return replace(config, start="balanced") if method.invariant else config


def run_distinct(configs: Sequence[RunConfig], run: Run, title: str) -> list[RunResult]:
    """Return one result per configuration, doing each computation once.

    A run that another one stood for has that one's numbers. `run` does runs, under a title, and returns
    their results in order.
    """
    distinct = list({stands.key: stands for stands in map(representative, configs)}.values())
    results = {result.config.key: result for result in run(distinct, title)}
    return [replace(results[representative(config).key], config=config) for config in configs]


def check_symmetry(configs: Iterable[RunConfig], run: Run, title: str) -> None:
    """Do the runs that others stand for, and these, and compare them bit by bit."""
    pairs = [(config, representative(config)) for config in configs]
    pairs = [(config, stands) for config, stands in pairs if config != stands]
    needed = {config.key: config for pair in pairs for config in pair}
    results = {result.config.key: result for result in run(list(needed.values()), title)}
    for config, stands in pairs:
        if _curves(results[config.key]) != _curves(results[stands.key]):
            raise ConfigurationError(
                f"The run {config.label!r} should be the same computation as {stands.label!r} and is not: the method "
                "does not have the symmetry that it claims. Set verified_seeds = 0 to do every run."
            )


def _curves(result: RunResult) -> tuple[object, ...]:
    # as plain values: a loss that is not finite equals itself there, and is what it becomes on disk
    values = result.as_dict()
    return result.losses, values["validations"]
