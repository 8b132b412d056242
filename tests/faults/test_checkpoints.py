"""Checkpoints and results that were damaged are named, and never taken for whole ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.readers import MEBIBYTE, memory_below, mutants
from pathspace.experiments import checkpoint
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import CHECKPOINT, RESULT, RunConfig, RunResult
from pathspace.experiments.runner import RUNS, Job, PlacedRun, Runs
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.terminal import Monitor

TASK = {"length": 4, "train_size": 64, "validation_size": 16, "test_size": 16}


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task("adding", TASK)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    settings: dict[str, Any] = {
        "task": "adding", "task_options": TASK, "model_options": {"hidden": 4}, "methods": ["path-sgd"],
        "epochs": 4, "batch_size": 16, "momentum": 0.9,
    }  # fmt: skip
    return settings_from(("a test", settings)).run_config(
        "path-sgd", "balanced", 0.05, 0, evaluate_test=True
    )


@pytest.fixture(scope="module")
def whole(config: RunConfig, task: Task) -> RunResult:
    return run(config, task)


@pytest.fixture
def stopped(config: RunConfig, task: Task, tmp_path: Path) -> Path:
    """A folder with the checkpoint of step 12 of 16."""

    class Killing(Monitor):
        def advanced(self, label: str, part: float, words: str) -> None:  # noqa: ARG002
            if part >= 12 / 16:
                raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathspace.experiments.engine.SECONDS_BETWEEN_REPORTS", -1.0)
        with pytest.raises(InterruptedError):
            run(config, task, folder=tmp_path, checkpoint_every=4, listener=Killing())
    return tmp_path


def resumed(config: RunConfig, task: Task, folder: Path) -> RunResult:
    return run(config, task, folder=folder, checkpoint_every=4, resume=True)


def same(one: RunResult, other: RunResult) -> bool:
    return (one.losses, one.validations, one.test_error) == (
        other.losses,
        other.validations,
        other.test_error,
    )


def test_a_run_goes_on_from_its_checkpoint_to_the_same_result(
    stopped: Path, config: RunConfig, task: Task, whole: RunResult
) -> None:
    assert [path.name for path in stopped.iterdir()] == [CHECKPOINT]
    assert checkpoint._read(stopped / CHECKPOINT, config)["plain"]["step"] == 12
    assert same(resumed(config, task, stopped), whole)


def same_content(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_content(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_content, one, other))
    return one == other


def damage(path: Path, config: RunConfig, written: dict[str, Any]) -> str:
    """Return what is said of a damaged file; nothing if it holds what was written."""
    try:
        found = checkpoint._read(path, config)
    except ConfigurationError as error:
        return str(error)
    assert same_content(found, written)
    return ""


def check_mutants(stopped: Path, config: RunConfig, count: int) -> None:
    """A damaged file is named, or it holds what was written: bytes between its parts mean nothing."""
    path, named = stopped / CHECKPOINT, 0
    content = path.read_bytes()
    written = checkpoint._read(path, config)
    for damaged in mutants(content, count, seed=1):
        path.write_bytes(damaged)
        with memory_below(8 * MEBIBYTE):
            said = damage(path, config, written)
        assert not said or re.match(
            r"The checkpoint '.*' cannot be read \(.*\): delete it", said, re.DOTALL
        )
        named += bool(said)
    assert named > count / 2


def test_mutants_are_refused(stopped: Path, config: RunConfig) -> None:
    check_mutants(stopped, config, 100)


@pytest.mark.slow
def test_two_thousand_mutants_are_refused(stopped: Path, config: RunConfig) -> None:
    check_mutants(stopped, config, 2000)


@pytest.mark.parametrize(
    "change",
    [lambda values: values["losses"].__setitem__(3, 0.1), lambda values: values.pop("checksum")],
)
def test_a_result_that_is_not_what_was_written_is_named(
    change: Callable[[dict[str, Any]], object], config: RunConfig, whole: RunResult, tmp_path: Path
) -> None:
    job = PlacedRun(config, tmp_path)
    job.keep(whole)
    stored = job.stored()
    assert stored is not None
    assert same(stored, whole)
    values = json.loads((tmp_path / RESULT).read_text())
    change(values)
    (tmp_path / RESULT).write_text(json.dumps(values))
    with pytest.raises(
        ConfigurationError, match=r"result\.json' cannot be read \(its checksum does not fit\)"
    ):
        job.stored()


def test_a_result_that_cannot_be_opened_is_named(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(
        ConfigurationError, match=r"result.json' cannot be read \(.*Permission denied\)"
    ):
        PlacedRun(config, tmp_path).stored()


def test_the_checkpoint_of_a_run_that_was_killed_right_after_its_result_go(
    config: RunConfig, stopped: Path, whole: RunResult, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    (runs.output / RUNS).mkdir()
    folder = stopped.rename(runs.output / RUNS / config.key)
    Job.keep(runs.job(config, 200), whole)
    assert runs.results([config], "") == [whole]
    assert [path.name for path in folder.iterdir()] == [RESULT]
