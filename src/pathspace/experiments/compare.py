"""The comparison: choose learning rates, train every method from every start, measure the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pathspace.experiments.engine import steps_per_epoch
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.jobs import Runs, load_task
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import count_weights
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.selection import (
    Choice,
    choose,
    chosen_runs,
    decay_runs,
    only_choices,
    tuning_runs,
)
from pathspace.experiments.settings import Settings
from pathspace.experiments.tasks.task import Task

Run = Callable[[Sequence[RunConfig], str], list[RunResult]]


@dataclass(frozen=True)
class Row:
    """Runs of one method from one start at one learning rate, one per seed.

    Attributes:
        method: A name in `methods.METHODS`.
        start: A name in `starts.STARTS`.
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
    """Return the task of a comparison, before any of its runs begins.

    Raises:
        ConfigurationError: The task cannot be had, or a setting does not fit it.
    """
    task = load_task(settings.task, settings.task_options, data_dir)
    steps_per_epoch(settings.batch_size, task)
    return task


def compare(settings: Settings, runs: Runs, seed: int | None = None) -> Comparison:
    """Run a whole comparison.

    The first start runs at the rate chosen from it. Every other start runs at that same rate, for
    the difference of the curves, and, where validation from that start prefers another rate or
    decay, at its own as well; without `shared_rates`, at its own alone.

    Args:
        settings: Tasks, methods, starts, budget.
        runs: How runs are done, and where they are kept.
        seed: Of a single run, for settings of one method, one start and one rate; None takes the
            seeds of the settings.

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
            return (
                run_distinct(configs, every, title)
                if settings.verified_seeds
                else every(configs, title)
            )

        tuning: list[RunResult] = []
        choices = only_choices(settings)
        if configs := tuning_runs(settings):
            tuning += run(configs, "Choosing learning rates on the validation split")
            if others := decay_runs(settings, choose(tuning, settings.tuning)):
                tuning += run(others, "Choosing decays on the validation split")
            choices = choose(tuning, settings.tuning)
        if settings.verified_seeds:
            checks = chosen_runs(settings, choices, seeds=settings.verified_seeds)
            check_symmetry(checks, every, "Checking that equal runs are equal")
        rows = [row for method in settings.methods for row in _rows(settings, method, choices)]
        configs = [config for row in rows for config in _configs(settings, row, seeds)]
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
        own = choices[method, start]
        differs = (own.learning_rate, own.weight_decay) != (
            shared.learning_rate,
            shared.weight_decay,
        )
        if settings.shared_rates or not differs:
            rows.append(replace(at_shared, start=start))
        if differs:
            rows.append(Row(method, start, own.learning_rate, start, weight_decay=own.weight_decay))
    return rows


def _configs(settings: Settings, row: Row, seeds: Iterable[int]) -> list[RunConfig]:
    return [
        settings.run_config(
            row.method,
            row.start,
            row.learning_rate,
            seed,
            evaluate_test=True,
            weight_decay=row.weight_decay,
        )
        for seed in seeds
    ]


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
    """Return the results of all runs, doing each computation once.

    Args:
        configs: The runs that results are wanted of.
        run: Does runs, under a title, and returns their results in order.
        title: What this stage is called.

    Returns:
        One result per configuration. A run that another one stood for has that one's numbers.
    """
    distinct = list({stands.key: stands for stands in map(representative, configs)}.values())
    results = {result.config.key: result for result in run(distinct, title)}
    return [replace(results[representative(config).key], config=config) for config in configs]


def check_symmetry(configs: Iterable[RunConfig], run: Run, title: str) -> None:
    """Do the runs that others stand for, and these, and compare them bit by bit.

    Args:
        configs: Runs of every method and start; those that stand for themselves are left out.
        run: See `run_distinct`.
        title: See `run_distinct`.

    Raises:
        ConfigurationError: A run differs from what was to stand for it.
    """
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
