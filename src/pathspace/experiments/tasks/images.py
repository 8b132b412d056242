"""MNIST read as sequences, and images to be classified as they are: MNIST, CIFAR-10, CIFAR-100.

The four idx files of MNIST are looked for in `DIR/mnist` and in `DIR`, where DIR is `--data-dir` or
else the environment variable `PATHSPACE_DATA`. Without either the images are downloaded through
Hugging Face datasets. CIFAR is read from NumPy archives or files of the original binary form;
nothing is unpickled.

Sources: Y. LeCun, C. Cortes and C. Burges, the MNIST database of handwritten digits. A. Krizhevsky,
    Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import math
import struct
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
from pathspace.experiments.tasks.corpora import (
    UNREADABLE,
    check_zip,
    data_folder,
    first_line,
    gunzip,
    hugging_face,
)
from pathspace.experiments.tasks.task import (
    Split,
    Task,
    classification,
    described,
    mixed,
    split_in_two,
)
from pathspace.extras import install

PRESETS: dict[str, dict[str, Any]] = {
    "mnist": {
        # A few minutes on two cores: a third of the images, twice.
        "epochs": 2,
        "batch_size": 32,
        "task_options": {"train_size": 20_000, "validation_size": 2_000},
        # 28 steps of a ReLU network need clipping, and a short run needs momentum.
        "momentum": 0.9,
        "clip_norm": 1.0,
        "learning_rates": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1],
        "model_options": {"hidden": 100},
    },
    "images": {
        # Minutes on two cores: small images, few maps, a thirtieth of the images.
        "model": "recurrent-cnn",
        "model_options": {"maps": 16},
        "task_options": {
            "train_size": 2_000,
            "validation_size": 1_000,
            "test_size": 5_000,
            "pool": 2,
        },
        "epochs": 2,
        "batch_size": 64,
        "momentum": 0.9,
        "clip_norm": 1.0,
        "learning_rates": [0.003, 0.01, 0.03, 0.1],
    },
}

MNIST_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
PIXELS = 28 * 28
MEAN, DEVIATION = 0.1307, 0.3081  # of all pixels of the training set, between 0 and 1
PERMUTATION_SEED = 92  # one order of pixels for everybody; the number has no meaning


def mnist(
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
    images, labels = load_mnist("train", data_dir)
    fitted, held_out = split_in_two("mnist", len(images), train_size, validation_size)
    test_images, test_labels = load_mnist("test", data_dir)

    def split(some: Tensor, classes: Tensor) -> Split:
        inputs = as_sequences(some, steps, permuted, pool)
        return Split(inputs.sub_(MEAN).div_(DEVIATION) if standardize else inputs, classes)

    splits = [
        split(images[fitted], labels[fitted]),
        split(images[held_out], labels[held_out]),
        split(test_images, test_labels),
    ]
    words = f"MNIST, {steps} steps of {PIXELS // steps // pool}"
    words += f", averages of {pool} pixels" if pool > 1 else ""
    words += ", permuted" * permuted + ", standardized" * standardize
    return classification("mnist", described(words, splits, "images"), splits, 10)


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


def load_mnist(part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Read or download MNIST's part `"train"` or `"test"`: images, uint8 (N, 28, 28), and labels, int64 (N,)."""
    folder = data_folder(data_dir)
    if folder is None:
        return _download(part)
    for candidate in (folder / "mnist", folder):
        images, labels = (candidate / name for name in MNIST_FILES[part])
        if images.exists() and labels.exists():
            return _checked_mnist(read_idx(images), read_idx(labels).to(torch.int64), candidate)
    raise _no_data(
        f"the folder {str(folder)!r} holds no {MNIST_FILES[part][0]} and {MNIST_FILES[part][1]}"
    )


def _checked_mnist(images: Tensor, labels: Tensor, folder: Path) -> tuple[Tensor, Tensor]:
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
    """Read one `.gz` file in idx format as a uint8 tensor of the shape that its header names."""
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
    kind = content[2]
    dimensions = content[3]
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


IMAGE = (3, 32, 32)
BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class DataSet:
    """The files of a data set, and the folders to look for them in.

    Attributes:
        title: What errors call it.
        folder: A folder within the data folder, for NumPy archives with `images` (N, 3, 32, 32) and
            `labels` (N,); their names begin with its name and the part.
        binary: A folder within the data folder, for the original files.
        records: The original files, by part.
        labels: Bytes in front of each image; the last one is its class.
        classes: How many there are.
    """

    title: str
    folder: str
    binary: str
    records: dict[str, tuple[str, ...]]
    labels: int
    classes: int


CIFAR = {
    "cifar10": DataSet(
        "CIFAR-10",
        "cifar10",
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
        labels=1,
        classes=10,
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        "cifar100",
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        labels=2,
        classes=100,
    ),
}

TITLES = {"mnist": "MNIST", **{name: known.title for name, known in CIFAR.items()}}


def images(
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
    parts = [
        (images[fitted], labels[fitted]),
        (images[held_out], labels[held_out]),
        (test_images[test], test_labels[test]),
    ]
    centre = data != "mnist"
    splits = [Split(as_numbers(some, pool, centre=centre), classes) for some, classes in parts]
    words = f"{TITLES[data]}, images of {side // pool} by {side // pool}"
    classes = CIFAR[data].classes if data in CIFAR else 10
    task = classification("images", described(words, splits, "images"), splits, classes)
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
    images, labels = load_mnist(part, data_dir)
    return images.unsqueeze(1), labels


def _load_cifar(name: str, part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Read the part `"train"` or `"test"` of CIFAR: images, uint8 (N, 3, 32, 32), and classes, int64 (N,)."""
    known = CIFAR[name]
    folder = data_folder(data_dir)
    archive = f"{known.folder}_{part}*.npz"
    if folder is not None:
        archives = sorted((folder / known.folder).glob(archive))
        if archives:
            return _archive(archives[0], known)
        records = [folder / known.binary / file for file in known.records[part]]
        if all(path.exists() for path in records):
            images, labels = zip(*(_records(path, known) for path in records), strict=True)
            return torch.cat(images), torch.cat(labels)
    looked = "no data folder was given" if folder is None else f"{str(folder)!r} holds none of it"
    raise ConfigurationError(
        f"{known.title} was not found: {looked}. Put {archive} (arrays 'images' and 'labels') into a "
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
    read = np.lib.format.read_array_header_2_0
    if np.lib.format.read_magic(file) == (1, 0):
        read = np.lib.format.read_array_header_1_0
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
