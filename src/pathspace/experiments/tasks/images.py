"""Images to be classified as they are: MNIST, CIFAR-10, CIFAR-100, for convolutional networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count
from pathspace.experiments.tasks import image_files, mnist
from pathspace.experiments.tasks.task import Split, Task, classification

PRESET: dict[str, Any] = {
    # Minutes on two cores: small images, few maps, a thirtieth of the images.
    "model": "recurrent-cnn",
    "model_options": {"maps": 16},
    "task_options": {"train_size": 2_000, "validation_size": 1_000, "test_size": 5_000, "pool": 2},
    "epochs": 2,
    "batch_size": 64,
    "momentum": 0.9,
    "clip_norm": 1.0,
    "learning_rates": [0.003, 0.01, 0.03, 0.1],
}

TITLES = {"mnist": "MNIST", **{name: known.title for name, known in image_files.CIFAR.items()}}
SPLIT_SEED = 0


def build(
    *,
    data: Literal["mnist", "cifar10", "cifar100"] = "mnist",
    pool: Count = 1,
    train_size: Count = 10_000,
    validation_size: Count = 2_000,
    test_size: Count = 10_000,
    data_dir: Path | None = None,
) -> Task:
    """Return a data set of images as a task.

    Args:
        data: `"mnist"`, `"cifar10"` or `"cifar100"`.
        pool: Each square of so many pixels a side is averaged into one: 2 halves height and width.
        train_size: How many of the training images are trained on.
        validation_size: How many other training images are the validation split: the same ones for
            every `train_size`.
        test_size: How many test images, the first ones of a fixed mixed order.
        data_dir: The folder with the data sets.

    Raises:
        ConfigurationError: `pool` does not divide the images, the sizes exceed the data, or
            there is no data.
    """
    images, labels = _load(data, "train", data_dir)
    side = images.shape[-1]
    if side % pool:
        raise ConfigurationError(
            f"The option 'pool' of the task 'images' is {pool!r}: give a divisor of {side}, the width of an image."
        )
    if train_size + validation_size > len(images):
        raise ConfigurationError(
            f"The options 'train_size' ({train_size}) and 'validation_size' ({validation_size}) of the task "
            f"'images' must be together at most {len(images)}, the number of training images of "
            f"{TITLES[data]} at hand."
        )
    test_images, test_labels = _load(data, "test", data_dir)
    if test_size > len(test_images):
        raise ConfigurationError(
            f"The option 'test_size' of the task 'images' is {test_size}: give at most {len(test_images)}, the "
            f"number of test images of {TITLES[data]}."
        )
    order, test = _mixed(len(images)), _mixed(len(test_images))[:test_size]
    held_out, fitted = order[:validation_size], order[len(order) - train_size :]
    centre = data != "mnist"
    task = classification(
        "images",
        f"{TITLES[data]}, images of {side // pool} by {side // pool} "
        f"({train_size} training, {validation_size} validation, {test_size} test images)",
        Split(as_numbers(images[fitted], pool, centre=centre), labels[fitted]),
        Split(as_numbers(images[held_out], pool, centre=centre), labels[held_out]),
        Split(as_numbers(test_images[test], pool, centre=centre), test_labels[test]),
        classes=image_files.CIFAR[data].classes if data in image_files.CIFAR else 10,
    )
    return replace(task, input_size=images.shape[1])


def as_numbers(images: Tensor, pool: int = 1, *, centre: bool = False) -> Tensor:
    """Turn uint8 images (N, C, H, W) into float32 ones (N, C, H / pool, W / pool) in [0, 1], or [-2, 2] if centred."""
    result = images.to(torch.float32).div_(255.0)
    if pool > 1:
        result = functional.avg_pool2d(result, pool)
    return result.sub_(0.5).div_(0.25) if centre else result


def _load(data: str, part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    if data != "mnist":
        return image_files.load(data, part, data_dir)
    images, labels = mnist.load(part, data_dir)
    return images.unsqueeze(1), labels


def _mixed(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
