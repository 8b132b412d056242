"""Trains copies of the network together, until each has learned its problem or its steps are over.

Every step draws a fresh batch, so the loss before a step is an error on sequences that were never seen; where its mean
over the last 20 steps is below the target, the test sequences decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.experiments.long_memory import copies
from pathspace.experiments.long_memory.copies import COUNTS, NAMES, Parameters
from pathspace.experiments.long_memory.methods import METHODS, Method
from pathspace.experiments.long_memory.problems import PROBLEMS, draw
from pathspace.experiments.long_memory.rules import RULES
from pathspace.experiments.schedule import factor

CHECK_EVERY = 20
TEST_SEED = 999_983
_BATCHES, _PERMUTATIONS = (
    1_000_000,
    2_000_000,
)  # added to a run's seed, so that starts, data and orders are independent


@dataclass(frozen=True)
class Setup:
    """How runs are done.

    Attributes:
        problem: A name in `problems.PROBLEMS`.
        length: T.
        hidden: H.
        steps: Most steps of a run; the cosine ends there.
        batch_size: B.
        warmup: The part of the steps over which the rate rises.
        clip_norm: Largest norm of the gradient in the method's coordinates; 0 does not clip.
        refresh_every: Steps between two computations of kappa; the first so many compute it each, as in the library.
        damping: Added to kappa, as a fraction of its mean.
        test_size: Sequences that decide whether a run has learned it.
    """

    problem: str
    length: int
    hidden: int
    steps: int
    batch_size: int = 32
    warmup: float = 0.05
    clip_norm: float = 1.0
    refresh_every: int = 10
    damping: float = 0.01
    test_size: int = 2_000


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        rate: Its learning rate.
        seed: Decides its start and its batches.
        steps: Steps until it had learned the problem; None if it never had.
        error: Of the test sequences, in the end; None if it diverged.
    """

    rate: float
    seed: int
    steps: int | None
    error: float | None


class Metric:
    """1 / sqrt(D) of every parameter, D = (kappa / mean + damping)^power: `ps.metrics.Path` on the balanced network."""

    def __init__(self, method: Method, setup: Setup, seeds: Sequence[int]) -> None:
        self.method, self.setup = method, setup
        self.roots: Parameters = {}
        orders = [
            torch.randperm(setup.hidden, generator=torch.Generator().manual_seed(_PERMUTATIONS + s))
            for s in seeds
        ]
        self.orders = torch.stack(orders)

    def at(self, step: int, p: Parameters) -> Parameters:
        """Return 1 / sqrt(D) for the parameters that have a kappa, computed anew if that is due."""
        every, method = self.setup.refresh_every, self.method
        due = step < every or step % every == 0
        if method.power and (step == 0 or (due and not method.once)):
            found = copies.kappa(p, self.setup.length)
            self.roots = {name: self._root(found[name]).to(p[name].dtype) for name in method.of}
        return self.roots

    def _root(self, kappa: Tensor) -> Tensor:
        if self.method.permuted:
            for dim in range(1, kappa.dim()):
                if kappa.shape[dim] == self.setup.hidden:
                    shape = [len(kappa), *(1,) * (kappa.dim() - 1)]
                    shape[dim] = self.setup.hidden
                    kappa = kappa.gather(dim, self.orders.view(shape).expand(kappa.shape))
        mean = kappa.flatten(1).mean(1).view(-1, *(1,) * (kappa.dim() - 1))
        return (kappa / mean + self.setup.damping).pow(-self.method.power / 2)

    def keep(self, index: Tensor) -> None:
        """Forget all copies but these."""
        self.roots, self.orders = copies.taken(self.roots, index), self.orders[index]


class Trainer:
    """Copies of the network in training, one for every run.

    Args:
        method: A name in `methods.METHODS`.
        runs: Of each its learning rate, and the seed that decides its start and its batches.
        setup: How runs are done.
    """

    def __init__(self, method: str, runs: Sequence[tuple[float, int]], setup: Setup) -> None:
        self.method, self.setup = METHODS[method], setup
        seeds = [seed for _, seed in runs]
        self.rates = torch.tensor([rate for rate, _ in runs])
        self.p = copies.starts(seeds, setup.hidden)
        if self.method.balanced:
            self.p = copies.balanced(self.p, setup.length)
        self.metric = Metric(self.method, setup, seeds)
        self.places = list(range(len(seeds)))  # of the copies that go on
        self.generators = [torch.Generator().manual_seed(_BATCHES + seed) for seed in seeds]
        hidden, matrices, vectors = RULES[self.method.rule]
        others = {name: matrices if self.p[name].dim() == 3 else vectors for name in NAMES}
        self.directions = {name: rule() for name, rule in {**others, "recurrent": hidden}.items()}
        self.memory = torch.empty(0)  # of the states and their gradients, kept between steps
        self.step = 0

    def advance(self) -> tuple[Tensor, Tensor]:
        """Take one step with all copies.

        Returns:
            The loss of every copy before the step, and whether all of its numbers were finite; the others stay.
        """
        setup, p = self.setup, self.p
        x, y = draw(setup.problem, self.generators, setup.batch_size, setup.length)
        size = 2 * setup.hidden * x[..., 0].numel()
        if self.memory.numel() < size:
            self.memory = torch.empty(size)
        loss, g = copies.loss_and_gradients(p, x, y, self.memory[:size])
        roots = self.metric.at(self.step, p)
        g = {name: g[name] * roots[name] if name in roots else g[name] for name in NAMES}
        square = sum(COUNTS.get(name, 1) * v.square().flatten(1).sum(1) for name, v in g.items())
        assert isinstance(square, Tensor)
        finite = torch.isfinite(square) & torch.isfinite(loss)
        # the norm over all parameters, each in the coordinates of the metric
        shorter = ((setup.clip_norm or math.inf) / square.sqrt()).clamp_max(1.0)
        rates = self.rates * factor("cosine", setup.warmup, self.step, setup.steps)
        for name in NAMES:
            each = (-1, *(1,) * (g[name].dim() - 1))
            clipped = g[name] * shorter.view(each)
            direction = self.directions[name](torch.nan_to_num(clipped, 0.0, 0.0, 0.0))
            if name in roots:
                direction = direction * roots[name]
            p[name].sub_(direction * rates.view(each))
        self.step += 1
        return loss, finite

    def keep(self, index: Tensor) -> None:
        """Go on with these copies alone."""
        self.p, self.rates = copies.taken(self.p, index), self.rates[index]
        self.metric.keep(index)
        for direction in self.directions.values():
            direction.keep(index)
        self.places = [self.places[i] for i in index.tolist()]
        self.generators = [self.generators[i] for i in index.tolist()]


def train(method: str, runs: Sequence[tuple[float, int]], setup: Setup) -> tuple[list[Outcome], float]:
    """Train until every run has learned the problem, diverged, or taken all its steps.

    Args:
        method: A name in `methods.METHODS`.
        runs: Learning rates and seeds.
        setup: How runs are done.

    Returns:
        What became of each, and the seconds of processor time that all took.
    """
    began, threads = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        return _train(Trainer(method, runs, setup), runs), time.process_time() - began
    finally:
        torch.set_num_threads(threads)


def _train(trainer: Trainer, runs: Sequence[tuple[float, int]]) -> list[Outcome]:
    setup, target = trainer.setup, PROBLEMS[trainer.setup.problem].target
    x, y = draw(setup.problem, [torch.Generator().manual_seed(TEST_SEED)], setup.test_size, setup.length)
    outcomes: dict[int, Outcome] = {}
    recent: list[Tensor] = []
    while trainer.places and trainer.step < setup.steps:
        loss, finite = trainer.advance()
        recent = [*recent[1 - CHECK_EVERY :], loss]
        ended: dict[int, tuple[int | None, float | None]] = {}
        for i in (~finite).nonzero().flatten().tolist():
            ended[i] = None, None
        last = trainer.step == setup.steps
        if last or trainer.step % CHECK_EVERY == 0:
            low = torch.stack(recent).mean(0) < target
            for i in (finite & (low | last)).nonzero().flatten().tolist():
                error = float(copies.errors(copies.taken(trainer.p, torch.tensor([i])), x, y))
                learned = bool(low[i]) and error < target
                if learned or last:
                    ended[i] = trainer.step if learned else None, error if math.isfinite(error) else None
        for i, (steps, error) in ended.items():
            rate, seed = runs[trainer.places[i]]
            outcomes[trainer.places[i]] = Outcome(rate, seed, steps, error)
        if ended:
            index = torch.tensor([i for i in range(len(loss)) if i not in ended], dtype=torch.long)
            trainer.keep(index)
            recent = [one[index] for one in recent]
    return [outcomes[place] for place in range(len(runs))]
