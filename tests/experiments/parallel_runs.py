"""Runs for test_processes.py, done by one process or several.

They are done in float64, so that nothing but an error makes two processes end elsewhere than one. As a program,
`torchrun parallel_runs.py SIGNAL ARGUMENT ...` is `pathspace`, whose second process sends itself that signal.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from pathspace.experiments.engine import InterruptedRunError, run
from pathspace.experiments.errors import ConfigurationError, LostProcessError
from pathspace.experiments.monitor import Listener
from pathspace.experiments.processes import Processes, joined
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Split, Task, prediction, windows

SIZES = {"length": 6, "train_size": 64, "validation_size": 150, "test_size": 150}  # evaluated in three parts
METHODS = ("sgd", "balanced-adam", "path-sgd", "path-adam", "g-sgd", "ddp-sgd", "quasi-diagonal")
REFUSED = {
    "ddp-norm": {"model": "mlp"},
    "natural": {},
    "ddp-sgd-centred": {},
    "sgd": {"batch_size": 15},
}
STOP = 5  # the step after which a broken-off run ends


def wide(split: Split) -> Split:
    inputs, targets = (t.double() if t.is_floating_point() else t for t in (split.inputs, split.targets))
    return Split(inputs, targets)


def adding() -> Task:
    task = build_task("adding", SIZES)
    return replace(task, **{name: wide(getattr(task, name)) for name in ("train", "validation", "test")})


def stream() -> Task:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(6, (n,), generator=generator) for n in (110, 163, 157)]
    splits = (windows(text, 5) for text in texts)
    return prediction("words", "a test", *splits, symbols=6, metric="perplexity", stream=True)


def config(method: str, **changes: Any) -> RunConfig:
    values = {
        "task": "adding", "task_options": SIZES, "model_options": {"hidden": 6}, "methods": [method], "epochs": 2,
        "batch_size": 16, "momentum": 0.5, "clip_norm": 1.0, **changes,
    }  # fmt: skip
    return settings_from(("a test", values)).run_config(method, "default", 0.01, 0, evaluate_test=True)


def of_stream() -> RunConfig:
    options = {"hidden": 5, "embedding": 4, "layers": 2}
    return config(
        "path-sgd", task="words", task_options={"stream": True}, model="language-model", model_options=options,
        batch_size=4,
    )  # fmt: skip


def everything(processes: Processes, folder: Path) -> dict[str, Any]:
    """Results by name, and the messages of what is refused."""
    task, results = adding(), {}
    for method in METHODS:
        results[method] = run(config(method), task, processes=processes)
    results["stream"] = run(of_stream(), stream(), processes=processes)
    for name, made, of in (("broken", config("path-adam"), task), ("broken stream", of_stream(), stream())):
        results[name] = broken(made, of, processes, folder / name)
    for method, changes in REFUSED.items():
        try:
            run(config(method, **changes), task, processes=processes)
        except ConfigurationError as error:
            results[f"refused {method}"] = str(error)
    return results


def broken(made: RunConfig, task: Task, processes: Processes, folder: Path) -> None:
    """A run that one of the processes, the last one, stops."""
    asked = iter(range(10**6))

    def should_stop() -> bool:
        return processes.rank == processes.count - 1 and next(asked) >= STOP

    try:
        run(made, task, folder=folder, checkpoint_every=100, should_stop=should_stop, processes=processes)
    except InterruptedRunError:
        return
    raise AssertionError("it was not stopped")


class Noting(Listener):
    """Keeps what a user should know."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def noted(self, config: RunConfig, sentence: str) -> None:  # noqa: ARG002
        self.said.append(sentence)


def resumed(folder: Path, processes: Processes, notes: list[str]) -> dict[str, RunResult]:
    pairs = (("broken", config("path-adam"), adding()), ("broken stream", of_stream(), stream()))
    return {
        name: run(made, of, folder=folder / name, resume=True, processes=processes, listener=Noting(notes))
        for name, made, of in pairs
    }


def main(rank: int, folder: Path) -> dict[str, Any]:
    """All of it in a process of a group, and what is said in the end when the last process hangs."""
    torch.set_default_dtype(torch.float64)
    ended = folder / "the first one has ended"
    results: dict[str, Any] = {}
    try:
        with joined("cpu", patience=60) as processes:
            results = everything(processes, folder)
            notes: list[str] = []
            results["resumed"] = resumed(folder / "of one", processes, notes)
            results["notes"] = notes
            distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # the rest may be slower
            while rank and not ended.exists():
                time.sleep(0.01)
            processes.any(False)
    except LostProcessError as error:
        results["hung"] = str(error)
        ended.touch()
    return results


def command_with(name: str, arguments: list[str]) -> None:
    """`pathspace`, whose second process sends itself a signal in the step after the second checkpoint."""
    from pathspace.cli import main as command
    from pathspace.experiments import checkpoint

    save, saved = checkpoint.save, []

    def save_or_die(folder: Path, made: RunConfig, state: Any) -> None:
        if len(saved) == 2 and state.processes.rank == 1:
            os.kill(os.getpid(), getattr(signal, name))
        save(folder, made, state)
        saved.append(state.step)

    checkpoint.save = save_or_die  # type: ignore[assignment]
    sys.argv = ["pathspace", *arguments]
    command()


if __name__ == "__main__":
    command_with(sys.argv[1], sys.argv[2:])
