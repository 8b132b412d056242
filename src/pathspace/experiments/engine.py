"""One training run: a configuration in, curves and errors out; the same bits each time, interrupted or not.

Batches depend on the seed and the number of the epoch alone, so a resumed run sees what an uninterrupted one
would have seen. Everything else that a step depends on is in the checkpoint: weights, optimizer state,
torch's random state.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pathspace.experiments import checkpoint
from pathspace.experiments.devices import forked_random_state, wait_for
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import Method, method
from pathspace.experiments.models import OUTSIDE, RESCALABLE, build_model
from pathspace.experiments.monitor import Monitor
from pathspace.experiments.run import Epoch, RunConfig, RunResult, RunState, Validation
from pathspace.experiments.schedule import factor
from pathspace.experiments.starts import balance_once_, move_to_start
from pathspace.experiments.streams import STREAMS_AT_A_TIME, contiguous_order

if TYPE_CHECKING:
    from pathspace.experiments.tasks.task import Split, Task

_CPU = torch.device("cpu")
SECONDS_BETWEEN_REPORTS = 0.1
# without gradients nothing is kept on the way: where a whole batch trains, so many have room, whatever the model's size
BATCHES_EVALUATED_AT_A_TIME = 4
UNHEARD = Monitor()


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

    A run that meets a loss that is not finite ends there and is recorded as diverged. The random state and
    the thread count of the caller are left as they were.

    Args:
        config: What to train and how; decides the result to the last bit (on one machine and PyTorch
            version).
        task: The data that `config.task` names.
        folder: Where the checkpoint lies; None keeps none.
        checkpoint_every: Steps between checkpoints.
        resume: Continue from the checkpoint in `folder` where there is one.
        listener: Told the number of steps done and the latest loss, about ten times a second, every validation of this
            call, and if a damaged checkpoint is passed over, or one of another device continued.
        finished: Given the model as the last step left it, to look at.
        device: Where it computes, as `torch.device` takes it. On the processor the result is the same to the last bit,
            resumed or not.

    Raises:
        ConfigurationError: The configuration is impossible, or the checkpoint belongs to another one.
    """
    chosen = method(config.method)
    stored = folder is not None and resume and checkpoint.exists(folder)
    with _isolated(config, torch.device(device)):
        state = initial_state(config, task, chosen, fresh=not stored, device=torch.device(device))
        if stored and folder is not None:
            checkpoint.load(folder, config, state, lambda sentence: listener.noted(config.label, sentence))

        def save() -> None:
            if folder is not None:
                checkpoint.save(folder, config, state)

        def validate() -> None:
            state.validations.append(_validate(state, task, config.batch_size))
            listener.validated(config, state.validations[-1])

        def end_epoch(steps: int) -> None:
            """Write down the errors of an epoch of so many steps."""
            training = task.reported(state.errors / steps)
            test = None
            if config.evaluate_test and state.diverged_at is None:
                test = _evaluate(state, task, task.test, config.batch_size)[1]
            state.epochs.append(Epoch(state.step, training, test))
            state.errors = 0.0

        if not state.validations:
            validate()
        _train(
            config,
            task,
            state,
            steps_per_epoch(config.batch_size, task),
            clip_norm=None if chosen.clips_itself else config.clip_norm,
            save=save,
            checkpoint_every=checkpoint_every,
            listener=listener,
            validate=validate,
            end_epoch=end_epoch,
        )
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
    """Return how many whole batches the training split gives.

    Raises:
        ConfigurationError: Not a single one.
    """
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
    config: RunConfig, task: Task, chosen: Method, *, fresh: bool = True, device: torch.device = _CPU
) -> RunState:
    """Return the model and the optimizer of a run before its first step; `fresh`: not to be loaded over."""
    import pathspace

    model = build_model(config.model, task.input_size, task.output_size, config.model_options)
    if not config.plain_rnn:
        pathspace.nn.fast_(model)
    network, outside = None, OUTSIDE.get(config.model, ())
    if config.model in RESCALABLE:
        network = pathspace.trace(model, task.train.inputs[:2], outside=outside)
    if network is None and (config.start != "default" or config.model in chosen.refuses):
        raise ConfigurationError(
            f"The units of the model {config.model!r} cannot be rescaled: give the start 'default' and a method that "
            f"needs no path norm, not {config.start!r} and {config.method!r}."
        )
    if fresh and network is not None:  # a checkpoint brings its own weights
        move_to_start(
            network,
            config.start,
            seed=config.seed,
            exponent=config.rescale_exponent,
            factor=config.rescale_factor,
        )
        if chosen.balances_first:
            balance_once_(network)
    if device.type != "cpu":
        # Weights and start are the processor's, so that every device begins with the same ones.
        model.to(device)
        if network is not None:
            network = pathspace.trace(model, task.train.inputs[:2].to(device), outside=outside)
    if chosen.normalizes and network is not None:
        model, network = pathspace.nn.ddp_normalize(model, network, **chosen.normalizes), None
    return RunState(model=model, optimizer=chosen.build(model, network, config), devices=[str(device)])


def _train(
    config: RunConfig,
    task: Task,
    state: RunState,
    epoch_steps: int,
    *,
    clip_norm: float | None,
    save: Callable[[], None],
    checkpoint_every: int,
    listener: Monitor,
    validate: Callable[[], None],
    end_epoch: Callable[[int], None],
) -> None:
    last_report = 0.0
    steps = config.epochs * epoch_steps
    while state.diverged_at is None and state.step < steps and not _is_learned(config, state):
        epoch, place = divmod(state.step, epoch_steps)
        if state.order is None or place == 0:
            state.order = _order(config, task, epoch)
        if place == 0:
            state.carried = None
        batch = state.order[place * config.batch_size : (place + 1) * config.batch_size]
        rate = config.learning_rate * factor(config.schedule, config.warmup, state.step, steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate

        began = time.perf_counter()
        loss = _step(state, task, batch, clip_norm)
        wait_for(torch.device(state.devices[-1]))
        duration = time.perf_counter() - began
        state.seconds += duration

        if loss is None:
            state.diverged_at = state.step
            break
        state.losses.append(loss)
        state.durations.append(duration)
        state.step += 1
        if place == epoch_steps - 1 or (config.validate_every and state.step % config.validate_every == 0):
            validate()
        if place == epoch_steps - 1:
            end_epoch(epoch_steps)
        if checkpoint_every and state.step % checkpoint_every == 0:
            save()
        if time.perf_counter() - last_report > SECONDS_BETWEEN_REPORTS:
            last_report = time.perf_counter()
            listener.advanced(config, state.step, loss)


def _order(config: RunConfig, task: Task, epoch: int) -> Tensor:
    """Return the examples of an epoch in the order in which it takes them."""
    if task.stream:
        return contiguous_order(len(task.train), config.batch_size)
    return epoch_order(len(task.train), config.seed, epoch)


def _is_learned(config: RunConfig, state: RunState) -> bool:
    """Say whether the run has just ended an epoch with a validation error below the one that ends it."""
    if not state.epochs or state.epochs[-1].step != state.step:
        return False
    return state.validations[-1].error < config.stop_error


def _step(state: RunState, task: Task, batch: Tensor, clip_norm: float | None) -> float | None:
    """Take one step and return the loss before it; None when the loss or the step is not finite."""
    state.optimizer.zero_grad()
    inputs, targets = _batch(task.train, batch, state)
    if task.stream:
        outputs, state.carried = state.model(inputs, state.carried)
    else:
        outputs = state.model(inputs)
    loss = task.loss(outputs, targets)
    value = loss.item()
    if not math.isfinite(value):
        return None
    state.errors += _batch_error(task, outputs, targets, value)
    loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), clip_norm)
    try:
        state.optimizer.step()
    except FloatingPointError:  # how our optimizers refuse to spoil the weights
        return None
    return value


@torch.no_grad()
def _batch_error(task: Task, outputs: Tensor, targets: Tensor, loss: float) -> float:
    if task.error_of_loss is not None:
        return task.error_of_loss(loss)
    return task.errors(outputs, targets).mean().item()


def _batch(split: Split, chosen: Tensor, state: RunState) -> tuple[Tensor, Tensor]:
    device = state.devices[-1]
    return split.inputs[chosen].to(device), split.targets[chosen].to(device)


def _validate(state: RunState, task: Task, batch_size: int) -> Validation:
    loss, error = _evaluate(state, task, task.validation, batch_size)
    if not torch.isfinite(torch.tensor(loss)):
        # The last step of an epoch can spoil the weights before any training batch shows it.
        state.diverged_at = state.step
    return Validation(step=state.step, loss=loss, error=error)


@torch.no_grad()
def _evaluate(state: RunState, task: Task, split: Split, batch_size: int) -> tuple[float, float]:
    """Return the mean loss and the error over a split."""
    size, count = BATCHES_EVALUATED_AT_A_TIME * batch_size, len(split.inputs)
    order = torch.arange(count)
    if task.stream:
        size = min(STREAMS_AT_A_TIME, count)
        order = contiguous_order(count, size)
    sums = _sums(state, task, split, order.split(size))
    loss, error = (sum(each) for each in zip(*sums, strict=True))
    return loss / len(order), task.reported(error / len(order))


def _sums(state: RunState, task: Task, split: Split, batches: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return the sums of the losses and of the errors of some batches."""
    model, carried, sums = state.model.eval(), None, []
    for batch in batches:
        inputs, targets = _batch(split, batch, state)
        if task.stream:
            outputs, carried = model(inputs, carried)
        else:
            outputs = model(inputs)
        loss = task.loss(outputs, targets).item() * len(inputs)
        sums.append((loss, task.errors(outputs, targets).sum().item()))
    model.train()
    return sums


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch goes through `count` sequences; seed and epoch decide it."""
    # Seeds of runs are small numbers; the factor keeps the epochs of different seeds apart.
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


@contextmanager
def _isolated(config: RunConfig, device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with forked_random_state(device):
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)
