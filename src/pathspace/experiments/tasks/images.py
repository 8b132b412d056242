"""Images to be classified as they are: MNIST, CIFAR-10, CIFAR-100, for convolutional networks.

CIFAR is read from NumPy archives or files of the original binary form; nothing is unpickled.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count
from pathspace.experiments.tasks import mnist
from pathspace.experiments.tasks.corpora import data_folder
from pathspace.experiments.tasks.packed import UNREADABLE, check_zip, first_line
from pathspace.experiments.tasks.task import Split, Task, classification, mixed, split_in_two

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

IMAGE = (3, 32, 32)
BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, and the folders to look for them in.

    Attributes:
        title: What errors call it.
        folder: A folder within the data folder, for the NumPy archives.
        archives: Patterns of archives with `images` (N, 3, 32, 32) and `labels` (N,), by part; the
            first one found.
        binary: A folder within the data folder, for the original files.
        records: The original files, by part.
        labels: Bytes in front of each image; the last one is its class.
        classes: How many there are.
    """

    title: str
    folder: str
    archives: dict[str, str]
    binary: str
    records: dict[str, tuple[str, ...]]
    labels: int
    classes: int


CIFAR = {
    "cifar10": DataSet(
        "CIFAR-10",
        "cifar10",
        {"train": "cifar10_train*.npz", "test": "cifar10_test*.npz"},
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
        labels=1,
        classes=10,
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        "cifar100",
        {"train": "cifar100_train*.npz", "test": "cifar100_test*.npz"},
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        labels=2,
        classes=100,
    ),
}

TITLES = {"mnist": "MNIST", **{name: known.title for name, known in CIFAR.items()}}


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
    fitted, held_out = split_in_two("images", len(images), train_size, validation_size)
    test_images, test_labels = _load(data, "test", data_dir)
    if test_size > len(test_images):
        raise ConfigurationError(
            f"The option 'test_size' of the task 'images' is {test_size}: give at most {len(test_images)}, the "
            f"number of test images of {TITLES[data]}."
        )
    test = mixed(len(test_images))[:test_size]
    centre = data != "mnist"
    task = classification(
        "images",
        f"{TITLES[data]}, images of {side // pool} by {side // pool} "
        f"({train_size} training, {validation_size} validation, {test_size} test images)",
        Split(as_numbers(images[fitted], pool, centre=centre), labels[fitted]),
        Split(as_numbers(images[held_out], pool, centre=centre), labels[held_out]),
        Split(as_numbers(test_images[test], pool, centre=centre), test_labels[test]),
        classes=CIFAR[data].classes if data in CIFAR else 10,
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
        return _load_cifar(data, part, data_dir)
    images, labels = mnist.load(part, data_dir)
    return images.unsqueeze(1), labels


def _load_cifar(name: str, part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Read one part of a data set.

    Args:
        name: A name in `CIFAR`.
        part: `"train"` or `"test"`.
        data_dir: Where to look; None stands for the folder in `PATHSPACE_DATA`.

    Returns:
        The images, uint8 of shape (N, 3, 32, 32), and the classes, int64 of shape (N,).

    Raises:
        ConfigurationError: There is no such data, or a file is broken.
    """
    known = CIFAR[name]
    folder = data_folder(data_dir)
    if folder is not None:
        archives = sorted((folder / known.folder).glob(known.archives[part]))
        if archives:
            return _archive(archives[0], known)
        records = [folder / known.binary / file for file in known.records[part]]
        if all(path.exists() for path in records):
            parts = [_records(path, known) for path in records]
            return torch.cat([images for images, _ in parts]), torch.cat(
                [labels for _, labels in parts]
            )
    looked = "no data folder was given" if folder is None else f"{str(folder)!r} holds none of it"
    raise ConfigurationError(
        f"{known.title} was not found: {looked}. Put {known.archives[part]} (arrays 'images' and 'labels') into a "
        f"folder {known.folder!r}, or the files of the binary version into a folder {known.binary!r}, and give their "
        "parent by --data-dir or PATHSPACE_DATA."
    )


def _archive(path: Path, known: DataSet) -> tuple[Tensor, Tensor]:
    try:
        check_zip(path)
        with zipfile.ZipFile(path) as archive:
            images, labels = (_array(archive.read(f"{name}.npy")) for name in ("images", "labels"))
    except (*UNREADABLE, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"Cannot read {str(path)!r} ({first_line(error)}): download it again."
        ) from error
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE or labels.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{str(path)!r} holds images of shape {images.shape} and type {images.dtype} and labels of type "
            f"{labels.dtype}, not {known.title}."
        )
    return _checked_images(
        torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), path, known
    )


def _array(content: bytes) -> np.ndarray:
    """Return the array in an .npy file, after its shape was compared to the bytes that there are."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"its header promises {shape} of {dtype}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _records(path: Path, known: DataSet) -> tuple[Tensor, Tensor]:
    length = known.labels + BYTES
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % length:
        raise ConfigurationError(
            f"{str(path)!r} has {len(content)} bytes, no multiple of {length}: download it again."
        )
    rows = torch.from_numpy(content).reshape(-1, length)
    images = rows[:, known.labels :].reshape(-1, *IMAGE)
    return _checked_images(images, rows[:, known.labels - 1].long(), path, known)


def _checked_images(
    images: Tensor, labels: Tensor, path: Path, known: DataSet
) -> tuple[Tensor, Tensor]:
    if labels.shape != (len(images),) or bool(((labels < 0) | (labels >= known.classes)).any()):
        raise ConfigurationError(
            f"{str(path)!r} holds {len(images)} images and labels of shape {tuple(labels.shape)}, or a class beyond "
            f"{known.classes - 1}: it is not {known.title}."
        )
    return images, labels
