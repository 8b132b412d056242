"""Trains a network until it has learned its problem, or its steps are over.

Every step draws a fresh batch, so the loss before a step is an error on sequences that were never
seen; where its mean over the last 20 steps is below the target, the test sequences decide.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.experiments.long_memory.methods import METHODS
from pathspace.experiments.long_memory.protocol import PROBLEMS
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.monitor import Report, unheard
from pathspace.experiments.schedule import factor

CHECK_EVERY = 20
TEST_SEED = 999_983
# added to a run's seed, so that starts, data and orders are independent
BATCHES, PERMUTATIONS = 1_000_000, 2_000_000


@dataclass(frozen=True)
class Setup:
    """How runs are done.

    Attributes:
        problem: A name in `protocol.PROBLEMS`.
        length: T.
        hidden: H.
        steps: Most steps of a run; the cosine ends there.
        batch_size: B.
        warmup: The part of the steps over which the rate rises.
        clip_norm: Largest norm of the gradient in the method's coordinates; 0 does not clip.
        refresh_every: Steps between two computations of kappa; the first so many compute it each,
            as in the library.
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


class Trainer:
    """A network in training, from the identity, with PyTorch's own input and output weights.

    Args:
        method: A name in `methods.METHODS`.
        rate: The learning rate.
        seed: Decides the start and the batches.
        setup: How runs are done.
    """

    def __init__(self, method: str, rate: float, seed: int, setup: Setup) -> None:
        self.rate, self.setup, self.step = rate, setup, 0
        self.problem = PROBLEMS[setup.problem]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.model = ReluRNN(2, 1, hidden=setup.hidden, start="identity-recurrent")
        ps.nn.fast_(self.model)
        network = ps.trace(self.model, torch.zeros(1, setup.length, 2))
        chosen = METHODS[method]
        if chosen.balanced:
            ps.rescaling.balance_(network)
        self.clips_itself = chosen.power > 0
        self.optimizer = chosen.optimizer(
            self.model,
            network,
            clip_norm=setup.clip_norm or None,
            order=torch.randperm(setup.hidden, generator=_generator(PERMUTATIONS + seed)),
            damping=setup.damping,
            refresh_every=setup.refresh_every,
        )
        self.batches = _generator(BATCHES + seed)

    def advance(self) -> float | None:
        """Take a step; return the loss before it, or None if the loss, the gradient or the step is not finite."""
        setup = self.setup
        x, y = self.problem.draw(self.batches, setup.batch_size, setup.length)
        self.optimizer.zero_grad()
        loss = self._errors(x, y).mean()
        loss.backward()
        rate = self.rate * factor("cosine", setup.warmup, self.step, setup.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not self.clips_itself:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), setup.clip_norm or math.inf)
            if not torch.isfinite(norm):
                return None
        try:
            self.optimizer.step()
        except FloatingPointError:  # how the library's optimizers refuse to spoil the weights
            return None
        self.step += 1
        value = loss.item()
        return value if math.isfinite(value) else None

    @torch.no_grad()
    def error(self, x: Tensor, y: Tensor) -> float:
        """Return the mean squared error on sequences and their answers."""
        return self._errors(x, y).mean().item()

    def _errors(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x)[:, 0] - y).square()


def train(method: str, rate: float, seed: int, setup: Setup, report: Report = unheard) -> Outcome:
    """Train until the run has learned the problem, diverged, or taken all its steps.

    Args:
        method: A name in `methods.METHODS`.
        rate: The learning rate.
        seed: Decides the start and the batches.
        setup: How runs are done.
        report: Told now and then how far the run is.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        with warnings.catch_warnings():
            # at the highest rates it is, and the table says so
            warnings.filterwarnings("ignore", message="training is running away")
            return _train(Trainer(method, rate, seed, setup), seed, report)
    finally:
        torch.set_num_threads(threads)


def _train(trainer: Trainer, seed: int, report: Report) -> Outcome:
    setup, target = trainer.setup, trainer.problem.target
    x, y = trainer.problem.draw(_generator(TEST_SEED), setup.test_size, setup.length)
    recent: deque[float] = deque(maxlen=CHECK_EVERY)
    while trainer.step < setup.steps:
        loss = trainer.advance()
        if loss is None:
            return Outcome(trainer.rate, seed, None, None)
        recent.append(loss)
        report(trainer.step / setup.steps, f"step {trainer.step}/{setup.steps}, loss {loss:.4g}")
        checks = trainer.step % CHECK_EVERY == 0 or trainer.step == setup.steps
        if checks and sum(recent) / len(recent) < target:
            error = trainer.error(x, y)
            if error < target:
                return Outcome(trainer.rate, seed, trainer.step, error)
    error = trainer.error(x, y)
    return Outcome(trainer.rate, seed, None, error if math.isfinite(error) else None)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
