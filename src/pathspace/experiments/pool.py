"""Many independent runs by whatever does them (see `executor`), with live progress; finished ones stay on disk."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspace.experiments import checkpoint
from pathspace.experiments.engine import run, total_steps
from pathspace.experiments.executor import Executor, ThisProcess
from pathspace.experiments.monitor import Listener, Monitor
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.storage import make_folder, read_checked, write_checked
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task

RESULT = "result.json"


@dataclass(frozen=True)
class Place:
    """Where runs read and write.

    Attributes:
        folder: Each run gets a folder in this one.
        data_dir: Where tasks look for data sets.
        resume: Whether finished runs are taken from disk and broken-off ones continued.
        checkpoint_every: Steps between checkpoints.
        device: Where runs compute, see `engine.run`; finished runs of another device are taken as they are.
    """

    folder: Path
    data_dir: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    device: str = "cpu"


@dataclass(frozen=True)
class PlacedRun:
    """A run and where it reads and writes: the job that an executor does (see `executor.Job`)."""

    config: RunConfig
    place: Place

    @property
    def folder(self) -> Path:
        """Where its checkpoint and its result lie."""
        return self.place.folder / self.config.key

    def __call__(
        self, listener: Listener, should_stop: Callable[[], bool] | None = None, *, again: bool = False
    ) -> RunResult:
        """Do the run in its folder, and replace its checkpoint by its result."""
        config, place = self.config, self.place
        task = load_task(config.task, config.task_options, place.data_dir)
        folder = make_folder(self.folder)
        listener.started(config, total_steps(config, task))
        result = run(
            config,
            task,
            folder=folder,
            checkpoint_every=place.checkpoint_every,
            resume=place.resume or again,
            listener=listener,
            should_stop=should_stop,
            device=place.device,
        )
        write_result(folder, result)
        checkpoint.remove(folder)
        return result

    def keep(self, result: RunResult) -> None:
        """Write the result, if the machine that did the run does not share this folder."""
        if not (self.folder / RESULT).exists():
            write_result(make_folder(self.folder), result)

    def stored(self) -> RunResult | None:
        """Return the result that is there already; None if there is none, or the place is not to be resumed.

        Raises:
            ConfigurationError: It cannot be read.
        """
        result = _stored_result(self.folder, self.config) if self.place.resume else None
        if result is not None:
            checkpoint.remove(self.folder)  # it was killed between the two
        return result


def run_all(
    configs: Sequence[RunConfig],
    place: Place,
    monitor: Monitor,
    *,
    title: str,
    executor: Executor | None = None,
) -> list[RunResult]:
    """Do all the runs and return their results in the same order.

    Args:
        configs: The runs, all different.
        place: Folders, and whether to resume.
        monitor: Told about every run.
        title: What the monitor calls this stage.
        executor: Who does the runs, ready to; None does them in this process.

    Raises:
        ConfigurationError: A run could not be done as asked.
        KeyboardInterrupt: The user stopped; checkpoints of the runs in progress are written.
    """
    monitor.stage(title, len(configs))
    results: dict[str, RunResult] = {}
    waiting = []
    for config in configs:
        job = PlacedRun(config, place)
        stored = job.stored()
        if stored is None:
            waiting.append(job)
        else:
            results[config.key] = stored
            monitor.finished(stored)
    for ended in (executor or ThisProcess()).run(waiting, monitor):
        result = ended.value()
        monitor.finished(result)
        results[result.config.key] = result
    return [results[config.key] for config in configs]


def load_task(name: str, options: Mapping[str, Any], data_dir: Path | None) -> Task:
    """Return the task that `tasks.build_task` builds; the last one is kept, for all runs of a comparison share it."""
    written = json.dumps(dict(options), sort_keys=True)
    return _task(name, written, data_dir, os.environ.get("PATHSPACE_DATA"))


@functools.lru_cache(maxsize=1)
def _task(name: str, options: str, data_dir: Path | None, _environment: str | None) -> Task:
    return build_task(name, json.loads(options), data_dir=data_dir)


def write_result(folder: Path, result: RunResult) -> None:
    """Write `result.json`."""
    write_checked(folder / RESULT, result.as_dict())


def _stored_result(folder: Path, config: RunConfig) -> RunResult | None:
    try:
        result = read_checked(folder / RESULT, RunResult.from_dict)
    except FileNotFoundError:
        return None
    return result if result.config.key == config.key else None
