"""The 1797 handwritten digits of scikit-learn, read as sequences; nothing to download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (1998), the copy
    in scikit-learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from pathspace.experiments.tasks.task import Split, Task, classification, mixed

# recurrent networks need clipping: without it one tuning seed can choose a rate at which another
# diverges 300 images alone do not choose between neighbouring rates, nor do three seeds always: of
# equals the least is safe
PRESET: dict[str, Any] = {
    "epochs": 20,
    "batch_size": 32,
    "clip_norm": 1.0,
    "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
    "tuning": "one standard error",
    "tuning_seeds": 3,
    "tuning_epochs": 10,
    "seeds": 5,
    "model_options": {"hidden": 48},
}

# How an image of 8 x 8 pixels is read: (steps T, numbers per step D).
READINGS = {"rows": (8, 8), "pixels": (64, 1)}
TRAIN, VALIDATION = 1197, 300  # the other 300 are the test set


def build(*, read: Literal["rows", "pixels"] = "rows", data_dir: Path | None = None) -> Task:  # noqa: ARG001 (every task takes it)
    """Return the digits as a task.

    Args:
        read: `"rows"`, 8 steps of 8 numbers, or `"pixels"`, 64 steps of one number.
        data_dir: Not used: the data comes with scikit-learn.
    """
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
