"""Trains a network until it has learned its problem, or its steps are over.

Every step draws a fresh batch, so the loss before a step is an error on sequences that were never
seen; where its mean over the last 20 steps is below the target, the test sequences decide.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.experiments.long_memory.methods import METHODS, RECURRENT, RULES, ChangedKappa
from pathspace.experiments.long_memory.protocol import PROBLEMS, Cell, Protocol
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.monitor import ProgressCallback, unheard
from pathspace.experiments.run import factor
from pathspace.experiments.storage import finite

CHECK_EVERY = 20
TEST_SEED = 999_983
# added to a run's seed, so that starts, data and orders are independent
BATCHES, PERMUTATIONS = 1_000_000, 2_000_000


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        cell: Which run.
        steps: Steps until it had learned the problem; None if it never had.
        error: Of the test sequences, in the end; None if it diverged.
        seconds: Processor time that it took.
    """

    cell: Cell
    steps: int | None
    error: float | None
    seconds: float

    @property
    def words(self) -> str:
        """The result as one line of text."""
        cell = self.cell
        where = f"{cell.setting.problem}, T = {cell.setting.length}, H = {cell.setting.hidden}"
        how = "did not learn it" if self.steps is None else f"learned it in {self.steps} steps"
        return f"{cell.method} at {cell.rate:g}, seed {cell.seed} ({where}): {how}, {self.seconds:.0f} s"


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
        self.optimizer = _optimizer(cell, protocol, self.model, network)
        self.batches = _generator(BATCHES + seed)

    def advance(self) -> float | None:
        """Take a step; return the loss before it, or None if the loss, the gradient or the step is not finite."""
        protocol = self.protocol
        length = self.cell.setting.length
        x, y = self.problem.draw(self.batches, protocol.batch_size, length)
        self.optimizer.zero_grad()
        loss = self._error(x, y)
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
        return self._error(x, y).item()

    def _error(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x)[:, 0] - y).square().mean()


def _optimizer(
    cell: Cell, protocol: Protocol, model: nn.Module, network: ps.Network
) -> torch.optim.Optimizer:
    """Return the optimizer of a run; one with a metric clips in the coordinates of the metric."""
    method = METHODS[cell.method]
    on_paths, plain, own = RULES[method.rule]
    params: list[Any] = [*model.parameters()]
    if method.rule == "muon-hidden":
        recurrent = model.get_parameter(RECURRENT)
        others = [p for p in params if p is not recurrent]
        params = [{"params": [recurrent]}, {"params": others, "use_muon": False}]
    if not method.power:
        return plain(params, **own)
    options = {"damping": protocol.damping, "refresh_every": protocol.refresh_every}
    metric: ps.metrics.Metric = ps.metrics.Path(method.power, **options)
    if method.is_control:
        units = _generator(PERMUTATIONS + cell.seed)
        order = torch.randperm(cell.setting.hidden, generator=units)
        metric = ChangedKappa(method, order, **options)
    return on_paths(params, network, clip_norm=protocol.clip_norm or None, metric=metric, **own)


def compute(cell: Cell, protocol: Protocol, report: ProgressCallback = unheard) -> Result:
    """Train until the run has learned the problem, diverged, or taken all its steps.

    The numbers are the same each time, on one machine and version.

    Args:
        cell: Which run.
        protocol: How runs are done.
        report: Told after each step how far the run is.
    """
    began = time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        with warnings.catch_warnings():
            # at the highest rates it is, and the table says so
            warnings.filterwarnings("ignore", message="training is running away")
            steps, error = _train(Trainer(cell, protocol), report)
    finally:
        torch.set_num_threads(threads)
    return Result(cell, steps, error, round(time.process_time() - began, 2))


def _train(trainer: Trainer, report: ProgressCallback) -> tuple[int | None, float | None]:
    """Return the steps until the problem was learned, and the error in the end; see `Result`."""
    steps, target = trainer.steps, trainer.problem.target
    test = _generator(TEST_SEED)
    x, y = trainer.problem.draw(test, trainer.protocol.test_size, trainer.cell.setting.length)
    recent: deque[float] = deque(maxlen=CHECK_EVERY)
    while trainer.step < steps:
        loss = trainer.advance()
        if loss is None:
            return None, None
        recent.append(loss)
        report(trainer.step / steps, f"step {trainer.step}/{steps}, loss {loss:.4g}")
        checks = trainer.step % CHECK_EVERY == 0 or trainer.step == steps
        if checks and sum(recent) / len(recent) < target:
            error = trainer.error(x, y)
            if error < target:
                return trainer.step, error
    return None, finite(trainer.error(x, y))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
