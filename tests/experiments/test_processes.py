"""Several processes, started by torchrun, do the run of one; what they cannot do so is refused; deaths cost steps."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pathspace.experiments.commands import run_train
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.execution import Surroundings
from pathspace.experiments.processes import ALONE, Processes, _choose_gpu, expect_one, joined
from pathspace.experiments.run import RunResult
from processes import in_processes

from . import parallel_runs as runs

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")

SCRIPT = Path(runs.__file__)
TRAIN = [
    "train", "--task", "adding", "--method", "path-adam", "--batch-size", "16", "--epochs", "3",
    "--set", "model_options.hidden=4", "--set", "task_options.length=4", "--set", "task_options.train_size=64",
    "--set", "task_options.validation_size=16", "--set", "task_options.test_size=16", "--set", "checkpoint_every=2",
]  # fmt: skip


def torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(one: RunResult, other: RunResult) -> bool:
    """Whether two runs in float64 are the same to rounding."""
    assert one.config == other.config
    pairs = [*zip(one.losses, other.losses, strict=True)]
    pairs += [
        pair
        for v, w in zip(one.validations, other.validations, strict=True)
        for pair in ((v.loss, w.loss), (v.error, w.error))
    ]
    assert one.test_error is not None
    assert other.test_error is not None
    pairs.append((one.test_error, other.test_error))
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


@pytest.mark.usefixtures("in_float64")
def test_two_processes_do_the_run_of_one(tmp_path: Path) -> None:
    for name, made, task in (
        ("broken", runs.config("path-adam"), runs.adding()),
        ("broken stream", runs.of_stream(), runs.stream()),
    ):
        runs.broken(made, task, ALONE, tmp_path / "of one" / name)
    first, second = in_processes(2, runs.main, tmp_path, joins=True)

    whole = {method: runs.run(runs.config(method), runs.adding()) for method in runs.METHODS}
    whole["stream"] = runs.run(runs.of_stream(), runs.stream())
    for name, one in whole.items():
        two = first[name]
        assert close(two, one), name
        assert (two.losses, two.validations, two.test_error) == (
            second[name].losses, second[name].validations, second[name].test_error
        ), name  # fmt: skip
        assert (one.processes, two.processes) == ((1,), (2,))

    # what one begins two end, and what two begin one ends
    notes: list[str] = []
    ended = {"two": first["resumed"], "one": runs.resumed(tmp_path, ALONE, notes)}
    for by, results in ended.items():
        assert close(results["broken"], whole["path-adam"]), by
        assert close(results["broken stream"], whole["stream"]), by
    assert ended["two"]["broken"].processes == (1, 2)
    assert ended["one"]["broken"].processes == (2, 1)
    assert len(notes) == len(first["notes"]) == 2
    assert "was computed by 2 processes, and 1 go on" in notes[0]

    assert "batch size 15 cannot be split evenly over 2 processes" in first["refused sgd"]
    for method in runs.REFUSED:
        if method != "sgd":
            assert f"A step of the method '{method}' needs the whole batch" in first[f"refused {method}"]
    assert first["hung"].startswith(
        "Process 0 of 2 stopped, because another one ended, or did not answer for 60 seco"
    )
    assert first["hung"].endswith("Go on with --resume; if a step takes so long, give more with --patience.")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_the_command_writes_once_and_survives_a_process_that_dies_or_hangs(name: str, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    died = torchrun(2, str(SCRIPT), name, *TRAIN, "--patience", "10", "--output", str(two))
    since = time.time() - max(path.stat().st_mtime for path in two.rglob("checkpoint.pt"))
    assert since < (60 if name == "SIGKILL" else 100)  # torchrun gives one that hangs half a minute to end
    assert died.returncode != 0
    said = {"SIGKILL": "SIGKILL", "SIGSTOP": "another one ended, or did not answer for 10 seconds"}
    assert said[name] in died.stderr
    assert not (two / "report.html").exists()
    assert not [path for path in two.rglob("*") if path.name.endswith(".part")]

    ended = torchrun(2, "-m", "pathspace", "train", "--resume", "--output", str(two))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Report:") == 1
    assert "Computed on: cpu (2 processes) (1 run)." in ended.stdout
    assert ended.stderr.count("Training with path-adam: 1 run") == 1
    alone = subprocess.run([sys.executable, "-m", "pathspace", *TRAIN, "--output", str(one)], check=False)
    assert alone.returncode == 0
    results = [json.loads(next(each.glob("runs/*/result.json")).read_text()) for each in (two, one)]
    assert (results[0]["processes"], results[1]["processes"]) == ([2], [1])
    for a, b in zip(results[0]["losses"], results[1]["losses"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-4)


@pytest.mark.slow
def test_the_other_commands_are_refused_once(tmp_path: Path) -> None:
    refused = torchrun(2, "-m", "pathspace", "compare", "--output", str(tmp_path))
    assert refused.returncode != 0
    assert refused.stderr.count("`pathspace compare` is not split over them") == 1


@pytest.mark.parametrize(
    ("name", "batch_size", "says"), [("path-adam", 15, "split evenly"), ("natural", 16, "the whole batch")]
)
def test_what_cannot_be_split_is_refused_before_a_folder_is_made(
    name: str, batch_size: int, says: str, tmp_path: Path
) -> None:
    around = Surroundings(output=tmp_path / "out", default=tmp_path / "out", joined=Processes(0, 2))
    values = {"task": "adding", "task_options": runs.SIZES, "batch_size": batch_size}
    with pytest.raises(ConfigurationError, match=says):
        run_train(name, "default", 0.01, 0, ("a test", values), around, given=True)
    assert not list(tmp_path.iterdir())


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigurationError, match="started 2 processes here, for 1 GPUs: give --nproc-per-node 1"
    ):
        _choose_gpu(1)


@pytest.mark.parametrize("patience", [0.0, -1.0, math.nan, math.inf])
def test_a_patience_that_is_none_is_refused(patience: float) -> None:
    refused = pytest.raises(ConfigurationError, match=r"--patience is .*: give seconds, from 1 to a week")
    with refused, joined("cpu", patience):
        pass


def test_torchrun_with_one_process_is_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined("cpu") as processes:
        assert processes is ALONE
    expect_one("compare")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="start it without torchrun"):
        expect_one("compare")
