"""CIFAR-10 and CIFAR-100 from files: NumPy archives or the original binary form. Nothing is unpickled.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks.corpora import data_folder
from pathspace.experiments.tasks.packed import UNREADABLE, check_zip

IMAGE = (3, 32, 32)
BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class DataSet:
    """Where the files of a data set are looked for.

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


def load(name: str, part: str, data_dir: Path | None) -> tuple[Tensor, Tensor]:
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
    known, folder = CIFAR[name], data_folder(data_dir)
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
            f"Cannot read {str(path)!r} ({_first_line(error)}): download it again."
        ) from error
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE or labels.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{str(path)!r} holds images of shape {images.shape} and type {images.dtype} and labels of type "
            f"{labels.dtype}, not {known.title}."
        )
    return _checked(
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
    return _checked(images, rows[:, known.labels - 1].long(), path, known)


def _checked(images: Tensor, labels: Tensor, path: Path, known: DataSet) -> tuple[Tensor, Tensor]:
    if labels.shape != (len(images),) or bool(((labels < 0) | (labels >= known.classes)).any()):
        raise ConfigurationError(
            f"{str(path)!r} holds {len(images)} images and labels of shape {tuple(labels.shape)}, or a class beyond "
            f"{known.classes - 1}: it is not {known.title}."
        )
    return images, labels


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
