"""Runs on another device than the processor; `second_device` stands for a GPU."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from cases import slow_besides
from command_line import call
from experiments.conftest import asked, stopped
from pathspace.experiments import context
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import RESCALABLE
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.terminal import Monitor
from second_device import DEVICE, SecondDevice

Config = Callable[..., RunConfig]
GPU, CPU = DEVICE.type, "cpu"


def on(device: str) -> AbstractContextManager[object]:
    return SecondDevice() if device == GPU else nullcontext()


def start_for(method: str) -> str:
    return "rescaled" if METHODS[method].model in ("", *RESCALABLE) else "default"


def close(one: RunResult, other: RunResult) -> None:
    assert_close(one.losses, other.losses, rtol=1e-3, atol=1e-6)
    assert_close(
        [v.error for v in one.validations],
        [v.error for v in other.validations],
        rtol=1e-3,
        atol=1e-6,
    )
    assert one.test_error == pytest.approx(other.test_error, rel=1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "method",
    slow_besides(
        ["sgd", "path-sgd", "path-muon", "g-adam", "ddp-sgd", "ddp-norm"],
        ["balanced-adam", "path-sgd-short-both", "tanh-adam"],
    ),
)
def test_a_run_elsewhere_gives_what_it_gives_here(
    tiny_config: Config, tiny_task: Task, method: str
) -> None:
    config = tiny_config(method, start_for(method), 0.01, epochs=1, momentum=0.9, clip_norm=1.0)
    with on(GPU):
        there = run(config, tiny_task, device=GPU)
    assert there.device == GPU
    close(there, run(config, tiny_task))


class Noting(Monitor):
    """Keeps what a user should know."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def noted(self, label: str, sentence: str) -> None:  # noqa: ARG002
        self.said.append(sentence)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        *(("path-adam", *ways) for ways in ((CPU, GPU), (GPU, CPU), (GPU, GPU))),
        ("g-sgd", CPU, GPU),
    ],
)
def test_a_run_goes_on_on_another_device_and_says_so(
    tiny_config: Config, tiny_task: Task, tmp_path: Path, method: str, before: str, after: str
) -> None:
    config = tiny_config(method, "rescaled", 0.01, epochs=2, momentum=0.9)
    with on(before):
        stopped(config, tiny_task, tmp_path, 5, device=before)
    told: list[str] = []
    with on(after):
        resumed = run(
            config, tiny_task, folder=tmp_path, resume=True, listener=Noting(told), device=after
        )
    with on(after):
        whole = run(config, tiny_task, device=after)
    if before == after:
        assert (told, resumed.device) == ([], after)
        assert resumed.losses == whole.losses
        return
    (sentence,) = told
    assert f"step 5 was computed on {before}, and the run goes on on {after}" in sentence
    assert resumed.device == f"{before}, then {after}"
    close(resumed, whole)


@pytest.mark.slow
def test_a_stream_s_state_and_dropout_go_on_elsewhere(tiny_corpora: Path, tmp_path: Path) -> None:
    from pathspace.experiments.tasks import build_task

    settings = asked({
            "task": "characters", "task_options": {"dataset": "ptb", "stream": True, "length": 1, "train_size": 0,
                                                          "validation_size": 0, "test_size": 0},
            "model": "language-model", "model_options": {"hidden": 4, "embedding": 3, "output": "every",
                                                        "output_dropout": 0.5, "tied": False},
            "methods": ["sgd"], "batch_size": 2, "epochs": 3,
        })  # fmt: skip
    # not tied: Module.to gives the stand-in new parameters, one for each place, where a GPU keeps
    # the old ones
    task = build_task("characters", settings.task_options, data_dir=tiny_corpora)
    config = settings.run_config("sgd", "default", 0.1, 0, evaluate_test=True)
    with on(GPU):
        whole = run(config, task, device=GPU)
        stopped(config, task, tmp_path, 2, device=GPU)
    resumed = run(config, task, folder=tmp_path, resume=True)
    close(resumed, replace(whole, device=CPU))


def test_the_random_state_of_the_caller_stays(tiny_config: Config, tiny_task: Task) -> None:
    with on(GPU):
        before = torch.get_rng_state()
        run(tiny_config(), tiny_task, device=GPU)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_device_is_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [context.chosen_device(name) for name in ("cpu", "auto")] == ["cpu", "cpu"]
    with pytest.raises(
        ConfigurationError, match=r"--device cuda: PyTorch .* sees no such device here"
    ):
        context.chosen_device("cuda")
    with pytest.raises(
        ConfigurationError,
        match=r"Unknown device 'gpu' in --device: choose from cpu, cuda, auto. Did you mean 'cuda'\?",
    ):
        context.chosen_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [context.chosen_device(name) for name in ("cuda", "auto")] == ["cuda", "cuda"]


TINY = ("--task", "adding", "--epochs", "1", "--batch-size", "16", "--set", "task_options.length=4",
        "--set", "task_options.train_size=32", "--set", "task_options.validation_size=16",
        "--set", "task_options.test_size=16", "--set", "model_options.hidden=4")  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
def test_the_command_line_computes_elsewhere_and_its_report_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "DEVICES", (*context.DEVICES, GPU))
    folder = str(tmp_path)
    arguments = ("compare", *TINY, "--methods", "sgd,path-sgd", "--learning-rates", "0.01", "--seeds", "1",
                 "--set", "starts=['rescaled']",
                 "--workers", "1", "--output", folder)  # fmt: skip
    with on(GPU):
        result = call(*arguments, "--device", GPU)
    assert result.exit_code == 0, result.output
    assert f"Computed on: {GPU} (" in result.stdout
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {tuple(row["devices"]) for row in rows} == {(GPU,)}
    # the report is gone, and with it one of the runs: the rest stay, whatever computed them
    (tmp_path / "report.html").unlink()
    next(tmp_path.glob("runs/sgd-*/result.json")).unlink()
    result = call("compare", "--resume", "--workers", "1", "--output", folder)
    assert result.exit_code == 0, result.output
    assert "cpu (1 run)" in result.stdout
    assert "Between devices rounding differs" in " ".join(result.stdout.split())


def test_the_command_line_refuses_a_device_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("train", *TINY, "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cuda: PyTorch" in result.stderr
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = call("reproduce", "symbols", "--device", "cuda")
    assert result.exit_code == 2
    assert "'symbols' computes on the processor alone: leave --device cuda out" in result.stderr
