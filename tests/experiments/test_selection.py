import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from pathspace.experiments.compare import choose, decay_runs, tuning_runs
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.settings import Settings

Make = Callable[..., RunConfig]


@pytest.fixture
def result(tiny_config: Make) -> Callable[..., RunResult]:
    def make(
        rate: float, error: float, loss: float = 1.0, *, seed: int = 0, diverged: bool = False
    ) -> RunResult:
        config = replace(tiny_config(rate=rate, seed=seed), evaluate_test=False)
        validations = (Validation(0, 9.0, 90.0), Validation(4, loss, error))
        return RunResult(config, (1.0, 0.5), validations, None, 2 if diverged else None, 0.1)

    return make


def test_the_least_mean_validation_error_is_chosen(result: Callable[..., RunResult]) -> None:
    results = [
        result(0.1, 4.0),
        result(0.1, 6.0, seed=1),
        result(0.2, 3.0),
        result(0.2, 8.0, seed=1),
        result(0.3, 5.1),
    ]
    choice = choose(results)["sgd", "balanced"]
    assert choice.learning_rate == 0.1
    assert choice.scores == {0.1: 5.0, 0.2: 5.5, 0.3: 5.1}
    assert choice.at_edge


def test_ties_go_to_the_least_validation_loss(result: Callable[..., RunResult]) -> None:
    choice = choose([result(0.1, 4.0, 0.9), result(0.2, 4.0, 0.7), result(0.3, 4.0, 0.8)])[
        "sgd", "balanced"
    ]
    assert choice.learning_rate == 0.2
    assert not choice.at_edge


def test_a_rate_that_diverged_once_is_not_chosen(result: Callable[..., RunResult]) -> None:
    results = [
        result(0.1, 50.0),
        result(0.2, 1.0),
        result(0.2, 1.0, seed=1, diverged=True),
        result(0.3, 60.0),
    ]
    choice = choose(results)["sgd", "balanced"]
    assert choice.learning_rate == 0.1
    assert choice.scores[0.2] == math.inf


def test_when_every_rate_diverges_the_smallest_is_taken_and_marked(
    result: Callable[..., RunResult],
) -> None:
    choice = choose([result(0.2, 1.0, diverged=True), result(0.1, 1.0, diverged=True)])[
        "sgd", "balanced"
    ]
    assert choice.learning_rate == 0.1
    assert choice.all_diverged


def test_tuning_gives_everybody_the_same_grid_and_never_sees_test_data_or_reported_seeds(
    tiny_settings: Callable[..., Settings],
) -> None:
    settings = tiny_settings(tuning_seeds=2, seeds=3)
    runs = tuning_runs(settings)
    assert len(runs) == len({run.key for run in runs}) == 3 * 2 * 2 * 2
    assert not any(run.evaluate_test for run in runs)
    assert {run.seed for run in runs}.isdisjoint(range(settings.seeds))
    budgets = {(run.method, run.start): [] for run in runs}
    for run in runs:
        budgets[run.method, run.start].append(
            (run.learning_rate, run.seed, run.epochs, run.batch_size)
        )
    assert len({tuple(budget) for budget in budgets.values()}) == 1


def test_the_best_pair_of_rate_and_decay_is_chosen(result: Callable[..., RunResult]) -> None:
    def with_decay(rate: float, decay: float, error: float, **changes: bool) -> RunResult:
        one = result(rate, error, **changes)
        return replace(one, config=replace(one.config, weight_decay=decay))

    results = [
        with_decay(0.1, 0.0, 4.0),
        with_decay(0.1, 0.1, 5.0),
        with_decay(0.2, 0.0, 6.0),
        with_decay(0.2, 0.1, 3.0),
        with_decay(0.3, 0.0, 7.0),
        with_decay(0.3, 0.1, 1.0, diverged=True),
    ]
    choice = choose(results)["sgd", "balanced"]
    assert (choice.learning_rate, choice.weight_decay) == (0.2, 0.1)
    assert choice.scores == {0.1: 4.0, 0.2: 3.0, 0.3: 7.0}
    assert choice.pairs[0.3, 0.1] == math.inf
    assert (choice.tried, choice.failed) == (6, 1)
    assert not choice.at_edge


def test_of_rates_within_one_standard_error_the_least_is_taken(
    result: Callable[..., RunResult],
) -> None:
    # the best, 0.3, has a mean of 10 and a standard error of 1; 0.2 is 0.9 above, 0.1 is 1.1 above
    errors = {0.1: (11.1, 11.1, 11.1), 0.2: (10.9, 10.9, 10.9), 0.3: (8.0, 11.0, 11.0)}
    results = [result(rate, error) for rate, three in errors.items() for error in three]
    assert choose(results)["sgd", "balanced"].learning_rate == 0.3
    choice = choose(results, "one standard error")["sgd", "balanced"]
    assert (choice.learning_rate, choice.at_edge) == (0.2, False)
    # nothing tells how sure one seed is
    single = choose([result(0.1, 4.0), result(0.2, 3.9)], "one standard error")
    assert single["sgd", "balanced"].learning_rate == 0.2


def test_a_run_that_ends_no_better_than_it_began_has_failed(
    result: Callable[..., RunResult],
) -> None:
    assert choose([result(0.1, 1.0, 9.0), result(0.2, 1.0, 8.9)])["sgd", "balanced"].failed == 1


def test_rate_and_decay_are_chosen_in_turn_at_the_same_cost_for_everybody(
    tiny_settings: Callable[..., Settings], result: Callable[..., RunResult]
) -> None:
    grid = tiny_settings(weight_decays=[0.0, 0.1, 1.0], tuning_epochs=1)
    assert len(tuning_runs(grid)) == 3 * 2 * 2 * 3
    assert decay_runs(grid, {}) == []
    settings = replace(grid, tuning="in turn")
    first = tuning_runs(settings)
    assert len(first) == 3 * 2 * 2
    assert {run.weight_decay for run in first} == {0.0}
    assert {run.epochs for run in first} == {1}
    choices = {
        (method, start): replace(choose([result(0.1, 1.0)])["sgd", "balanced"], learning_rate=rate)
        for method, rate in zip(settings.methods, (0.01, 0.1, 0.1), strict=True)
        for start in settings.starts
    }
    others = decay_runs(settings, choices)
    assert len(others) == 3 * 2 * 2
    assert {(run.method, run.learning_rate) for run in others} == {
        (method, choices[method, "balanced"].learning_rate) for method in settings.methods
    }
    assert {run.weight_decay for run in others} == {0.1, 1.0}
    assert {run.key for run in first}.isdisjoint(run.key for run in others)


def test_a_method_may_have_a_grid_of_its_own(tiny_settings: Callable[..., Settings]) -> None:
    settings = tiny_settings(method_rates={"path-sgd": [1e-9, 1e-8]})
    tried = {(config.method, config.learning_rate) for config in tuning_runs(settings)}
    assert tried == {
        *((method, rate) for method in ("sgd", "balanced-adam") for rate in (0.01, 0.1)),
        *(("path-sgd", rate) for rate in (1e-9, 1e-8)),
    }
