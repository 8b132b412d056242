"""A task: sequences with targets in three fixed splits, a loss and a measure of error.

Letters: N sequences, T steps, D numbers per step, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError

SPLIT_SEED = 0
NOT_COUNTED = -100  # what cross_entropy ignores


@dataclass(frozen=True)
class Split:
    """Sequences and their targets.

    Attributes:
        inputs: Shape (N, T, D), float32; or (N, T), int64, the numbers of symbols.
        targets: Shape (N,) with class numbers, (N, K) with real values, or (N, T) with the number
            of the symbol that follows each step, `NOT_COUNTED` where it does not count.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Task:
    """A learning task on sequences.

    Attributes:
        name: The name in the registry.
        description: One line for the report: data, steps, sizes.
        train: What the weights are fitted to.
        validation: What learning rates are chosen by.
        test: Looked at after every epoch of a run that is reported; it decides nothing.
        input_size: D, or how many symbols there are.
        output_size: K.
        loss: (outputs (B, K), targets (B, ...)) -> the mean loss of the batch, a 0-dim tensor.
        errors: (outputs (B, K), targets (B, ...)) -> the error of each sequence, shape (B,); its
            mean is the metric.
        metric: What the mean of `errors` is called, with its unit.
        reported: What becomes of that mean in reports; perplexity is the exponential of a mean.
        error_of_loss: The mean of `errors` over a batch by its mean loss; None where errors have to
            be counted.
        stream: Whether the sequences of a split follow one another, so that a model's state is
            carried from one to the next; see `streams`.
    """

    name: str
    description: str
    train: Split
    validation: Split
    test: Split
    input_size: int
    output_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    errors: Callable[[Tensor, Tensor], Tensor]
    metric: str
    reported: Callable[[float], float] = float
    error_of_loss: Callable[[float], float] | None = None
    stream: bool = False


def mixed(count: int) -> Tensor:
    """Return the numbers of so many examples in an order that is the same everywhere."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))


def split_in_two(
    task: str, count: int, train_size: int, validation_size: int
) -> tuple[Tensor, Tensor]:
    """Return the numbers of training and validation images; the latter are the same for every `train_size`.

    Raises:
        ConfigurationError: They are more than `count` together.
    """
    if train_size + validation_size > count:
        raise ConfigurationError(
            f"The options 'train_size' ({train_size}) and 'validation_size' ({validation_size}) of the task "
            f"{task!r} must be together at most {count}, the number of training images at hand."
        )
    order = mixed(count)
    return order[count - train_size :], order[:validation_size]


def classification(
    name: str, description: str, train: Split, validation: Split, test: Split, *, classes: int
) -> Task:
    """Return a task with cross-entropy as loss and the percentage of wrong answers as error."""
    size = train.inputs.shape[-1]
    measure = functional.cross_entropy, _percent_wrong, "error, %"
    return Task(name, description, train, validation, test, size, classes, *measure)


def regression(name: str, description: str, train: Split, validation: Split, test: Split) -> Task:
    """Return a task with the mean squared error as loss and as error; targets have the shape (N, K)."""
    sizes = train.inputs.shape[-1], train.targets.shape[-1]
    measure = functional.mse_loss, _squared_errors, "mean squared error"
    return Task(name, description, train, validation, test, *sizes, *measure, error_of_loss=float)


def prediction(
    name: str,
    description: str,
    train: Split,
    validation: Split,
    test: Split,
    *,
    symbols: int,
    metric: Literal["bits per character", "perplexity"],
    stream: bool = False,
) -> Task:
    """Return a task that predicts the next symbol at every step, with the mean cross-entropy as loss."""
    in_bits = metric == "bits per character"
    return Task(
        name,
        description,
        train,
        validation,
        test,
        input_size=symbols,
        output_size=symbols,
        loss=_prediction_loss,
        errors=_bits if in_bits else _nats,
        metric=metric,
        reported=float if in_bits else _exponential,
        error_of_loss=_in_bits if in_bits else float,
        stream=stream,
    )


def windows(symbols: Tensor, length: int, context: int = 0) -> Split:
    """Cut a text into windows that predict, each symbol but the first few exactly once.

    Args:
        symbols: The numbers of the text's symbols, int64 of shape (L,), L > length + context.
        length: T, predictions per window; a rest of the text that is shorter is left out.
        context: Steps before those, which are read and do not count: windows overlap by as many.
    """
    count = (len(symbols) - 1 - context) // length
    start = torch.arange(count).unsqueeze(1) * length
    places = start + torch.arange(length + context)
    targets = symbols[places + 1]
    targets[:, :context] = NOT_COUNTED
    return Split(symbols[places], targets)


def _prediction_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() != 3:
        raise ConfigurationError(
            "The task predicts at every step, but the model reads only the last one: set "
            "model_options.output to 'every'."
        )
    return functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=NOT_COUNTED
    )


def _nats(outputs: Tensor, targets: Tensor) -> Tensor:
    # -ln p of each counted symbol, averaged over the sequence
    each = functional.cross_entropy(
        outputs.transpose(1, 2), targets, ignore_index=NOT_COUNTED, reduction="none"
    )
    return each.to(torch.float64).sum(dim=1) / (targets != NOT_COUNTED).sum(dim=1)


def _bits(outputs: Tensor, targets: Tensor) -> Tensor:
    return _nats(outputs, targets) / math.log(2)


def _in_bits(nats: float) -> float:
    return nats / math.log(2)


def _exponential(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf


def _percent_wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100.0 * (outputs.argmax(dim=-1) != targets).to(torch.float64)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).to(torch.float64).square().mean(dim=-1)
