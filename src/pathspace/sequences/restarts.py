"""Several trainings with different seeds, in parallel processes, the best one kept.

Alphabet of this module: K restarts. A restart differs from the others in its random graph and start
values alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import numpy as np

from pathspace.sequences.checkpoints import Checkpoint, Checkpoints, train_kept
from pathspace.sequences.folds import Fold
from pathspace.sequences.graph import Graph
from pathspace.sequences.one_thread import one_thread
from pathspace.sequences.parameters import Kind, Squash, start
from pathspace.sequences.text import Corpus
from pathspace.sequences.training import Report, Settings, Training
from pathspace.tools.processes import Processes


@dataclass(frozen=True)
class Architecture:
    """Description of a network before it sees a text.

    Args:
        kind: "pcnn", "cnn" or "rnn".
        units: N.
        connectivity: edges that leave each unit, its loop included; None, or N and more, for all N.
        squash: "tanh" or "logistic".
        rate: first learning rate, 1/N if None.
    """

    kind: Kind
    units: int
    connectivity: int | None = 3
    squash: Squash = "tanh"
    rate: float | None = None

    def training(self, corpus: Corpus, seed: int) -> Training:
        """Return a training at its beginning, graph and start values drawn with this seed."""
        rng = np.random.default_rng(seed)
        full = self.connectivity is None or self.connectivity >= self.units
        graph = (
            Graph.full(self.units)
            if full
            else Graph.random(self.units, self.connectivity or 0, rng)
        )
        return Training.begin(start(self.kind, self.squash, graph, corpus, rng), self.rate)


def score(training: Training, has_validation: bool) -> float:
    """Return what the best training has least of: validation bits, or else minus the log-likelihood."""
    if has_validation:
        return training.result_bits
    return -training.log_likelihood if training.passes else math.inf  # NaN before the first pass


def _run(job: tuple[Training, Fold, Settings, Checkpoint | None]) -> Training:
    training, fold, settings, kept = job
    with one_thread():
        return train_kept(training, fold, settings, None, kept)


def train_all(
    trainings: Sequence[Training],
    folds: Sequence[Fold],
    settings: Sequence[Settings],
    jobs: int = 1,
    report: Report | None = None,
    kept: Checkpoints | None = None,
    stage: str = "end",
) -> list[Training]:
    """Train several networks and return them in the order given.

    Args:
        trainings: where each begins, or goes on.
        folds: the texts of each.
        settings: how to train each.
        jobs: processes to use; 1 trains one after the other in this process.
        report: called after each pass; with more processes than one, after each training.
        kept: where each is kept and goes on from, or None.
        stage: what these trainings are called there.

    Raises:
        ValueError: if jobs is not positive.
        FloatingPointError: as `train` does.
        ChildProcessError: if a process died.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    files = [kept.of(stage, k, each) if kept else None for k, each in enumerate(settings)]
    work = list(zip(trainings, folds, settings, files, strict=True))
    if jobs == 1 or len(work) == 1:
        with one_thread():
            return [
                train_kept(training, fold, each, report, file)
                for training, fold, each, file in work
            ]
    processes = Processes(min(jobs, len(work)))
    done = []
    try:
        for future in [processes.submit(_run, each) for each in work]:
            done.append(future.result())
            if report is not None:
                report(done[-1])
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a training process died, perhaps because memory ran out: give fewer jobs"
        ) from error
    except BaseException:  # nobody wants what they are at
        processes.kill()
        raise
    return done


def race(
    architecture: Architecture,
    seeds: Sequence[int],
    folds: Sequence[Fold],
    settings: Settings,
    jobs: int = 1,
    heat: int = 100,
    keep: int = 1,
    report: Report | None = None,
    kept: Checkpoints | None = None,
) -> list[list[Training]]:
    """Train every seed for a heat, and the better ones to the end; return those of each fold, the best first.

    Args:
        architecture: what to train.
        seeds: one for each restart; the k-th belongs to fold k modulo the number of folds.
        folds: the texts; without a validation text the log-likelihood chooses.
        settings: how to train those that are kept; its seconds are shared by all, half of them by
            the heat.
        jobs: processes to use.
        heat: passes of the heat; 0 trains all to the end.
        keep: how many restarts of each fold go on after the heat.
        report: as in `train_all`.
        kept: as in `train_all`.
    """
    F = len(folds)
    entries = [
        (k % F, architecture.training(folds[k % F].corpus, seed)) for k, seed in enumerate(seeds)
    ]
    began = time.perf_counter()
    spent = 0.0
    if heat and len(entries) > F and heat < settings.passes:
        half = None if settings.seconds is None else settings.seconds / 2
        short = replace(settings, passes=heat, seconds=half)
        ranked = _by_fold(entries, folds, short, jobs, report, kept=kept, stage="heat")
        spent = sum(training.seconds for found in ranked for training in found) / min(
            jobs, len(entries)
        )
        entries = [(number, training) for number in range(F) for training in ranked[number][:keep]]
    if settings.seconds is not None:
        # less than the trainings had if they went on from checkpoints
        spent = max(spent, time.perf_counter() - began)
        settings = replace(settings, seconds=max(0.0, settings.seconds - spent))
    return _by_fold(entries, folds, settings, jobs, report, kept=kept)


def _by_fold(
    entries: Sequence[tuple[int, Training]],
    folds: Sequence[Fold],
    settings: Settings,
    jobs: int,
    report: Report | None,
    *,
    kept: Checkpoints | None,
    stage: str = "end",
) -> list[list[Training]]:
    """Train all entries (number of the fold, training) and sort them fold by fold, the best first."""
    trainings = [training for _, training in entries]
    texts = [folds[number] for number, _ in entries]
    shared = _shared(settings, trainings, jobs)
    done = train_all(trainings, texts, shared, jobs, report, kept, stage)
    ranked: list[list[Training]] = [[] for _ in folds]
    for (number, _), training in zip(entries, done, strict=True):
        ranked[number].append(training)
    for fold, found in zip(folds, ranked, strict=True):
        found.sort(key=lambda training: score(training, fold.validation is not None))
    return ranked


def _shared(settings: Settings, trainings: Sequence[Training], jobs: int) -> list[Settings]:
    """Divide the seconds of the settings among the trainings, on top of what they have used."""
    if settings.seconds is None:
        return [settings] * len(trainings)
    share = settings.seconds * min(jobs, len(trainings)) / len(trainings)
    return [replace(settings, seconds=training.seconds + share) for training in trainings]
