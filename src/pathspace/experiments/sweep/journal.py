"""The trials of a sweep in Optuna's journal file: which points were taken, and how each ended, killed or not.

Every method and start has a study of its own, so that all of them get the same number of points, however good they are.
With S seeds the trials p S, ..., p S + S - 1 of a study are the point p: the first one takes it, the others repeat it.
Who draws trial n is seeded by n, so that a sweep that was stopped goes on with the points that it would have taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.experiments.storage import clear_failure
from pathspace.experiments.sweep.plan import Dimension, Plan

REASON = "reason"
LEAST = 5  # points that came through before one is pruned
Study = tuple[str, str]  # method and start


@dataclass(frozen=True)
class Asked:
    """A trial that is to be done, or that ended earlier.

    Attributes:
        study: Its method and start.
        number: In its study.
        point: Values of what is searched.
        seed: The number of its seed.
        state: `"open"`, `"complete"`, `"failed"` or `"pruned"`.
        reason: Why it failed.
        reported: Validation errors by step, as far as it told them.
    """

    study: Study
    number: int
    point: Mapping[str, Any]
    seed: int
    state: str = "open"
    reason: str = ""
    reported: Mapping[int, float] = field(default_factory=dict)


class Journal:
    """The studies of a sweep.

    Args:
        file: Where they are kept; what is there goes on.
        plan: How points are taken.
        seeds: Runs at each point.
        studies: Methods and starts.

    Raises:
        ConfigurationError: The file is damaged.
        StorageError: It cannot be written to, now or later.
    """

    def __init__(self, file: Path, plan: Plan, seeds: int, studies: Sequence[Study]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _mend(file)
        self.file, self._plan, self._seeds = file, plan, seeds
        self._grid = plan.grid() if plan.sampler == "grid" else []
        try:
            storage = JournalStorage(_File(file))
            self._studies = {
                study: optuna.create_study(storage=storage, study_name=", ".join(study), load_if_exists=True)
                for study in studies
            }
        except StorageError:
            raise
        except (
            AssertionError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # of a damaged line
            raise ConfigurationError(
                f"The journal {str(file)!r} cannot be read ({error}): delete it and give the command again, which "
                "takes the same points and keeps finished runs."
            ) from error
        self._open: dict[tuple[Study, int], optuna.Trial] = {}

    def earlier(self) -> list[Asked]:
        """Return the trials that a stopped sweep has left: those that ended, and those that did not, which are open."""
        return [self._asked(study, trial) for study in self._studies for trial in self._begun(study)]

    def new(self) -> Iterator[Asked]:
        """Take the remaining trials, one when it is asked for; all studies in turn, a point each."""
        for place in range(self._plan.trials):
            for study in self._studies:
                while len(self._begun(study)) < (place + 1) * self._seeds:
                    yield self._take(study)

    def _begun(self, study: Study) -> list[FrozenTrial]:
        trials = self._studies[study].get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state != TrialState.WAITING]

    def _take(self, study: Study) -> Asked:
        there = self._studies[study]
        begun = self._begun(study)
        place, seed = divmod(len(begun), self._seeds)
        if len(there.get_trials(deepcopy=False)) == len(
            begun
        ):  # else one waits that a killed sweep has put there
            if seed:
                there.enqueue_trial(begun[place * self._seeds].params)
            elif self._grid:
                there.enqueue_trial(self._grid[place])
        there.sampler = self._sampler(study, len(begun))
        trial = there.ask()
        self._open[study, trial.number] = trial
        return Asked(study, trial.number, self._point(trial), seed)

    def _asked(self, study: Study, frozen: FrozenTrial) -> Asked:
        state = {
            TrialState.RUNNING: "open", TrialState.COMPLETE: "complete", TrialState.FAIL: "failed",
            TrialState.PRUNED: "pruned",
        }[frozen.state]  # fmt: skip
        point = frozen.params
        if state == "open":
            there = self._studies[study]
            there.sampler = self._sampler(study, frozen.number)
            trial = optuna.Trial(there, frozen._trial_id)
            self._open[study, frozen.number] = trial
            point = self._point(trial)
        return Asked(
            study, frozen.number, point, frozen.number % self._seeds, state,
            frozen.user_attrs.get(REASON, ""), dict(frozen.intermediate_values),
        )  # fmt: skip

    def _point(self, trial: optuna.Trial) -> dict[str, Any]:
        return {dimension.name: _suggest(trial, dimension) for dimension in self._plan.search}

    def _sampler(self, study: Study, number: int) -> optuna.samplers.BaseSampler:
        digest = hashlib.sha256(f"{', '.join(study)}, {number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        kind = optuna.samplers.TPESampler if self._plan.sampler == "tpe" else optuna.samplers.RandomSampler
        return kind(seed=seed)

    def report(self, asked: Asked, step: int, error: float) -> bool:
        """Keep a validation error of an open trial; see `report`."""
        return report(self._studies[asked.study], asked.number, self._seeds, step, error)

    def complete(self, asked: Asked, error: float) -> None:
        """End an open trial with its validation error, infinite if it diverged."""
        self._studies[asked.study].tell(self._open.pop((asked.study, asked.number)), error)

    def fail(self, asked: Asked, reason: str) -> None:
        """End an open trial without a value."""
        trial = self._open.pop((asked.study, asked.number))
        trial.set_user_attr(REASON, reason)
        self._studies[asked.study].tell(trial, state=TrialState.FAIL)

    def prune(self, asked: Asked) -> None:
        """End an open trial with what it has reported."""
        self._studies[asked.study].tell(self._open.pop((asked.study, asked.number)), state=TrialState.PRUNED)


def report(study: optuna.Study, number: int, seeds: int, step: int, error: float) -> bool:
    """Keep a validation error of an open trial; say whether its least one so far is worse than the median.

    That is of the errors at this step of earlier points, with the same seed, that came to their end, `LEAST` at
    least: else a hard seed would be taken for a bad point.
    """
    trials = study.get_trials(deepcopy=False)
    reported = trials[number].intermediate_values
    if any(later > step for later in reported):  # before it was killed, and it went on
        return False
    if step not in reported:  # or killed before it was pruned
        study._storage.set_trial_intermediate_value(trials[number]._trial_id, step, error)
    others = [
        trial.intermediate_values.get(step, math.inf)  # it diverged before
        for trial in trials
        if trial.state == TrialState.COMPLETE and trial.number % seeds == number % seeds
    ]
    return len(others) >= LEAST and min(error, *reported.values(), math.inf) > statistics.median(others)


@dataclass(frozen=True)
class Looks:
    """What a trial in any process needs in order to be pruned: its place in the journal.

    Attributes:
        file: The journal.
        study: Of the trial.
        number: In its study.
        seeds: Runs at each point.
    """

    file: Path
    study: Study
    number: int
    seeds: int

    def open(self) -> Callable[[int, float], bool]:
        """Return what keeps a validation error by its step, and says whether it is worse than the median.

        Where the journal is out of reach, on a machine that does not share its folder, no error is.
        """
        if not self.file.exists():
            return lambda _step, _error: False
        study = optuna.load_study(study_name=", ".join(self.study), storage=JournalStorage(_File(self.file)))
        return lambda step, error: report(study, self.number, self.seeds, step, error)


class _File(JournalFileBackend):
    """The journal's file, which says its name where the disk is full."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with clear_failure(self._file):
            super().append_logs(logs)


def _suggest(trial: optuna.Trial, dimension: Dimension) -> Any:
    if dimension.values:
        return trial.suggest_categorical(dimension.name, dimension.values)
    if dimension.whole:
        return trial.suggest_int(dimension.name, int(dimension.low), int(dimension.high), log=dimension.log)
    return trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.log)


def _mend(file: Path) -> None:
    """Take away what a killed command may have left: a lock, and half a line. The caller is alone in the folder."""
    for left in file.parent.glob(f"{file.name}.lock*"):
        left.unlink()
    with contextlib.suppress(FileNotFoundError):
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with file.open("r+b") as journal:
                journal.truncate(whole)
