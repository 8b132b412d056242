"""Several trainings with different seeds, in parallel processes, the best one kept.

Alphabet of this module: K restarts. A restart differs from the others in its random graph and start values alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits

from .graph import Graph
from .parameters import Kind, Squash, start
from .text import Corpus
from .training import Report, Settings, Training, train


@dataclass(frozen=True)
class Architecture:
    """What a network is before it sees a text.

    Args:
        kind: "pcnn", "cnn" or "rnn".
        units: N.
        connectivity: edges that leave each unit, its loop included, or None for all N.
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
        full = self.connectivity is None or self.connectivity == self.units
        graph = Graph.full(self.units) if full else Graph.random(self.units, self.connectivity or 0, rng)
        return Training.begin(start(self.kind, self.squash, graph, corpus, rng), self.rate)


def score(training: Training, has_validation: bool) -> float:
    """Return what the best training has least of: validation bits, or else minus the log-likelihood."""
    return training.best_bits if has_validation else -training.log_likelihood


@dataclass(frozen=True, eq=False)
class _Job:
    training: Training
    corpus: Corpus
    settings: Settings
    validation: Corpus | None


def _run(job: _Job) -> Training:
    with threadpool_limits(1):
        return train(job.training, job.corpus, job.settings, job.validation)


def train_all(
    trainings: Sequence[Training],
    corpus: Corpus,
    settings: Sequence[Settings],
    validation: Corpus | None = None,
    jobs: int = 1,
    report: Report | None = None,
    finished: Callable[[int, Training], None] | None = None,
) -> list[Training]:
    """Train several networks on one text and return them in the order given.

    Args:
        trainings: where each begins, or goes on.
        corpus: training text.
        settings: how to train each.
        validation: text to stop on, or None.
        jobs: processes to use; 1 trains one after the other in this process.
        report: called after each pass, if jobs is 1.
        finished: called with the number of trainings done and the last of them.

    Raises:
        ValueError: if jobs is not positive.
        FloatingPointError: as `train` does.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    work = [_Job(t, corpus, each, validation) for t, each in zip(trainings, settings, strict=True)]
    if jobs == 1 or len(work) == 1:
        done = []
        with threadpool_limits(1):
            for job in work:
                done.append(train(job.training, corpus, job.settings, validation, report))
                if finished is not None:
                    finished(len(done), done[-1])
        return done
    # fork would copy the threads' locks of the linear algebra libraries
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
        done = []
        for training in pool.map(_run, work):
            done.append(training)
            if finished is not None:
                finished(len(done), training)
    return done


def race(
    architecture: Architecture,
    seeds: Sequence[int],
    corpus: Corpus,
    settings: Settings,
    validation: Corpus | None = None,
    jobs: int = 1,
    heat: int = 100,
    keep: int = 1,
    report: Report | None = None,
    finished: Callable[[int, Training], None] | None = None,
) -> list[Training]:
    """Train every seed for a heat, and the better ones to the end; return those, the best first.

    Args:
        architecture: what to train.
        seeds: one for each restart.
        corpus: training text.
        settings: how to train those that are kept; its seconds are shared by all, half of them by the heat.
        validation: text to choose and to stop on; without it the log-likelihood chooses.
        jobs: processes to use.
        heat: passes of the heat; 0 trains all to the end.
        keep: how many restarts go on after the heat.
        report: as in `train_all`.
        finished: as in `train_all`.
    """
    trainings = [architecture.training(corpus, seed) for seed in seeds]
    began = time.perf_counter()
    if heat and len(trainings) > 1 and heat < settings.passes:
        half = None if settings.seconds is None else settings.seconds / 2
        short = _shared(replace(settings, passes=heat, seconds=half), trainings, jobs)
        trainings = train_all(trainings, corpus, short, validation, jobs, report)
        trainings.sort(key=lambda training: score(training, validation is not None))
        trainings = trainings[:keep]
    if settings.seconds is not None:
        settings = replace(settings, seconds=max(0.0, settings.seconds + began - time.perf_counter()))
    trainings = train_all(
        trainings, corpus, _shared(settings, trainings, jobs), validation, jobs, report, finished
    )
    return sorted(trainings, key=lambda training: score(training, validation is not None))


def _shared(settings: Settings, trainings: Sequence[Training], jobs: int) -> list[Settings]:
    """Divide the seconds of the settings among the trainings, on top of what they have used."""
    if settings.seconds is None:
        return [settings] * len(trainings)
    share = settings.seconds * min(jobs, len(trainings)) / len(trainings)
    return [replace(settings, seconds=training.seconds + share) for training in trainings]
