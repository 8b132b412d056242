"""Runs as jobs: each has a folder with its checkpoint while it lasts, and its result afterwards."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathspace.experiments import checkpoint
from pathspace.experiments.context import Context
from pathspace.experiments.engine import run
from pathspace.experiments.monitor import Monitor
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.runner import Job, Runner
from pathspace.experiments.storage import make_folder
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task

RESULT = "result.json"
RUNS = "runs"


@dataclass(frozen=True)
class PlacedRun(Job):
    """A run and where it reads and writes; see `runner.Job`.

    Attributes:
        config: The run.
        folder: Of its checkpoint and its result; what is there is taken, or continued.
        data_dir: Where tasks look for data sets.
        checkpoint_every: Steps between checkpoints.
        device: Where it computes, see `engine.run`; a finished run of another device is taken as it is.
    """

    config: RunConfig
    folder: Path
    data_dir: Path | None = None
    checkpoint_every: int = 200
    device: str = "cpu"
    kind = RunResult

    @property
    def file(self) -> Path:
        """See `runner.Job`."""
        return self.folder / RESULT

    @property
    def key(self) -> str:
        """See `runner.Job`."""
        return self.config.key

    @property
    def label(self) -> str:
        """See `runner.Job`."""
        return self.config.label

    def __call__(self, monitor: Monitor) -> RunResult:
        """Do the run, from its checkpoint if there is one."""
        config = self.config
        task = load_task(config.task, config.task_options, self.data_dir)
        return run(
            config,
            task,
            folder=make_folder(self.folder),
            checkpoint_every=self.checkpoint_every,
            resume=True,
            listener=monitor,
            device=self.device,
        )

    def keep(self, result: RunResult) -> str:
        """Replace the checkpoint by the result, and say how the run ended."""
        words = super().keep(result)
        checkpoint.remove(self.folder)
        return words

    def stored(self) -> RunResult | None:
        """See `runner.Job`."""
        result = super().stored()
        if result is None or result.config.key != self.key:
            return None
        checkpoint.remove(self.folder)  # it was killed between the two
        return result


@dataclass(frozen=True)
class Runs:
    """Folder, monitor, runner and device of a command's runs.

    Attributes:
        output: Its folder: runs are kept in the folder `runs` there, and what is there is taken, or
            continued.
        monitor: Told about every run.
        data_dir: Where tasks look for data sets.
        runner: Who does the runs; by default this process, one after the other.
        device: Where they compute; see `PlacedRun`.
    """

    output: Path
    monitor: Monitor = field(default_factory=Monitor)
    data_dir: Path | None = None
    runner: Runner = field(default_factory=Runner)
    device: str = "cpu"

    @classmethod
    def of(cls, context: Context, output: Path, monitor: Monitor, threads: int) -> Runs:
        """Return how a command does its runs, with so many threads each."""
        data_dir = context.data_dir and context.for_jobs(context.data_dir)
        return cls(output, monitor, data_dir, context.runner(threads), context.run_device)

    def job(self, config: RunConfig, checkpoint_every: int) -> PlacedRun:
        """Return a run as a job that keeps a checkpoint every so many steps."""
        folder = self.output / RUNS / config.key
        return PlacedRun(config, folder, self.data_dir, checkpoint_every, self.device)

    def results(
        self, configs: Iterable[RunConfig], title: str, checkpoint_every: int = 200
    ) -> list[RunResult]:
        """Return the results of runs, all different, in their order; see `Runner.all_results`."""
        jobs = [self.job(config, checkpoint_every) for config in configs]
        return self.runner.all_results(jobs, self.monitor, title) if jobs else []


def load_task(name: str, options: Mapping[str, Any], data_dir: Path | None) -> Task:
    """Return the task that `tasks.build_task` builds; the last one is kept, for all runs of a comparison share it."""
    written = json.dumps(dict(options), sort_keys=True)
    return _task(name, written, data_dir, os.environ.get("PATHSPACE_DATA"))


@functools.lru_cache(maxsize=1)
def _task(name: str, options: str, data_dir: Path | None, _environment: str | None) -> Task:
    return build_task(name, json.loads(options), data_dir=data_dir)
