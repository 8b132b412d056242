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
from pathspace.experiments.long_memory.protocol import PROBLEMS, Cell, Protocol
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.monitor import ProgressCallback, unheard
from pathspace.experiments.run import factor

CHECK_EVERY = 20
TEST_SEED = 999_983
# added to a run's seed, so that starts, data and orders are independent
BATCHES, PERMUTATIONS = 1_000_000, 2_000_000


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
        cell: Which run.
        protocol: How runs are done.
    """

    def __init__(self, cell: Cell, protocol: Protocol) -> None:
        setting = cell.setting
        seed = cell.seed
        self.cell = cell
        self.protocol = protocol
        self.step = 0
        self.steps = protocol.steps_per_length * setting.length
        self.problem = PROBLEMS[setting.problem]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.model = ReluRNN(2, 1, hidden=setting.hidden, start="identity-recurrent")
        ps.nn.fast_(self.model)
        network = ps.trace(self.model, torch.zeros(1, setting.length, 2))
        chosen = METHODS[cell.method]
        if chosen.balanced:
            ps.rescaling.balance_(network)
        self.clips_itself = chosen.power > 0
        self.optimizer = chosen.optimizer(
            self.model,
            network,
            clip_norm=protocol.clip_norm or None,
            order=torch.randperm(setting.hidden, generator=_generator(PERMUTATIONS + seed)),
            damping=protocol.damping,
            refresh_every=protocol.refresh_every,
        )
        self.batches = _generator(BATCHES + seed)

    def advance(self) -> float | None:
        """Take a step; return the loss before it, or None if the loss, the gradient or the step is not finite."""
        protocol = self.protocol
        length = self.cell.setting.length
        x, y = self.problem.draw(self.batches, protocol.batch_size, length)
        self.optimizer.zero_grad()
        loss = self._errors(x, y).mean()
        loss.backward()
        rate = self.cell.rate * factor("cosine", protocol.warmup, self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not self.clips_itself:
            most = protocol.clip_norm or math.inf
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
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


def train(cell: Cell, protocol: Protocol, report: ProgressCallback = unheard) -> Outcome:
    """Train until the run has learned the problem, diverged, or taken all its steps.

    Args:
        cell: Which run.
        protocol: How runs are done.
        report: Told after each step how far the run is.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        with warnings.catch_warnings():
            # at the highest rates it is, and the table says so
            warnings.filterwarnings("ignore", message="training is running away")
            return _train(Trainer(cell, protocol), report)
    finally:
        torch.set_num_threads(threads)


def _train(trainer: Trainer, report: ProgressCallback) -> Outcome:
    cell, steps, target = trainer.cell, trainer.steps, trainer.problem.target
    test = _generator(TEST_SEED)
    x, y = trainer.problem.draw(test, trainer.protocol.test_size, cell.setting.length)
    recent: deque[float] = deque(maxlen=CHECK_EVERY)
    while trainer.step < steps:
        loss = trainer.advance()
        if loss is None:
            return Outcome(cell.rate, cell.seed, None, None)
        recent.append(loss)
        report(trainer.step / steps, f"step {trainer.step}/{steps}, loss {loss:.4g}")
        checks = trainer.step % CHECK_EVERY == 0 or trainer.step == steps
        if checks and sum(recent) / len(recent) < target:
            error = trainer.error(x, y)
            if error < target:
                return Outcome(cell.rate, cell.seed, trainer.step, error)
    error = trainer.error(x, y)
    return Outcome(cell.rate, cell.seed, None, error if math.isfinite(error) else None)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
