"""A sweep's runs: each is a trial that ends with a result or a reason, and none of them stops the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspace.experiments import checkpoint
from pathspace.experiments.compare import check_task_of
from pathspace.experiments.configuration import JOURNAL, RUNS
from pathspace.experiments.engine import InterruptedRunError
from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.executor import Ended, Executor, WorkerDiedError
from pathspace.experiments.monitor import Monitor
from pathspace.experiments.pool import Place, PlacedRun
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings
from pathspace.experiments.storage import finite
from pathspace.experiments.sweep.journal import Asked, Journal
from pathspace.experiments.sweep.plan import Plan, config_of


@dataclass(frozen=True)
class Trial:
    """How one run of a sweep ended.

    Attributes:
        method: A name in `methods.METHODS`.
        start: A name in `starts.STARTS`.
        point: Values of what was searched.
        seed: Of the run.
        result: What came out; None if it failed or was pruned.
        pruned_at: The step at which it was ended because it was worse than most; None if it was not.
        error: The last validation error that is known; None if there is none.
        reason: Why there is no result, or none of worth; empty if all went well.
    """

    method: str
    start: str
    point: Mapping[str, Any]
    seed: int
    result: RunResult | None = None
    pruned_at: int | None = None
    error: float | None = None
    reason: str = ""

    @property
    def loss(self) -> float | None:
        """The last validation loss of the result; None if there is none, or it is not finite."""
        return finite(self.result.validations[-1].loss) if self.result else None

    @property
    def state(self) -> str:
        """One of `"complete"`, `"pruned"` and `"failed"`, which includes runs that diverged."""
        return "pruned" if self.pruned_at is not None else "failed" if self.reason else "complete"


@dataclass(frozen=True)
class Sweep:
    """All that a sweep found.

    Attributes:
        settings: Of everything that was not searched.
        plan: What was searched.
        task_description: The task in one line.
        metric: What the error is, with its unit.
        trials: By method and start, then in the order of their points.
    """

    settings: Settings
    plan: Plan
    task_description: str
    metric: str
    trials: tuple[Trial, ...]

    @property
    def all_failed(self) -> bool:
        """Whether not a single run came through."""
        return not any(trial.state == "complete" for trial in self.trials)


def sweep(
    settings: Settings,
    plan: Plan,
    output: Path,
    monitor: Monitor,
    *,
    data_dir: Path | None = None,
    executor: Executor,
    device: str = "cpu",
) -> Sweep:
    """Do all trials that are not done yet.

    Args:
        settings: Of everything that is not searched; `seeds` runs are done at each point.
        plan: What is searched.
        output: The journal and the runs are kept in it.
        monitor: Told about every run.
        data_dir: Where tasks look for data sets.
        executor: Who does the runs.
        device: Where they compute.

    Raises:
        ConfigurationError: The task cannot be had, or results cannot be read or written.
        KeyboardInterrupt: The user stopped; the same call continues.
    """
    task = check_task_of(settings, data_dir)
    studies = [(method, start) for method in settings.methods for start in settings.starts]
    journal = Journal(output / JOURNAL, plan, settings.seeds, studies)
    place = Place(output / RUNS, data_dir, True, settings.checkpoint_every, device)
    monitor.stage("Sweeping on the validation split", plan.trials * len(studies) * settings.seeds)
    with executor as ready:
        trials = _Trials(settings, plan, journal, place, monitor, ready)
        for ended in ready.run(trials.jobs(), trials):
            trials.end(ended)
    order = {study: number for number, study in enumerate(studies)}
    done = sorted(trials.done, key=lambda pair: (order[pair[0].study], pair[0].number))
    return Sweep(settings, plan, task.description, task.metric, tuple(trial for _, trial in done))


class _Trials(Monitor):
    """The trials while they are done; hears what runs report, to prune them."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        journal: Journal,
        place: Place,
        monitor: Monitor,
        executor: Executor,
    ) -> None:
        self._settings, self._plan, self._journal = settings, plan, journal
        self._place, self._monitor, self._executor = place, monitor, executor
        self._running: dict[str, list[Asked]] = {}  # by key of the run; a point may be drawn twice
        self._told: dict[
            str, dict[int, float]
        ] = {}  # by key: the validation errors of runs in progress, and pruned
        self._pruned: set[str] = set()
        self.done: list[tuple[Asked, Trial]] = []
        self.stage, self.finished, self.unfinished = monitor.stage, monitor.finished, monitor.unfinished
        self.started, self.advanced, self.noted = monitor.started, monitor.advanced, monitor.noted

    def jobs(self) -> Iterator[PlacedRun]:
        """Take trials and give the runs that have no result yet."""
        yield from self._open(self._journal.earlier())
        yield from self._open(self._journal.new())

    def _open(self, trials: Any) -> Iterator[PlacedRun]:
        for asked in trials:
            if asked.state == "failed":
                self._fail(asked, asked.reason or "no reason was kept")
                continue
            try:
                config = config_of(self._settings, asked.study, asked.point, asked.seed)
            except ConfigurationError as error:
                self._fail(asked, str(error))
                continue
            if asked.state == "pruned":
                self._pruned.add(config.key)
                self._told[config.key] = dict(asked.reported)
                self._prune(asked, config)
                continue
            job = PlacedRun(config, self._place)
            result = job.stored()
            if result is not None:
                self._complete(asked, result)
            elif config.key in self._pruned and config.key not in self._running:  # drawn again
                self._prune(asked, config)
            elif config.key in self._running:
                self._running[config.key].append(asked)
            else:
                self._running[config.key], self._told[config.key] = [asked], dict(asked.reported)
                yield job

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """See `monitor.Listener`; asks the pruner."""
        self._monitor.validated(config, validation)
        if not self._is_asked(validation) or config.key not in self._running:  # a cluster may tell late
            return
        self._told[config.key][validation.step] = validation.error
        first = self._running[config.key][0]
        if first.state == "open" and self._journal.report(first, validation.step, validation.error):
            self._pruned.add(config.key)
            self._executor.stop(config)

    def _is_asked(self, validation: Validation) -> bool:
        """Whether the pruner looks at a validation."""
        return self._plan.prune != "none" and validation.step > 0 and math.isfinite(validation.error)

    def end(self, ended: Ended) -> None:
        """Take in how a run ended."""
        error = ended.error
        if isinstance(error, StorageError):
            raise error
        for asked in self._running.pop(ended.config.key):
            if ended.result is not None:
                self._complete(asked, ended.result)
            elif isinstance(error, InterruptedRunError) and ended.config.key in self._pruned:
                checkpoint.remove(self._place.folder / ended.config.key)
                self._prune(asked, ended.config)
            else:
                kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
                reason = kind + " ".join(str(error).split())
                self._fail(asked, reason, ended.config, for_good=not isinstance(error, WorkerDiedError))

    def _complete(self, asked: Asked, result: RunResult) -> None:
        score, _ = result.validation_score
        if asked.state == "open":
            for validation in filter(self._is_asked, result.validations):  # of a point that was drawn before
                self._journal.report(asked, validation.step, validation.error)
            self._journal.complete(asked, score)
        self._monitor.finished(result)
        self._keep(asked, result=result, error=finite(score), reason=_lost(result))

    def _fail(
        self, asked: Asked, reason: str, config: RunConfig | None = None, *, for_good: bool = True
    ) -> None:
        if asked.state == "open" and for_good:  # else it is done when the sweep is resumed
            self._journal.fail(asked, reason)
        self._keep(asked, reason=reason)
        self._monitor.unfinished(config or config_of_shown(self._settings, asked), f"failed: {reason}")

    def _prune(self, asked: Asked, config: RunConfig) -> None:
        """End a trial with what its run told before it was ended."""
        told = self._told[config.key]
        if asked.state == "open":
            for step, error in told.items():
                self._journal.report(asked, step, error)
            self._journal.prune(asked)
        step, error = max(told.items())
        words = f"pruned at step {step}"
        self._keep(asked, pruned_at=step, error=error, reason=f"{words}: worse than the median there")
        self._monitor.unfinished(config, words)

    def _keep(self, asked: Asked, **how: Any) -> None:
        self.done.append((asked, Trial(*asked.study, asked.point, FIRST_TUNING_SEED + asked.seed, **how)))


def config_of_shown(settings: Settings, asked: Asked) -> RunConfig:
    """Return a run that is called as the trial is; its other settings may be impossible."""
    rate = asked.point["learning_rate"]
    seed = FIRST_TUNING_SEED + asked.seed
    return settings.run_config(*asked.study, rate, seed, evaluate_test=False)


def _lost(result: RunResult) -> str:
    """Say why a run's result is of no worth; nothing if it is."""
    if result.diverged_at is not None:
        return f"the loss or a step was not finite after {result.diverged_at} steps"
    if result.lost_at is not None:
        return f"ended no better than it began: its loss rose above ten times the first one at step {result.lost_at}"
    return ""
