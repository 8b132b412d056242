"""The trials of a sweep: Optuna draws points and keeps them in its journal; a job does the runs of one point.

Every method and start has a study, so that all of them get the same number of points, however good
they are. A trial of a study is a point, its value the mean validation error over seeds. How its
runs ended is an attribute of the trial.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from pathspace.experiments.compare import check_task_of
from pathspace.experiments.configuration import JOURNAL
from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.runner import JobOutcome, PlacedRun, Runs, WorkerDiedError
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings
from pathspace.experiments.storage import clear_failure, finite
from pathspace.experiments.sweep.plan import RATE, Plan, config_of
from pathspace.experiments.terminal import Monitor, Part

LEAST = 5
"""Points that came through before one is pruned."""
ENDED = "runs"
"""The attribute of a trial that holds how its runs ended. A trial without it was stopped."""


@dataclass(frozen=True)
class Run:
    """The end of one run of a sweep.

    Attributes:
        seed: Of the run.
        state: `"complete"`, `"pruned"` or `"failed"`, which includes runs that diverged.
        reason: Why there is no result, or none of worth; empty if all went well.
        error: The last validation error that is known; None if there is none.
        loss: The last validation loss of a run that came to its end; None if it is not finite.
        steps: How many steps were done; None of a run that an error ended.
        seconds: Time spent in them.
    """

    seed: int
    state: str
    reason: str = ""
    error: float | None = None
    loss: float | None = None
    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Point:
    """A point of the search, values of what was searched, with its runs, one for each seed that was taken."""

    method: str
    start: str
    point: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def states(self) -> Counter[str]:
        """The number of runs that ended in each state."""
        return Counter(run.state for run in self.runs)

    def values(self, what: str) -> list[float]:
        """Return the errors or losses, whichever is asked for, of the runs that came through."""
        values = [getattr(run, what) for run in self.runs if run.state == "complete"]
        return [value for value in values if value is not None]

    def mean(self, what: str) -> float | None:
        """Return the mean of `values`; None unless every run came through: a mean of the others would flatter."""
        values = self.values(what)
        return math.fsum(values) / len(values) if len(values) == len(self.runs) else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation of the errors over seeds; None for a single one."""
        mean, errors = self.mean("error"), self.values("error")
        if mean is None or len(errors) < 2:
            return None
        return math.hypot(*(error - mean for error in errors)) / math.sqrt(len(errors) - 1)

    @property
    def score(self) -> tuple[float, float]:
        """The score of a point, least is best: the mean error, then the mean loss."""
        error, loss = self.mean("error"), self.mean("loss")
        return (math.inf if error is None else error, math.inf if loss is None else loss)


@dataclass(frozen=True)
class Sweep:
    """All that a sweep found; points by method and start, then in the order in which they were drawn."""

    settings: Settings
    plan: Plan
    task_description: str
    metric: str
    points: tuple[Point, ...]

    @property
    def all_failed(self) -> bool:
        """True if not a single run came through."""
        return not any(point.states["complete"] for point in self.points)


def sweep(settings: Settings, plan: Plan, runs: Runs) -> Sweep:
    """Do all trials that are not done yet, with as many runs at each point as the settings have seeds.

    Raises:
        ConfigurationError: The task cannot be had, or results cannot be read or written.
        KeyboardInterrupt: The user stopped; the same call continues.
    """
    task = check_task_of(settings, runs.data_dir)
    points = _Points(settings, plan, runs)
    with runs.runner as ready:
        for ended in ready.run(points.jobs(), runs.monitor):
            points.end(ended)
    return Sweep(settings, plan, task.description, task.metric, points.ended())


@dataclass(frozen=True)
class PointJob:
    """The runs of a point, one for each seed; see `runner.Work`.

    Attributes:
        trial: Told the validation errors of the first run, and asked whether to prune; None where
            none is pruned.
    """

    label: str
    runs: tuple[PlacedRun, ...]
    trial: optuna.Trial | None = None

    @property
    def key(self) -> str:
        """See `runner.Work`."""
        return self.runs[0].key

    def __call__(self, monitor: Monitor) -> list[Run]:
        """Do the runs that have no result yet, and return how each ended."""
        ended = []
        for number, run in enumerate(self.runs):
            part = Part(monitor, self.label, number, len(self.runs))
            if number == 0 and self.trial is not None:
                part = _Pruning(part, self.trial)
            ended.append(_end(run, part))
            if ended[-1].state == "pruned":
                break
        return ended


def _end(run: PlacedRun, monitor: Monitor) -> Run:
    """Do a run that has no result yet, and return how it ended."""
    seed = run.config.seed
    try:
        result = run.stored()
        if result is None:
            result = run(monitor)
            run.keep(result)
    except StorageError:
        raise
    except optuna.TrialPruned as pruned:
        run.remove_checkpoint()
        step, error = pruned.args
        reason = f"pruned at step {step}: worse than the median there"
        return Run(seed, "pruned", reason, error, steps=step)
    except Exception as error:
        return _failed(seed, error)
    lost = _lost(result)
    error, loss = finite(result.validation_score[0]), finite(result.validations[-1].loss)
    state = "failed" if lost else "complete"
    return Run(seed, state, lost, error, loss, len(result.losses), result.seconds)


class _Pruning(Part):
    """Hands on what a run tells, and ends it, with the step and its error, where Optuna's pruner says so."""

    def __init__(self, monitor: Monitor, trial: optuna.Trial) -> None:
        super().__init__(monitor, "", 0, 1)
        self._trial = trial
        # a stopped command may have told some steps
        trials = trial.study.get_trials(deepcopy=False)
        self._told = set(trials[trial.number].intermediate_values)

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """See `terminal.Monitor`."""
        super().validated(config, validation)
        if validation.step == 0 or not math.isfinite(validation.error):
            return
        if validation.step not in self._told:
            self._trial.report(validation.error, validation.step)
        if self._trial.should_prune():
            raise optuna.TrialPruned(validation.step, validation.error)


class _Points:
    """The points of all studies: as jobs while they are to be done, with their runs when they are over."""

    def __init__(self, settings: Settings, plan: Plan, runs: Runs) -> None:
        self._settings = settings
        self._plan = plan
        self._runs = runs
        self._studies = _studies(runs.output / JOURNAL, settings, plan)
        # Points that are the same runs, as where a method ignores what is searched: by the key of
        # the first run.
        self._running: dict[str, list[optuna.Trial]] = {}
        self._done: dict[str, list[Run]] = {}
        done = 0
        for study in self._studies:
            done += sum(trial.state.is_finished() for trial in _begun(study))
        points = plan.trials * len(self._studies)
        runs.monitor.stage("Sweeping on the validation split", points, done)

    def ended(self) -> tuple[Point, ...]:
        """Return the points that are over, of one study after the other."""
        found = []
        for study in self._studies:
            for trial in _begun(study):
                runs = tuple(Run(**run) for run in trial.user_attrs[ENDED])
                found.append(Point(*_names(study), trial.params, runs))
        return tuple(found)

    def jobs(self) -> Iterator[PointJob]:
        """Draw the remaining points, one when it is asked for, all studies in turn; give those that are to be run."""
        stopped = []
        for study in self._studies:
            left = study.get_trials(states=[TrialState.RUNNING])
            stopped += [optuna.Trial(study, trial._trial_id) for trial in left]
        for trial in stopped:
            yield from self._next(trial)
        for _ in range(self._plan.trials):
            for study in self._studies:
                if len(_begun(study)) < self._plan.trials:
                    yield from self._next(study.ask())

    def _next(self, trial: optuna.Trial) -> Iterator[PointJob]:
        point = {dimension.name: dimension.draw(trial) for dimension in self._plan.search}
        seeds = range(self._settings.seeds)
        names = _names(trial.study)
        try:
            configs = [config_of(self._settings, names, point, seed) for seed in seeds]
        except ConfigurationError as error:
            self._tell(trial, [_failed(FIRST_TUNING_SEED + seed, error) for seed in seeds])
            return
        every = self._settings.checkpoint_every
        runs = tuple(self._runs.job(config, every) for config in configs)
        job = PointJob(_label(trial), runs, trial if self._plan.prune == "median" else None)
        if job.key in self._done:
            self._tell(trial, self._done[job.key])
        elif job.key in self._running:
            self._running[job.key].append(trial)
        else:
            self._running[job.key] = [trial]
            yield job

    def end(self, ended: JobOutcome) -> None:
        """Take in how the runs of a point ended.

        Raises:
            StorageError: Their results could not be written.
        """
        job, error = ended.job, ended.error
        if isinstance(error, StorageError):
            raise error
        runs = (
            ended.result if error is None else [_failed(run.config.seed, error) for run in job.runs]
        )
        for trial in self._running.pop(job.key):
            if isinstance(error, WorkerDiedError):  # it is done when the sweep is resumed
                _keep(trial, runs)
            else:
                self._done[job.key] = runs
                self._tell(trial, runs)

    def _tell(self, trial: optuna.Trial, runs: Sequence[Run]) -> None:
        _keep(trial, runs)
        if any(run.state == "pruned" for run in runs):
            trial.study.tell(trial, state=TrialState.PRUNED)
        elif any(run.steps is None for run in runs):
            trial.study.tell(trial, state=TrialState.FAIL)
        else:
            errors = [math.inf if run.error is None else run.error for run in runs]
            trial.study.tell(trial, math.fsum(errors) / len(errors))
        shown = "; ".join(run.reason or f"validation error {run.error:.4g}" for run in runs)
        self._runs.monitor.finished(_label(trial), shown)


def _keep(trial: optuna.Trial, runs: Sequence[Run]) -> None:
    trial.set_user_attr(ENDED, [asdict(run) for run in runs])


def _names(study: optuna.Study) -> tuple[str, str]:
    """Return the method and the start of a study."""
    method, start = study.study_name.split(", ")
    return method, start


def _label(trial: optuna.Trial) -> str:
    return f"{trial.study.study_name}, rate {trial.params[RATE]:g}"


def _begun(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials of a study that are running or over."""
    trials = study.get_trials(deepcopy=False)
    return [t for t in trials if ENDED in t.user_attrs or t.state == TrialState.RUNNING]


def _studies(file: Path, settings: Settings, plan: Plan) -> list[optuna.Study]:
    """Return the studies of a journal, which is made where there is none.

    Raises:
        ConfigurationError: The journal is damaged.
        StorageError: It cannot be written to, now or later.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A killed command may have left its lock, and a full disk half a line. This one is alone in the
    # folder.
    for left in file.parent.glob(f"{file.name}.lock*"):
        left.unlink()
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    try:
        storage = JournalStorage(_JournalFile(str(file)))
        names = itertools.product(settings.methods, settings.starts)
        return [_study(storage, plan, ", ".join(name)) for name in names]
    except StorageError:
        raise
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The journal {str(file)!r} cannot be read ({error}): delete it and give the command again, which "
            "keeps finished runs."
        ) from error


def _study(storage: JournalStorage, plan: Plan, name: str) -> optuna.Study:
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    # With its own seed each time: a sampler that begins anew would draw the points of before.
    seed = zlib.crc32(f"{name}, {len(study.trials)}".encode())
    study.sampler = TPESampler(seed=seed) if plan.sampler == "tpe" else RandomSampler(seed=seed)
    study.pruner = MedianPruner(LEAST) if plan.prune == "median" else NopPruner()
    if any(trial.value is not None and ENDED not in trial.user_attrs for trial in study.trials):
        raise ValueError("it is of another version of pathspace")
    for point in plan.grid() if plan.sampler == "grid" else ():
        study.enqueue_trial(point, skip_if_exists=True)
    return study


class _JournalFile(JournalFileBackend):
    """The journal's file, which says its name where the disk is full."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with clear_failure(Path(self._file_path)):
            super().append_logs(logs)


def _failed(seed: int, error: BaseException) -> Run:
    """Return a run that an error has ended."""
    kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
    return Run(seed, "failed", kind + " ".join(str(error).split()))


def _lost(result: RunResult) -> str:
    """Say why a run's result is of no worth; nothing if it is."""
    if result.diverged_at is not None:
        return f"the loss or a step was not finite after {result.diverged_at} steps"
    if result.lost_at is not None:
        return f"ended no better than it began: its loss rose above ten times the first one at step {result.lost_at}"
    return ""
