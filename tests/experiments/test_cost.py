"""The study of cost: what it writes and prints, and that a costlier method has a larger ratio."""

import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pathspace
from command_line import call
from experiments.conftest import TINY, write_sections
from pathspace.experiments import execution, folders, methods
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.jobs import Runs
from pathspace.experiments.recipes import Recipe
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import cost, run_study
from pathspace.experiments.tasks import build_task

SETTINGS: dict[str, Any] = {
    **TINY,
    "starts": ["default"],
    "methods": ["sgd", "path-sgd"],
    "learning_rates": [0.01],
    "seeds": 1,
    "epochs": 1,
}
TIMED = """
title = "One that is timed"
[settings]
task = "adding"
task_options = { length = 6, train_size = 64, validation_size = 32, test_size = 32 }
model_options = { hidden = 6 }
starts = ["default"]
methods = ["sgd"]
learning_rates = [0.01]
seeds = 1
epochs = 1
batch_size = 16
[sizes.small]
[study]
name = "cost" # what is tested
[study.small]
rounds = 1 # the least
steps = 1 # the least
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(settings_from(("a test", SETTINGS)), Runs(tmp_path_factory.mktemp("runs")))


def costs_of(comparison: Comparison, folder: Path) -> list[dict[str, Any]]:
    """The costs that the study writes to a folder."""
    write_sections(run_study("cost", {"rounds": 3, "steps": 2}, comparison, None), folder)
    return json.loads((folder / "cost.json").read_text())["costs"]


def test_the_study_writes_what_it_prints(comparison: Comparison, tmp_path: Path) -> None:
    costs = costs_of(comparison, tmp_path)
    assert [cost["method"] for cost in costs] == ["sgd", "path-sgd"]
    assert (costs[0]["ratio"], costs[0]["lower"], costs[0]["upper"]) == (1.0, 1.0, 1.0)
    for one in costs:
        assert one["seconds"] > 0
        assert one["lower"] <= one["ratio"] <= one["upper"]
    with (tmp_path / "cost.csv").open(newline="") as file:
        written = [float(row["ratio"]) for row in csv.DictReader(file)]
    assert written == [cost["ratio"] for cost in costs]


def test_a_slow_method_is_seen(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = methods.METHODS["sgd"]

    def slow(*arguments: Any) -> Any:
        optimizer = plain.build(*arguments)
        step = optimizer.step

        def delayed() -> None:
            begin = time.thread_time()
            while time.thread_time() < begin + 0.02:
                pass
            step()

        optimizer.step = delayed  # type: ignore[method-assign, assignment]
        return optimizer

    monkeypatch.setitem(methods.METHODS, "path-sgd", replace(plain, build=slow))
    slowed = costs_of(comparison, tmp_path)[1]
    assert slowed["ratio"] > 2
    # 4 steps an epoch, each of at least the pause
    assert slowed["seconds"] > 4 * 0.02


@pytest.mark.parametrize("count", [1, 4, 5, 20])
def test_quartiles_leave_as_many_rounds_on_either_side(
    count: int, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four rounds the upper one was the greatest, and the lower one the second."""
    rounds = [float(value) for value in range(count, 0, -1)]

    def turn(_settings: Any, _task: Any, name: str, _steps: int) -> Callable[[], float]:
        # the first one warms up
        seconds = iter([9.0, *(rounds if name == "path-sgd" else [1.0] * count)])
        return lambda: next(seconds)

    monkeypatch.setattr(cost, "_turn", turn)
    task = build_task(comparison.settings.task, comparison.settings.task_options)
    _, path = cost.measure(comparison.settings, task, count, 1)
    expected = np.percentile(rounds, [25, 50, 75])
    assert [path.lower, path.ratio, path.upper] == pytest.approx(list(expected))


@pytest.mark.parametrize("plain", [False, True])
def test_recurrent_layers_are_those_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    settings = settings_from(("a test", {**SETTINGS, "methods": ["sgd"], "plain_rnn": plain}))
    comparison = compare(settings, Runs(tmp_path / "runs"))
    layers, build = [], methods.METHODS["sgd"].build

    def noted(model: Any, *others: Any) -> Any:
        layers.append(type(model.rnn))
        return build(model, *others)

    monkeypatch.setitem(methods.METHODS, "sgd", replace(methods.METHODS["sgd"], build=noted))
    run_study("cost", {"rounds": 1, "steps": 1}, comparison, None)
    assert layers == [torch.nn.RNN if plain else pathspace.nn.RNN]


@pytest.mark.usefixtures("no_pictures")
def test_a_study_that_was_stopped_is_done_without_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "package" / "recipes"
    folder.mkdir(parents=True)
    (folder / "timed.toml").write_text(TIMED)
    monkeypatch.setattr("pathspace.experiments.recipes.files", lambda _: folder.parent)
    command = ["reproduce", "timed", "--workers", "1", "--output", str(tmp_path / "out")]

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr("pathspace.experiments.execution.run_study", stopped)
        assert call(*command).exit_code == 130
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("runs/*/result.json")}
    assert done
    result = call(*command)
    assert result.exit_code == 0, result.output
    assert "Continuing the unfinished runs" in result.stderr
    assert "Cost of an epoch" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_runs_on_the_gpus_of_a_cluster_do_not_lose_their_study_here(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = Recipe(
        "timed", "Timed", {}, {"": {}}, study={"name": "cost", "": {"rounds": 1, "steps": 1}}
    )
    context = folders.Context(
        None, tmp_path, device="cuda", engine="ray", address="10.0.0.1:6379", quiet=True
    )
    (section,) = execution._study(recipe, comparison, "", context)
    assert {"cost.csv", "cost.json"} == set(section.numbers)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"steps": 1.5}])
def test_impossible_numbers_are_refused(
    comparison: Comparison, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"give (1 or more|a whole number)"):
        run_study("cost", options, comparison, None)
