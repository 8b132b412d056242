"""One training run: a configuration in, curves and errors out; the same bits each time, interrupted or not.

Batches depend on the seed and the number of the epoch alone, so a resumed run sees what an
uninterrupted one would have seen. Everything else that a step depends on is in the checkpoint:
weights, optimizer state, torch's random state.

A text of N segments is cut into B streams of S = N // B segments, which are read beside one
another:

    step        1      2    ...    S
    stream 1    0      1    ...   S-1
    stream 2    S     S+1   ...  2S-1

A rest of N - B S segments is left out. Gradients end where a segment begins (truncated
backpropagation).

Batches, initial weights and starts are made on the processor for every device, so that a run begins
with the same numbers everywhere. From the first step on rounding differs, and so do the random
numbers of dropout and the random signs of data-dependent metrics, which are drawn where the model
is.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import pathspace
from pathspace.experiments import checkpoint
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import Method, balance_once_, method, move_to_start
from pathspace.experiments.models import OUTSIDE, RESCALABLE, build_model
from pathspace.experiments.run import (
    CHECKPOINT,
    Epoch,
    RunConfig,
    RunResult,
    RunState,
    Validation,
    factor,
)
from pathspace.experiments.tasks import OWN
from pathspace.experiments.terminal import UNHEARD, Monitor
from pathspace.network import Network, UntraceableError

if TYPE_CHECKING:
    from pathspace.experiments.tasks.task import Split, Task


# Validation and test cut their texts into so few streams that starting them from zero hardly shows.
STREAMS_AT_A_TIME = 10


def contiguous_order(segments: int, streams: int) -> Tensor:
    """Return the numbers of N segments, one step of all B streams after the other: int64 of shape (S B,)."""
    each = segments // streams
    return torch.arange(streams * each).reshape(streams, each).t().reshape(-1)


_CPU = torch.device("cpu")
SECONDS_BETWEEN_REPORTS = 0.1
# without gradients nothing is kept on the way: where a whole batch trains, so many have room,
# whatever the model's size
BATCHES_EVALUATED_AT_A_TIME = 4


def run(
    config: RunConfig,
    task: Task,
    *,
    folder: Path | None = None,
    checkpoint_every: int = 200,
    resume: bool = False,
    listener: Monitor = UNHEARD,
    finished: Callable[[nn.Module], None] | None = None,
    device: str = "cpu",
) -> RunResult:
    """Train one model once.

    A run that meets a loss that is not finite ends there and is recorded as diverged. The random
    state and the thread count of the caller are left as they were.

    Args:
        config: What to train and how; decides the result to the last bit (on one machine and
            PyTorch version).
        task: The data that `config.task` names.
        folder: Where the checkpoint lies; None keeps none.
        checkpoint_every: Steps between checkpoints.
        resume: Continue from the checkpoint in `folder` where there is one.
        listener: Told the number of steps done and the latest loss, about ten times a second, every
            validation of this call, and if a damaged checkpoint is passed over, or one of another
            device continued.
        finished: Given the model as the last step left it, to look at.
        device: Where it computes, as `torch.device` takes it. On the processor the result is the
            same to the last bit, resumed or not.
    """
    chosen = method(config.method)
    place = torch.device(device)
    stored = folder is not None and resume and (folder / CHECKPOINT).exists()
    with _isolated(config, place):
        state = initial_state(config, task, chosen, fresh=not stored, device=place)
        if stored and folder is not None:
            checkpoint.load(folder, config, state, partial(listener.noted, config.label))
        clip_norm = None if chosen.clips_itself else config.clip_norm
        training = _Training(config, task, state, clip_norm, folder, checkpoint_every, listener)
        training.run()
        test_error = state.epochs[-1].test if state.diverged_at is None else None
        # a perplexity overflows long before the loss does
        if test_error is not None and not math.isfinite(test_error):
            state.diverged_at, test_error = state.step, None
        if finished is not None:
            finished(state.model)
    return RunResult(
        config=config,
        losses=tuple(state.losses),
        validations=tuple(state.validations),
        test_error=test_error,
        diverged_at=state.diverged_at,
        seconds=state.seconds,
        step_seconds=statistics.median(state.durations) if state.durations else None,
        device=", then ".join(state.devices),
        kernel=kernel_of(state.model),
        epochs=tuple(state.epochs),
    )


def kernel_of(model: torch.nn.Module) -> str | None:
    """Return what the recurrent layers of a model ran, each kind once; None if it has none that could choose."""
    from pathspace.nn import RNN

    kernels = dict.fromkeys(layer.kernel for layer in model.modules() if isinstance(layer, RNN))
    return "; ".join(kernels) or None


def steps_per_epoch(batch_size: int, task: Task) -> int:
    """Return how many whole batches the training split gives."""
    if batch_size > len(task.train):
        raise ConfigurationError(
            f"The batch size {batch_size} exceeds the {len(task.train)} training sequences of the task "
            f"{task.name!r}: give a smaller one."
        )
    return len(task.train) // batch_size


def total_steps(config: RunConfig, task: Task) -> int:
    """Return how many steps a run takes unless it diverges."""
    return config.epochs * steps_per_epoch(config.batch_size, task)


def initial_state(
    config: RunConfig,
    task: Task,
    chosen: Method,
    *,
    fresh: bool = True,
    device: torch.device = _CPU,
) -> RunState:
    """Return the model and the optimizer of a run before its first step; `fresh`: not to be loaded over."""
    model = build_model(config.model, task.input_size, task.output_size, config.model_options)
    if not config.plain_rnn:
        pathspace.nn.fast_(model)
    network = _traced(config, task, chosen, model)
    if fresh and network is not None:  # a checkpoint brings its own weights
        sizes = {"exponent": config.rescale_exponent, "factor": config.rescale_factor}
        move_to_start(network, config.start, seed=config.seed, **sizes)
        if chosen.balances_first:
            balance_once_(network)
    if device.type != "cpu":
        # Weights and start are the processor's, so that every device begins with the same ones.
        model.to(device)
        network = _traced(config, task, chosen, model, device)
    try:
        if chosen.normalizes and network is not None:
            model, network = pathspace.nn.ddp_normalize(model, network, **chosen.normalizes), None
        optimizer = chosen.build(model, network, config)
    except ValueError as error:
        if config.model != OWN or isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"The method {config.method!r} cannot train the model of the file: {error}. Leave it out of --methods."
        ) from error
    return RunState(model=model, optimizer=optimizer, devices=[str(device)])


def _traced(
    config: RunConfig, task: Task, chosen: Method, model: nn.Module, device: torch.device = _CPU
) -> Network | None:
    """Return the network of a model; None of one whose units cannot be rescaled."""
    if config.model in RESCALABLE:
        examples = task.train.inputs[:2].to(device)
        try:
            with warnings.catch_warnings():
                # the report says it once, where it matters
                warnings.filterwarnings("ignore", "the network has no unit class", UserWarning)
                return pathspace.trace(model, examples, outside=OUTSIDE.get(config.model, ()))
        except UntraceableError as error:
            if config.model != OWN:
                raise
            raise ConfigurationError(f"The model of the file: {error}") from error
    if config.start != "default" or config.model in chosen.refuses:
        raise ConfigurationError(
            f"The units of the model {config.model!r} cannot be rescaled: give the start 'default' and a method that "
            f"needs no path norm, not {config.start!r} and {config.method!r}."
        )
    return None


@dataclass
class _Training:
    """A run while it lasts; see `run`."""

    config: RunConfig
    task: Task
    state: RunState
    clip_norm: float | None
    folder: Path | None
    checkpoint_every: int
    listener: Monitor

    def run(self) -> None:
        """Train from where the state is to the end of the run."""
        config, state = self.config, self.state
        if not state.validations:
            self._validate()
        epoch_steps = steps_per_epoch(config.batch_size, self.task)
        steps = total_steps(config, self.task)
        last_report = 0.0
        while state.diverged_at is None and state.step < steps and not self._has_learned():
            part = factor(config.schedule, config.warmup, state.step, steps)
            loss = self._timed_step(self._next_batch(epoch_steps), config.learning_rate * part)
            if loss is None:
                state.diverged_at = state.step
                break
            self._look(epoch_steps)
            if time.perf_counter() - last_report > SECONDS_BETWEEN_REPORTS:
                last_report = time.perf_counter()
                words = f"step {state.step}/{steps}, loss {loss:.4g}"
                self.listener.advanced(config.label, state.step / steps, words)

    def _next_batch(self, epoch_steps: int) -> Tensor:
        """Return the numbers of the examples of the next step."""
        state, size = self.state, self.config.batch_size
        epoch, place = divmod(state.step, epoch_steps)
        if state.order is None or place == 0:
            state.order = self._order(epoch)
        if place == 0:
            state.carried = None
        return state.order[place * size : (place + 1) * size]

    def _look(self, epoch_steps: int) -> None:
        """Validate, write down an epoch, and keep a checkpoint after the steps that are due for it."""
        config, state = self.config, self.state
        ends_epoch = state.step % epoch_steps == 0
        if ends_epoch or (config.validate_every and state.step % config.validate_every == 0):
            self._validate()
        if ends_epoch:
            self._end_epoch(epoch_steps)
        every = self.checkpoint_every
        if self.folder is not None and every and state.step % every == 0:
            checkpoint.save(self.folder, config, state)

    def _order(self, epoch: int) -> Tensor:
        """Return the examples of an epoch in the order in which it takes them."""
        if self.task.stream:
            return contiguous_order(len(self.task.train), self.config.batch_size)
        return epoch_order(len(self.task.train), self.config.seed, epoch)

    def _has_learned(self) -> bool:
        """Say whether the run has just ended an epoch with a validation error below the one that ends it."""
        state = self.state
        if not state.epochs or state.epochs[-1].step != state.step:
            return False
        return state.validations[-1].error < self.config.stop_error

    def _timed_step(self, batch: Tensor, rate: float) -> float | None:
        """Take one step, and write down its loss and its time; return the loss, or None if it was not finite."""
        state = self.state
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        began = time.perf_counter()
        loss = self._step(batch)
        device = torch.device(state.devices[-1])
        if device.type == "cuda":  # which works on while the processor goes on
            torch.cuda.synchronize(device)
        duration = time.perf_counter() - began
        state.seconds += duration
        if loss is not None:
            state.losses.append(loss)
            state.durations.append(duration)
            state.step += 1
        return loss

    def _step(self, batch: Tensor) -> float | None:
        """Take one step and return the loss before it; None when the loss or the step is not finite."""
        state, task = self.state, self.task
        state.optimizer.zero_grad()
        inputs, targets = self._batch(task.train, batch)
        outputs, state.carried = self._outputs(inputs, state.carried)
        loss = task.loss(outputs, targets)
        value = loss.item()
        if not math.isfinite(value):
            return None
        state.errors += _batch_error(task, outputs, targets, value)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(state.model.parameters(), self.clip_norm)
        try:
            state.optimizer.step()
        except FloatingPointError:  # how our optimizers refuse to spoil the weights
            return None
        return value

    def _outputs(
        self, inputs: Tensor, carried: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Call the model; of a stream with the state that the segment before left, and return the next one."""
        if self.task.stream:
            return self.state.model(inputs, carried)
        return self.state.model(inputs), None

    def _batch(self, split: Split, chosen: Tensor) -> tuple[Tensor, Tensor]:
        device = self.state.devices[-1]
        return split.inputs[chosen].to(device), split.targets[chosen].to(device)

    def _validate(self) -> None:
        state = self.state
        loss, error = self._evaluate(self.task.validation)
        if not torch.isfinite(torch.tensor(loss)):
            # The last step of an epoch can spoil the weights before any training batch shows it.
            state.diverged_at = state.step
        state.validations.append(Validation(state.step, loss, error))
        self.listener.validated(self.config, state.validations[-1])

    def _end_epoch(self, steps: int) -> None:
        """Write down the errors of an epoch of so many steps."""
        state, task = self.state, self.task
        training = task.reported(state.errors / steps)
        test = None
        if self.config.evaluate_test and state.diverged_at is None:
            test = self._evaluate(task.test)[1]
        state.epochs.append(Epoch(state.step, training, test))
        state.errors = 0.0

    @torch.no_grad()
    def _evaluate(self, split: Split) -> tuple[float, float]:
        """Return the mean loss and the error over a split."""
        task = self.task
        count = len(split.inputs)
        size = BATCHES_EVALUATED_AT_A_TIME * self.config.batch_size
        order = torch.arange(count)
        if task.stream:
            size = min(STREAMS_AT_A_TIME, count)
            order = contiguous_order(count, size)
        losses, errors = 0.0, 0.0
        carried = None
        self.state.model.eval()
        for batch in order.split(size):
            inputs, targets = self._batch(split, batch)
            outputs, carried = self._outputs(inputs, carried)
            losses += task.loss(outputs, targets).item() * len(inputs)
            errors += task.errors(outputs, targets).sum().item()
        self.state.model.train()
        return losses / len(order), task.reported(errors / len(order))


@torch.no_grad()
def _batch_error(task: Task, outputs: Tensor, targets: Tensor, loss: float) -> float:
    if task.error_of_loss is not None:
        return task.error_of_loss(loss)
    return task.errors(outputs, targets).mean().item()


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch goes through `count` sequences; seed and epoch decide it."""
    # Seeds of runs are small numbers; the factor keeps the epochs of different seeds apart.
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


@contextmanager
def _forked_random_state(device: torch.device) -> Iterator[None]:
    """Leave the random states of processor and device as they were."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    index = device.index
    if index is None:
        index = torch.get_device_module(device).current_device()
    with torch.random.fork_rng(devices=[index], device_type=device.type):
        yield


@contextmanager
def _isolated(config: RunConfig, device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with _forked_random_state(device):
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)
