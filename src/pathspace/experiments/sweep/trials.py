"""A sweep's runs: each is a trial that ends with a result or a reason, and none of them stops the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspace.experiments import checkpoint
from pathspace.experiments.compare import check_task_of
from pathspace.experiments.configuration import JOURNAL, RUNS
from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.jobs import Place, PlacedRun, outcome
from pathspace.experiments.monitor import Monitor
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.runner import Ended, Runner, WorkerDiedError
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings
from pathspace.experiments.storage import finite
from pathspace.experiments.sweep.journal import Asked, Journal, Looks
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
    runner: Runner | None = None,
    device: str = "cpu",
) -> Sweep:
    """Do all trials that are not done yet.

    Args:
        settings: Of everything that is not searched; `seeds` runs are done at each point.
        plan: What is searched.
        output: The journal and the runs are kept in it.
        monitor: Told about every run.
        data_dir: Where tasks look for data sets.
        runner: Who does the runs; None does them in this process.
        device: Where they compute.

    Raises:
        ConfigurationError: The task cannot be had, or results cannot be read or written.
        KeyboardInterrupt: The user stopped; the same call continues.
    """
    task = check_task_of(settings, data_dir)
    studies = [(method, start) for method in settings.methods for start in settings.starts]
    journal = Journal(output / JOURNAL, plan, settings.seeds, studies)
    place = Place(output / RUNS, data_dir, settings.checkpoint_every, device)
    monitor.stage("Sweeping on the validation split", plan.trials * len(studies) * settings.seeds)
    trials = _Trials(settings, plan, journal, place, monitor)
    with runner or Runner() as ready:
        for ended in ready.run(trials.jobs(), monitor):
            trials.end(ended)
    order = {study: number for number, study in enumerate(studies)}
    done = sorted(trials.done, key=lambda pair: (order[pair[0].study], pair[0].number))
    return Sweep(settings, plan, task.description, task.metric, tuple(trial for _, trial in done))


class PrunedError(Exception):
    """A run was ended because it was worse than most; its argument are its validation errors by step."""


@dataclass(frozen=True)
class PrunedRun(PlacedRun):
    """A run that ends where the journal finds it worse than most."""

    looks: Looks

    def __call__(self, monitor: Monitor) -> RunResult:
        """See `jobs.PlacedRun`.

        Raises:
            PrunedError: It was worse than most.
        """
        return super().__call__(_Pruning(monitor, self.looks.open()))


class _Pruning(Monitor):
    """Hands on what a run tells, and ends it if it is worse than most."""

    def __init__(self, monitor: Monitor, is_worse: Callable[[int, float], bool]) -> None:
        self._is_worse, self._errors = is_worse, dict[int, float]()
        self._validated = monitor.validated
        self.started, self.advanced, self.noted = monitor.started, monitor.advanced, monitor.noted

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """See `monitor.Monitor`; asks the journal."""
        self._validated(config, validation)
        if not _counts(validation):
            return
        self._errors[validation.step] = validation.error
        if self._is_worse(validation.step, validation.error):
            raise PrunedError(self._errors)


def _counts(validation: Validation) -> bool:
    """Whether a validation is one to prune by."""
    return validation.step > 0 and math.isfinite(validation.error)


class _Trials:
    """The trials while they are done."""

    def __init__(
        self, settings: Settings, plan: Plan, journal: Journal, place: Place, monitor: Monitor
    ) -> None:
        self._settings, self._plan, self._journal = settings, plan, journal
        self._place, self._monitor = place, monitor
        self._running: dict[str, list[Asked]] = {}  # by key of the run; a point may be drawn twice
        self._pruned: dict[str, dict[int, float]] = {}  # by key: the validation errors of pruned runs
        self.done: list[tuple[Asked, Trial]] = []

    def jobs(self) -> Iterator[PlacedRun]:
        """Take trials and give the runs that have no result yet."""
        yield from self._open(self._journal.earlier())
        yield from self._open(self._journal.new())

    def _open(self, trials: Iterable[Asked]) -> Iterator[PlacedRun]:
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
                self._pruned[config.key] = dict(asked.reported)
                self._prune(asked, config)
                continue
            job = self._job(config, asked)
            result = job.stored()
            if result is not None:
                self._complete(asked, result, job.label)
            elif config.key in self._running:
                self._running[config.key].append(asked)
            elif config.key in self._pruned:  # drawn again
                self._prune(asked, config)
            else:
                self._running[config.key] = [asked]
                yield job

    def _job(self, config: RunConfig, asked: Asked) -> PlacedRun:
        if self._plan.prune == "none" or asked.state != "open":
            return PlacedRun(config, self._place)
        looks = Looks(self._journal.file, asked.study, asked.number, self._settings.seeds)
        return PrunedRun(config, self._place, looks)

    def end(self, ended: Ended) -> None:
        """Take in how a run ended."""
        job, error = ended.job, ended.error
        if isinstance(error, StorageError):
            raise error
        if isinstance(error, PrunedError):
            first = self._running[job.key][0]
            self._pruned[job.key] = {**first.reported, **error.args[0]}
            checkpoint.remove(job.folder)
        if error is None:
            job.keep(ended.result)
        for asked in self._running.pop(job.key):
            if error is None:
                self._complete(asked, ended.result, job.label)
            elif isinstance(error, PrunedError):
                self._prune(asked, job.config)
            else:
                kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
                reason = kind + " ".join(str(error).split())
                self._fail(asked, reason, for_good=not isinstance(error, WorkerDiedError))

    def _complete(self, asked: Asked, result: RunResult, label: str) -> None:
        score, _ = result.validation_score
        if asked.state == "open":
            if self._plan.prune != "none":  # of a point that was drawn before
                for validation in filter(_counts, result.validations):
                    self._journal.report(asked, validation.step, validation.error)
            self._journal.complete(asked, score)
        self._monitor.finished(label, outcome(result))
        self._keep(asked, result=result, error=finite(score), reason=_lost(result))

    def _fail(self, asked: Asked, reason: str, *, for_good: bool = True) -> None:
        if asked.state == "open" and for_good:  # else it is done when the sweep is resumed
            self._journal.fail(asked, reason)
        self._keep(asked, reason=reason)
        method, start = asked.study
        label = f"{method}, {start}, rate {asked.point['learning_rate']:g}, seed {asked.seed}"
        self._monitor.finished(label, f"failed: {reason}")

    def _prune(self, asked: Asked, config: RunConfig) -> None:
        """End a trial with what its run told before it was ended."""
        told = self._pruned[config.key]
        if asked.state == "open":
            for step, error in told.items():
                self._journal.report(asked, step, error)
            self._journal.prune(asked)
        step, error = max(told.items())
        words = f"pruned at step {step}"
        self._keep(asked, pruned_at=step, error=error, reason=f"{words}: worse than the median there")
        self._monitor.finished(config.label, words)

    def _keep(self, asked: Asked, **how: Any) -> None:
        self.done.append((asked, Trial(*asked.study, asked.point, FIRST_TUNING_SEED + asked.seed, **how)))


def _lost(result: RunResult) -> str:
    """Say why a run's result is of no worth; nothing if it is."""
    if result.diverged_at is not None:
        return f"the loss or a step was not finite after {result.diverged_at} steps"
    if result.lost_at is not None:
        return f"ended no better than it began: its loss rose above ten times the first one at step {result.lost_at}"
    return ""
