"""A task: sequences with targets in three fixed splits, a loss and a measure of error; and two without files.

In the addition problem each of the T steps brings a number from U(0, 1) and a mark that is 1 at two
steps, one in each half, and 0 elsewhere. The target is the sum of the two marked numbers; always
answering 1 has a mean squared error of 1/6. The other task has the 1797 digits of scikit-learn.

Letters: N sequences, T steps, D numbers per step, K outputs.

Sources: S. Hochreiter and J. Schmidhuber (1997), in the form of Q. Le, N. Jaitly and G. Hinton
    (2015). E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), the
    copy in scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count

# How an image of 8 x 8 pixels is read: (steps T, numbers per step D).
READINGS = {"rows": (8, 8), "pixels": (64, 1)}
PRESETS: dict[str, dict[str, Any]] = {
    "adding": {
        # A few minutes on two cores. From PyTorch's initialisation, which forgets fast, 50 steps
        # would take far longer.
        "task_options": {"length": 20, "train_size": 10_000},
        "epochs": 10,
        "batch_size": 64,
        "model_options": {"hidden": 64},
        # Long sequences need clipping, and a short run needs momentum.
        "momentum": 0.9,
        "clip_norm": 1.0,
        "learning_rates": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1],
    },
    "digits": {
        "epochs": 20,
        "batch_size": 32,
        # Without clipping one tuning seed can choose a rate at which another diverges.
        "clip_norm": 1.0,
        "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
        # 300 images do not choose between neighbouring rates, nor do three seeds: the least is safe.
        "tuning": "one standard error",
        "tuning_seeds": 3,
        "tuning_epochs": 10,
        "seeds": 5,
        "model_options": {"hidden": 48},
    },
}

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
    """Return the numbers of training and validation images; the latter are the same for every `train_size`."""
    if train_size + validation_size > count:
        raise ConfigurationError(
            f"The options 'train_size' ({train_size}) and 'validation_size' ({validation_size}) of the task "
            f"{task!r} must be together at most {count}, the number of training images at hand."
        )
    order = mixed(count)
    return order[count - train_size :], order[:validation_size]


def split_in_three(inputs: Tensor, targets: Tensor, ends: tuple[int, int]) -> list[Split]:
    """Return training, validation and test split of mixed examples, the first of which end at two places."""
    parts = mixed(len(inputs)).tensor_split(ends)
    return [Split(inputs[part], targets[part]) for part in parts]


def described(words: str, parts: Iterable[Sized], things: str) -> str:
    """Return the line of a task for the report, with the sizes of its three parts."""
    train, validation, test = map(len, parts)
    return f"{words} ({train} training, {validation} validation, {test} test {things})"


def classification(name: str, description: str, splits: Iterable[Split], classes: int) -> Task:
    """Return a task with cross-entropy as loss and the percentage of wrong answers as error."""
    train, validation, test = splits
    size = train.inputs.shape[-1]
    measure = functional.cross_entropy, _percent_wrong, "error, %"
    return Task(name, description, train, validation, test, size, classes, *measure)


def prediction(
    name: str,
    description: str,
    splits: Iterable[Split],
    symbols: int,
    metric: Literal["bits per character", "perplexity"],
    *,
    stream: bool = False,
) -> Task:
    """Return a task that predicts the next symbol at every step, with the mean cross-entropy as loss."""
    train, validation, test = splits
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


def adding(
    *,
    length: Annotated[int, Field(ge=2)] = 100,
    train_size: Count = 100_000,
    validation_size: Count = 2_000,
    test_size: Count = 10_000,
    data_dir: Path | None = None,  # noqa: ARG001 (every task takes it)
) -> Task:
    """Return the addition problem for sequences of T = `length`, at least 2; the same numbers on every call."""
    sizes = (train_size, validation_size, test_size)
    # One seed per split, so that a longer training set leaves the test set as it is.
    splits = [sequences(size, length, seed) for seed, size in enumerate(sizes)]
    return Task(
        "adding",
        described(f"addition problem, T = {length}", splits, "sequences"),
        *splits,
        input_size=2,
        output_size=1,
        loss=functional.mse_loss,
        errors=_squared_errors,
        metric="mean squared error",
        error_of_loss=float,
    )


def sequences(count: int, length: int, seed: int) -> Split:
    """Generate `count` sequences: inputs of shape (count, length, 2), targets of shape (count, 1)."""
    inputs, marked = marked_sequences(count, length, torch.Generator().manual_seed(seed))
    return Split(inputs, marked.sum(1, keepdim=True))


def marked_sequences(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Generate `count` sequences: inputs of shape (count, length, 2), the two marked numbers of shape (count, 2)."""
    half = length // 2
    numbers = torch.rand(count, length, generator=generator)
    first = torch.randint(0, half, (count, 1), generator=generator)
    second = torch.randint(half, length, (count, 1), generator=generator)
    marks = torch.zeros(count, length).scatter_(1, first, 1.0).scatter_(1, second, 1.0)
    marked = torch.cat((numbers.gather(1, first), numbers.gather(1, second)), 1)
    return torch.stack((numbers, marks), dim=-1), marked


TRAIN, VALIDATION = 1197, 300  # the other 300 are the test set


def digits(*, read: Literal["rows", "pixels"] = "rows", data_dir: Path | None = None) -> Task:  # noqa: ARG001 (every task takes it)
    """Return the digits as a task: `"rows"` are 8 steps of 8 numbers, `"pixels"` 64 steps of one number."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    steps, width = READINGS[read]
    # Grey values run from 0 to 16.
    inputs = torch.as_tensor(pixels, dtype=torch.float32).div(16.0).reshape(-1, steps, width)
    targets = torch.as_tensor(classes, dtype=torch.int64)
    splits = split_in_three(inputs, targets, (TRAIN, TRAIN + VALIDATION))
    title = f"scikit-learn digits, {steps} steps of {width}"
    return classification("digits", described(title, splits, "images"), splits, 10)
