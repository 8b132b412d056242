"""What a task is: sequences with targets in three fixed splits, a loss and a measure of error.

Letters: N sequences, T steps, D numbers per step, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Split:
    """Sequences and their targets.

    Attributes:
        inputs: Shape (N, T, D), float32.
        targets: Shape (N,) with class numbers, or (N, K) with real values.
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
        test: Looked at once, after the last step of a run that is reported.
        input_size: D.
        output_size: K.
        kind: `"classification"` (error in percent) or `"regression"` (mean squared error).
        loss: (outputs (B, K), targets (B, ...)) -> the mean loss of the batch, a 0-dim tensor.
        errors: (outputs (B, K), targets (B, ...)) -> the error of each sequence, shape (B,); its mean is the
            metric.
        metric: What the mean of `errors` is called, with its unit.
    """

    name: str
    description: str
    train: Split
    validation: Split
    test: Split
    input_size: int
    output_size: int
    kind: Literal["classification", "regression"]
    loss: Callable[[Tensor, Tensor], Tensor]
    errors: Callable[[Tensor, Tensor], Tensor]
    metric: str


def classification(
    name: str, description: str, train: Split, validation: Split, test: Split, *, classes: int
) -> Task:
    """Return a task with cross-entropy as loss and the percentage of wrong answers as error."""
    return Task(
        name=name,
        description=description,
        train=train,
        validation=validation,
        test=test,
        input_size=train.inputs.shape[-1],
        output_size=classes,
        kind="classification",
        loss=functional.cross_entropy,
        errors=_percent_wrong,
        metric="error, %",
    )


def regression(name: str, description: str, train: Split, validation: Split, test: Split) -> Task:
    """Return a task with the mean squared error as loss and as error; targets have the shape (N, K)."""
    return Task(
        name=name,
        description=description,
        train=train,
        validation=validation,
        test=test,
        input_size=train.inputs.shape[-1],
        output_size=train.targets.shape[-1],
        kind="regression",
        loss=functional.mse_loss,
        errors=_squared_errors,
        metric="mean squared error",
    )


def _percent_wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100.0 * (outputs.argmax(dim=-1) != targets).to(torch.float64)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).to(torch.float64).square().mean(dim=-1)
