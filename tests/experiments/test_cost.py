"""The study of cost: what it writes and prints, and that a costlier method has a larger ratio."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pathspace.experiments import methods
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.live import Silent
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import run_study

SETTINGS: dict[str, Any] = {
    "task": "adding",
    "task_options": {"length": 6, "train_size": 64, "validation_size": 32, "test_size": 32},
    "model_options": {"hidden": 6},
    "starts": ["default"],
    "methods": ["sgd", "path-sgd"],
    "learning_rates": [0.01],
    "seeds": 1,
    "epochs": 1,
    "batch_size": 16,
}


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare(settings_from(("a test", SETTINGS)), tmp_path / "runs", Silent())


def test_the_study_writes_what_it_prints(comparison: Comparison, tmp_path: Path) -> None:
    printed = run_study("cost", {"rounds": 3, "steps": 2}, comparison, tmp_path, None)
    assert len(printed) == 2
    costs = json.loads((tmp_path / "cost.json").read_text())["costs"]
    assert [cost["method"] for cost in costs] == ["sgd", "path-sgd"]
    assert (costs[0]["ratio"], costs[0]["lower"], costs[0]["upper"]) == (1.0, 1.0, 1.0)
    assert all(cost["seconds"] > 0 and cost["lower"] <= cost["ratio"] <= cost["upper"] for cost in costs)
    with (tmp_path / "cost.csv").open(newline="") as file:
        assert [float(row["ratio"]) for row in csv.DictReader(file)] == [cost["ratio"] for cost in costs]


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
    run_study("cost", {"rounds": 3, "steps": 2}, comparison, tmp_path, None)
    slowed = json.loads((tmp_path / "cost.json").read_text())["costs"][1]
    assert slowed["ratio"] > 2
    # 4 steps an epoch, each of at least the pause
    assert slowed["seconds"] > 4 * 0.02


@pytest.mark.parametrize("options", [{"rounds": 0}, {"steps": 1.5}])
def test_impossible_numbers_are_refused(
    comparison: Comparison, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="whole number from 1 on"):
        run_study("cost", options, comparison, tmp_path, None)
