"""Tasks without files: the addition problem, and the 1797 handwritten digits of scikit-learn.

In the addition problem each of the T steps brings a number from U(0, 1) and a mark that is 1 at two
steps, one in each half, and 0 elsewhere. The target is the sum of the two marked numbers; always
answering 1 has a mean squared error of 1/6.

Sources: S. Hochreiter and J. Schmidhuber (1997), in the form of Q. Le, N. Jaitly and G. Hinton
    (2015). E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), the
    copy in scikit-learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from pathspace.experiments.layers import Count
from pathspace.experiments.tasks.task import Split, Task, classification, mixed, regression

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
    train, validation, test = (sequences(size, length, seed) for seed, size in enumerate(sizes))
    return regression(
        "adding",
        f"addition problem, T = {length} ({train_size} training, {validation_size} validation, "
        f"{test_size} test sequences)",
        train,
        validation,
        test,
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
    order = mixed(len(inputs))
    train, validation, test = (
        Split(inputs[part], targets[part])
        for part in order.tensor_split((TRAIN, TRAIN + VALIDATION))
    )
    return classification(
        "digits",
        f"scikit-learn digits, {steps} steps of {width} ({len(train)} training, "
        f"{len(validation)} validation, {len(test)} test images)",
        train,
        validation,
        test,
        classes=10,
    )
