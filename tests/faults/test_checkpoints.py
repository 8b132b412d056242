"""Checkpoints that were damaged: named, and passed over for the one before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pathspace.experiments import checkpoint
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.jobs import RESULT, Place, run_all, stored_result, write_result
from pathspace.experiments.monitor import Monitor
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task

from .readers import MEBIBYTE, memory_below, mutants

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
    return settings_from(("a test", settings)).run_config("path-sgd", "balanced", 0.05, 0, evaluate_test=True)


@pytest.fixture(scope="module")
def whole(config: RunConfig, task: Task) -> RunResult:
    return run(config, task)


@pytest.fixture
def stopped(config: RunConfig, task: Task, tmp_path: Path) -> Path:
    """A folder with checkpoints of the steps 8 and 12 of 16."""
    run(config, task, folder=tmp_path, checkpoint_every=4)
    (tmp_path / checkpoint.FILE).unlink()  # of the last step
    (tmp_path / checkpoint.BEFORE).unlink()

    class Killing(Monitor):
        def advanced(self, config: RunConfig, step: int, loss: float) -> None:  # noqa: ARG002
            if step >= 12:
                raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathspace.experiments.engine.SECONDS_BETWEEN_REPORTS", -1.0)
        with pytest.raises(InterruptedError):
            run(config, task, folder=tmp_path, checkpoint_every=4, listener=Killing())
    return tmp_path


class Noting(Monitor):
    """Keeps what a user should know."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def noted(self, label: str, sentence: str) -> None:  # noqa: ARG002
        self.said.append(sentence)


def resumed(
    config: RunConfig,
    task: Task,
    folder: Path,
    said: list[str] | None = None,
    every: int = 4,
) -> RunResult:
    return run(
        config,
        task,
        folder=folder,
        checkpoint_every=every,
        resume=True,
        listener=Noting([] if said is None else said),
    )


def same(one: RunResult, other: RunResult) -> bool:
    return (one.losses, one.validations, one.test_error) == (
        other.losses,
        other.validations,
        other.test_error,
    )


def test_two_checkpoints_are_kept(stopped: Path, config: RunConfig, task: Task) -> None:
    assert {path.name for path in stopped.iterdir()} == {checkpoint.FILE, checkpoint.BEFORE}
    assert checkpoint._read(stopped / checkpoint.FILE)["step"] == 12
    assert checkpoint._read(stopped / checkpoint.BEFORE)["step"] == 8


def test_a_flipped_bit_is_named_and_the_checkpoint_before_goes_on(
    stopped: Path, config: RunConfig, task: Task, whole: RunResult
) -> None:
    path = stopped / checkpoint.FILE
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), len(content) // 40):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.DamagedError):
            checkpoint._read(path)
    said: list[str] = []
    assert same(resumed(config, task, stopped, said), whole)
    assert said == [
        f"The checkpoint {str(path)!r} is damaged (its checksum does not fit): going on from the one before it, of "
        "step 8."
    ]


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(
    stopped: Path, config: RunConfig, task: Task
) -> None:
    (stopped / checkpoint.FILE).write_bytes(b"damaged")
    resumed(config, task, stopped, every=0)  # no further save
    assert checkpoint._read(stopped / checkpoint.FILE)["step"] == 8


def test_a_death_between_the_two_renames_costs_nothing_but_steps(
    stopped: Path, config: RunConfig, task: Task, whole: RunResult
) -> None:
    (stopped / checkpoint.FILE).replace(stopped / checkpoint.BEFORE)
    said: list[str] = []
    assert checkpoint.exists(stopped)
    assert same(resumed(config, task, stopped, said), whole)
    assert not said


def test_without_a_whole_checkpoint_both_are_named(stopped: Path, config: RunConfig, task: Task) -> None:
    for name in (checkpoint.FILE, checkpoint.BEFORE):
        (stopped / name).write_bytes((stopped / name).read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match=r"checkpoint\.pt' cannot be read .* 'checkpoint-before\.pt"):
        resumed(config, task, stopped)


def check_mutants(stopped: Path, count: int) -> None:
    path = stopped / checkpoint.FILE
    for damaged in mutants(path.read_bytes(), count, seed=1):
        path.write_bytes(damaged)
        with memory_below(8 * MEBIBYTE), pytest.raises(checkpoint.DamagedError):
            checkpoint._read(path)


def test_mutants_are_refused(stopped: Path) -> None:
    check_mutants(stopped, 100)


@pytest.mark.slow
def test_two_thousand_mutants_are_refused(stopped: Path) -> None:
    check_mutants(stopped, 2000)


@pytest.mark.parametrize(
    "change", [lambda values: values["losses"].__setitem__(3, 0.1), lambda values: values.pop("checksum")]
)
def test_a_result_that_is_not_what_was_written_is_named(
    change: Callable[[dict[str, Any]], object], config: RunConfig, whole: RunResult, tmp_path: Path
) -> None:
    write_result(tmp_path, whole)
    stored = stored_result(tmp_path, config)
    assert stored is not None
    assert same(stored, whole)
    values = json.loads((tmp_path / RESULT).read_text())
    change(values)
    (tmp_path / RESULT).write_text(json.dumps(values))
    with pytest.raises(
        ConfigurationError, match=r"result\.json' cannot be read \(its checksum does not fit\)"
    ):
        stored_result(tmp_path, config)


def test_a_result_that_cannot_be_opened_is_named(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(ConfigurationError, match=r"result.json' cannot be read \(.*Permission denied\)"):
        stored_result(tmp_path, config)


def test_checkpoints_of_a_run_that_was_killed_right_after_its_result_go(
    config: RunConfig, stopped: Path, whole: RunResult, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = Place(tmp_path_factory.mktemp("runs"))
    folder = stopped.rename(place.folder / config.key)
    write_result(folder, whole)
    assert run_all([config], place, Monitor(), title="") == [whole]
    assert [path.name for path in folder.iterdir()] == [RESULT]
