"""MNIST read as sequences: rows, groups of pixels, single pixels or averages of pixels; in order or permuted.

The four idx files are looked for in `DIR/mnist` and in `DIR`, where DIR is `--data-dir` or else the
environment variable `PATHSPACE_DATA`. Without either the images are downloaded through Hugging Face
datasets.

Source: Y. LeCun, C. Cortes and C. Burges, the MNIST database of handwritten digits.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count
from pathspace.experiments.tasks.corpora import data_folder, hugging_face
from pathspace.experiments.tasks.packed import UNREADABLE, gunzip
from pathspace.experiments.tasks.task import Split, Task, classification, split_in_two
from pathspace.extras import install

PRESET: dict[str, Any] = {
    # A few minutes on two cores: a third of the images, twice.
    "epochs": 2,
    "batch_size": 32,
    "task_options": {"train_size": 20_000, "validation_size": 2_000},
    # 28 steps of a ReLU network need clipping, and a short run needs momentum.
    "momentum": 0.9,
    "clip_norm": 1.0,
    "learning_rates": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1],
    "model_options": {"hidden": 100},
}

FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
PIXELS = 28 * 28
MEAN, DEVIATION = 0.1307, 0.3081  # of all pixels of the training set, between 0 and 1
PERMUTATION_SEED = 92  # one order of pixels for everybody; the number has no meaning


def build(
    *,
    steps: Count = 28,
    permuted: bool = False,
    pool: Count = 1,
    standardize: bool = False,
    train_size: Count = 50_000,
    validation_size: Count = 10_000,
    data_dir: Path | None = None,
) -> Task:
    """Return MNIST as a task.

    Args:
        steps: T, a divisor of 784: 28 reads rows, 98 reads eight pixels a step, 784 reads single
            pixels.
        permuted: Whether the pixels are brought into one fixed random order first.
        pool: How many consecutive pixels are averaged into one number: 98 steps and a pool of 8
            give one number a step, a short relative of the 784 single pixels.
        standardize: Whether pixels get the mean 0 and the deviation 1 over the training set of
            60,000.
        train_size: How many of the 60,000 training images are trained on.
        validation_size: How many other training images are the validation split: the same ones for
            every `train_size`.
        data_dir: The folder that holds the files or a folder `mnist` with them.

    Raises:
        ConfigurationError: `steps` times `pool` does not divide 784, the sizes exceed the training
            set, or there is no data.
    """
    if PIXELS % steps:
        raise ConfigurationError(
            f"The option 'steps' of the task 'mnist' is {steps!r}: give a divisor of {PIXELS}, such as 28."
        )
    if PIXELS // steps % pool:
        raise ConfigurationError(
            f"The option 'pool' of the task 'mnist' is {pool!r}: give a divisor of {PIXELS // steps}, the number of "
            "pixels in a step."
        )
    images, labels = load("train", data_dir)
    fitted, held_out = split_in_two("mnist", len(images), train_size, validation_size)
    test_images, test_labels = load("test", data_dir)

    def sequences(some: Tensor) -> Tensor:
        inputs = as_sequences(some, steps, permuted, pool)
        return inputs.sub_(MEAN).div_(DEVIATION) if standardize else inputs

    return classification(
        "mnist",
        f"MNIST, {steps} steps of {PIXELS // steps // pool}{f', averages of {pool} pixels' * (pool > 1)}"
        f"{', permuted' * permuted}{', standardized' * standardize} "
        f"({train_size} training, {validation_size} validation, {len(test_images)} test images)",
        Split(sequences(images[fitted]), labels[fitted]),
        Split(sequences(images[held_out]), labels[held_out]),
        Split(sequences(test_images), test_labels),
        classes=10,
    )


def as_sequences(images: Tensor, steps: int, permuted: bool, pool: int = 1) -> Tensor:
    """Turn uint8 images (N, 28, 28) into float32 sequences (N, steps, 784 / steps / pool), values in [0, 1]."""
    pixels = images.reshape(len(images), PIXELS)
    if permuted:
        generator = torch.Generator().manual_seed(PERMUTATION_SEED)
        pixels = pixels[:, torch.randperm(PIXELS, generator=generator)]
    if pool > 1:
        averages = pixels.reshape(len(images), -1, pool).to(torch.float32).mean(dim=-1)
        return averages.reshape(len(images), steps, -1).div_(255.0)
    return pixels.reshape(len(images), steps, PIXELS // steps).to(torch.float32).div_(255.0)


def load(part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Read or download one part of MNIST.

    Args:
        part: `"train"` or `"test"`.
        data_dir: Where to look; None stands for the folder in `PATHSPACE_DATA`, if that is set.

    Returns:
        The images, uint8 of shape (N, 28, 28), and the labels, int64 of shape (N,).

    Raises:
        ConfigurationError: No data, with both ways of getting it; or a broken file.
    """
    folder = data_folder(data_dir)
    if folder is None:
        return _download(part)
    for candidate in (folder / "mnist", folder):
        images, labels = (candidate / name for name in FILES[part])
        if images.exists() and labels.exists():
            return _checked(read_idx(images), read_idx(labels).to(torch.int64), candidate)
    raise _no_data(f"the folder {str(folder)!r} holds no {FILES[part][0]} and {FILES[part][1]}")


def _checked(images: Tensor, labels: Tensor, folder: Path) -> tuple[Tensor, Tensor]:
    if images.shape[1:] != (28, 28) or labels.shape != (len(images),) or bool((labels > 9).any()):
        raise ConfigurationError(
            f"The files in {str(folder)!r} hold images of shape {tuple(images.shape)} and labels of shape "
            f"{tuple(labels.shape)}, or a class beyond 9, not MNIST: download them again."
        )
    return images, labels


def _download(part: str) -> tuple[Tensor, Tensor]:
    rows = hugging_face(_no_data, "ylecun/mnist", split=part).with_format("torch")[:]
    return rows["image"].reshape(-1, 28, 28).to(torch.uint8), rows["label"].to(torch.int64)


def _no_data(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"MNIST was not found: {reason}. Either put the four original .gz files into a folder 'mnist' and "
        "give its parent by --data-dir or PATHSPACE_DATA, or install what the download needs: "
        f"{install('download')}."
    )


UNSIGNED_BYTE = 0x08  # the only type of number that MNIST uses
MOST_DIMENSIONS = 3


def read_idx(path: Path) -> Tensor:
    """Read one `.gz` file in idx format.

    Args:
        path: The file; its header names the number of dimensions and their sizes.

    Returns:
        A uint8 tensor of the shape that the header names.

    Raises:
        ConfigurationError: The file is missing or broken: it says which file and why.
    """
    try:
        content = gunzip(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigurationError(
            f"Cannot read {str(path)!r} ({error}): download the file again."
        ) from error
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> Tensor:
    def broken(reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"{str(path)!r} is no idx file ({reason}): download the file again."
        )

    # Header: two zero bytes, the type, the number of dimensions, then one unsigned 32-bit size per
    # dimension.
    if len(content) < 4 or content[:2] != b"\0\0":
        raise broken("it does not begin with two zero bytes")
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTE:
        raise broken(
            f"numbers of type 0x{kind:02x} instead of 0x{UNSIGNED_BYTE:02x}, unsigned bytes"
        )
    if dimensions > MOST_DIMENSIONS:
        raise broken(f"{dimensions} dimensions")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise broken("its header is cut off")
    sizes = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        raise broken(
            f"{len(content) - start} bytes of data where its header promises {math.prod(sizes)}"
        )
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(sizes)
