"""The user's own data, from the `batches()` of a Python file; see `experiments.own`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.experiments import own
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks import OWN
from pathspace.experiments.tasks.task import Split, Task, classification

PRESET: dict[str, Any] = {
    "model": OWN,
    "batch_size": 32,
    "epochs": 10,
    "learning_rates": [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
    "tuning": "one standard error",
    "tuning_seeds": 2,
    "tuning_epochs": 5,
    "seeds": 3,
}

TRAIN, VALIDATION = 0.7, 0.15  # of the examples; the others are the test set
SPLIT_SEED = 0


def build(*, file: str = "", digest: str = "", data_dir: Path | None = None) -> Task:  # noqa: ARG001 (every task takes it)
    """Return the examples of a file as a task.

    Args:
        file: Path of the Python file.
        digest: Of its content, see `own.options_of_file`.
        data_dir: Not used: the file knows where its data are.

    Raises:
        ConfigurationError: No file is given, or it has no such data, model or loss.
    """
    if not file:
        raise ConfigurationError(
            "The task 'own' is a Python file of yours: give it as `pathspace compare FILE.py`."
        )
    inputs, targets = own.examples_of(file, digest)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SPLIT_SEED))
    first, second = int(TRAIN * len(order)), int((TRAIN + VALIDATION) * len(order))
    splits = [Split(inputs[part], targets[part]) for part in order.tensor_split((first, second))]
    train, validation, test = splits
    described = (
        f"{Path(file).name}, examples of {_shape(inputs)} ({len(train)} training, {len(validation)} validation, "
        f"{len(test)} test examples)"
    )
    task = _task(own.loss_of(file, digest), described, train, validation, test, targets)
    own.check(file, digest, task.loss, inputs, targets)
    return task


def _shape(inputs: Tensor) -> str:
    return " x ".join(map(str, inputs.shape[1:])) or "1 number"


def _task(
    loss: Any, described: str, train: Split, validation: Split, test: Split, targets: Tensor
) -> Task:
    if loss is None and not targets.is_floating_point():
        if targets.dim() == 1 and not targets.is_complex():
            return classification(
                OWN, described, train, validation, test, classes=int(targets.max()) + 1
            )
        raise ConfigurationError(
            f"The targets of the file are {targets.dtype} of shape {tuple(targets.shape)}: define loss(outputs, "
            "targets) there, or give a class number (N,) or real numbers."
        )
    return Task(
        OWN,
        described,
        train,
        validation,
        test,
        input_size=0,  # the model of the file knows
        output_size=0,
        loss=loss or _squared_error,
        errors=functools.partial(_mean_of_all, loss) if loss else _squared_errors,
        metric="loss" if loss else "mean squared error",
        error_of_loss=float,
    )


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # which torch would stretch
        classes = outputs.dim() == 2 and targets.dim() == 1 and outputs.shape[1] > 1
        advice = "if the targets are class numbers, yield targets.long(); else " if classes else ""
        raise ConfigurationError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            f"{advice}give both one shape, or define loss(outputs, targets) in the file."
        )
    return functional.mse_loss(outputs, targets)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).double().square().reshape(len(targets), -1).mean(1)


def _mean_of_all(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> Tensor:
    """The mean loss of a batch as the error of each of its examples."""
    return loss(outputs, targets).double().expand(len(targets))
