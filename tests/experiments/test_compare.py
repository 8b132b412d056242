import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pathspace.experiments.compare import Row, compare, largest_difference
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.report import write_report
from pathspace.experiments.report.claim import claim_table
from pathspace.experiments.report.comparison import comparison_report, conclusion
from pathspace.experiments.report.table import notes
from pathspace.experiments.run import RESULT, RunConfig, RunResult, Validation
from pathspace.experiments.runner import RUNS, Runner, Runs
from pathspace.experiments.settings import Settings
from pathspace.experiments.storage import write_checked
from pathspace.experiments.terminal import Monitor

Make = Callable[..., Settings]


class Recorder(Monitor):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.begun: list[str] = []
        self.done: list[str] = []

    def stage(self, title: str, jobs: int, done: int = 0) -> None:  # noqa: ARG002
        self.stages.append((title, jobs))

    def validated(self, config: RunConfig, validation: Validation) -> None:
        if validation.step == 0:
            self.begun.append(config.key)

    def finished(self, label: str, words: str) -> None:  # noqa: ARG002
        self.done.append(label)


def without_seconds(results: list[RunResult]) -> list[RunResult]:
    return [replace(result, seconds=0.0, step_seconds=None) for result in results]


def test_a_comparison_measures_the_same_function_from_two_starts(
    tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd", "path-sgd"], rescale_exponent=3)
    recorder = Recorder()
    comparison = compare(settings, Runs(tmp_path, recorder))
    rows = {(row.method, row.start, row.rate_chosen_from): row for row in comparison.rows}
    assert rows["path-sgd", "rescaled", "balanced"].difference == 0.0
    assert rows["sgd", "rescaled", "balanced"].difference != 0.0
    for method in settings.methods:
        first = rows[method, "balanced", "balanced"]
        assert first.difference is None
        assert first.learning_rate == comparison.choices[method, "balanced"].learning_rate
        assert rows[method, "rescaled", "balanced"].learning_rate == first.learning_rate
        assert [run.config.seed for run in first.runs] == [0, 1]
        own = comparison.choices[method, "rescaled"].learning_rate
        assert ((method, "rescaled", "rescaled") in rows) == (own != first.learning_rate)
    assert [runs for _, runs in recorder.stages] == [2 * 2 * 2, 2 * len(comparison.rows)]
    assert len(recorder.done) == len(recorder.begun)


def test_finished_runs_are_taken_from_disk_and_the_rest_is_done(
    tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd", "path-sgd"], epochs=1)
    whole = compare(settings, Runs(tmp_path))
    lost = sorted((tmp_path / "runs").glob(f"*/{RESULT}"))[::3]
    for path in lost:
        path.unlink()
    recorder = Recorder()
    again = compare(settings, Runs(tmp_path, recorder))
    assert sorted(recorder.begun) == sorted(path.parent.name for path in lost)
    for one, other in zip(whole.rows, again.rows, strict=True):
        assert without_seconds(list(one.runs)) == without_seconds(list(other.runs))
        assert one.difference == other.difference


def test_where_there_is_one_rate_nothing_is_tuned(
    tiny_settings: Make, tmp_path: Path, no_pictures: None
) -> None:
    some = {"methods": ["sgd", "path-sgd"], "baselines": ["sgd"], "epochs": 1}
    settings = tiny_settings(learning_rates=[0.05], weight_decays=[0.1], seeds=2, **some)
    given = compare(settings, Runs(tmp_path / "given"))
    assert given.tuning == ()
    assert len(list((tmp_path / "given").glob("runs/*/result.json"))) == sum(
        len(r.runs) for r in given.rows
    )
    assert {(row.learning_rate, row.weight_decay) for row in given.rows} == {(0.05, 0.1)}
    # both reports say that the rates were given, and draw no curve over rates
    report = comparison_report(given, title="a test", configuration={"versions": {}})
    page = write_report(report, tmp_path).read_text()
    assert "Learning rates were given: 0.05.<" in page
    assert "Learning rates were given: 0.05. Decay: 0.1." in page
    own = replace(given, settings=replace(settings, method_rates={"path-sgd": [0.3]}))
    assert "Learning rates were given: 0.05; Path-SGD: 0.3." in notes(own)
    assert "Learning rates were given: 0.05; Path-SGD: 0.3. Decay: 0.1." in claim_table(own).notes
    table = claim_table(given)
    assert "failed" not in table.columns
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}
    recorder = Recorder()
    alone = replace(settings, methods=("sgd",), starts=("balanced",), verified_seeds=1)
    compare(alone, Runs(tmp_path / "alone", recorder))
    assert [runs for _, runs in recorder.stages] == [2]  # nor is there anything to be checked
    chosen = compare(replace(settings, learning_rates=(0.02, 0.05)), Runs(tmp_path / "chosen"))
    assert len(chosen.tuning) == len(settings.methods) * len(settings.starts) * 2
    # config.json names the seeds that were run, and no others
    for comparison in (given, chosen):
        content = Configuration("compare", "a test", comparison.settings).as_dict()
        assert content["tuning_seeds"] == sorted({run.config.seed for run in comparison.tuning})


@pytest.mark.slow
def test_two_processes_give_what_one_gives(
    tiny_settings: Make, quick_processes: Runner, tmp_path: Path
) -> None:
    settings = tiny_settings()
    configs = [
        settings.run_config(method, "rescaled", 0.01, seed, evaluate_test=True)
        for method in settings.methods
        for seed in range(2)
    ]
    recorder = Recorder()
    alone = Runs(tmp_path / "one").results(configs, "One")
    two = Runs(tmp_path / "two", recorder, runner=quick_processes)
    shared = two.results(configs, "Two")
    assert without_seconds(alone) == without_seconds(shared)
    assert sorted(recorder.done) == sorted(config.label for config in configs)


def test_astored_result_of_another_configuration_is_not_used(
    tiny_settings: Make, tmp_path: Path
) -> None:
    config = tiny_settings().run_config("sgd", "balanced", 0.1, 0, evaluate_test=True)
    runs = Runs(tmp_path)
    runs.results([config], "")
    path = tmp_path / RUNS / config.key / RESULT
    content = json.loads(path.read_text())
    content["config"]["epochs"] += 1
    content["test_error"] = -1.0
    write_checked(path, content)
    (result,) = runs.results([config], "")
    assert result.test_error is not None
    assert result.test_error >= 0


def test_curves_that_end_before_any_step_could_part_them_are_not_called_the_same(
    tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd"], learning_rates=[1e30], epochs=1)
    comparison = compare(settings, Runs(tmp_path))
    assert {len(run.losses) for row in comparison.rows for run in row.runs} == {1}
    assert [row.difference for row in comparison.rows] == [None, None]
    assert not any("The same training curve" in sentence for sentence in conclusion(comparison))


@pytest.fixture
def result(tiny_settings: Make) -> Callable[..., RunResult]:
    config = tiny_settings().run_config("sgd", "balanced", 0.1, 0, evaluate_test=True)

    def make(
        losses: tuple[float, ...], test_error: float | None = 1.0, diverged_at: int | None = None
    ) -> RunResult:
        return RunResult(config, losses, (), test_error, diverged_at, 2.0)

    return make


def test_the_largest_difference_is_over_all_steps(result: Callable[..., RunResult]) -> None:
    one, other = result((3.0, 2.0, 1.0)), result((3.0, 2.5, 1.25))
    assert largest_difference(one, other) == 0.5
    assert largest_difference(one, one) == 0.0
    assert largest_difference(one, result((3.0,), None, 1)) == math.inf
    assert largest_difference(result((3.0,), None, 1), result((3.0,), None, 1)) == 0.0


def row(runs: list[Any]) -> Row:
    return Row("sgd", "balanced", 0.1, "balanced", tuple(runs), None)


def test_mean_and_deviation_over_seeds(result: Callable[..., RunResult]) -> None:
    runs = [result((1.0,), error) for error in (1.0, 2.0, 6.0)]
    assert row(runs).mean_test_error == 3.0
    assert row(runs).test_error_deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert row(runs[:1]).test_error_deviation is None
    assert row(runs).mean_seconds == 2.0


def test_a_diverged_run_leaves_no_mean(result: Callable[..., RunResult]) -> None:
    runs = [result((1.0,), 1.0), result((1.0,), None, 1)]
    assert row(runs).mean_test_error is None
    assert row(runs).test_error_deviation is None
    assert row(runs).diverged == 1
