"""Images as tasks: files in both forms, splits, and errors that say what is missing."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.conftest import asked
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.images import as_numbers

SIZES = {"train_size": 8, "validation_size": 4, "test_size": 5}


@pytest.fixture
def archives(tmp_path):
    """CIFAR-10 as two archives; the first byte of every image says which one it is."""
    (tmp_path / "cifar10").mkdir()
    for name, count in (("train_few", 12), ("test", 6)):
        images = np.zeros((count, 3, 32, 32), dtype=np.uint8)
        images[:, 0, 0, 0] = np.arange(count)
        np.savez(
            tmp_path / "cifar10" / f"cifar10_{name}.npz",
            images=images,
            labels=np.arange(count) % 10,
        )
    return tmp_path


@pytest.fixture
def records(tmp_path):
    """CIFAR-100 in its binary form: superclass, class, image."""
    (tmp_path / "cifar-100-binary").mkdir()
    for name, count in (("train", 12), ("test", 6)):
        rows = np.zeros((count, 2 + 3072), dtype=np.uint8)
        rows[:, 0], rows[:, 1], rows[:, 2] = 7, 90 + np.arange(count) % 10, np.arange(count)
        rows.tofile(tmp_path / "cifar-100-binary" / f"{name}.bin")
    return tmp_path


@pytest.mark.parametrize("pool", [1, 2])
def test_archives(archives, pool):
    task = build_task("images", {"data": "cifar10", "pool": pool, **SIZES}, data_dir=archives)
    assert task.train.inputs.shape == (8, 3, 32 // pool, 32 // pool)
    assert [len(s) for s in (task.train, task.validation, task.test)] == [8, 4, 5]
    assert (task.input_size, task.output_size) == (3, 10)
    corner = torch.cat([task.train.inputs, task.validation.inputs])[:, 0, 0, 0]
    number = ((corner * 0.25 + 0.5) * 255 * pool**2).round().long()
    assert number.unique().tolist() == list(range(12))  # no image is in both splits
    assert torch.equal(number % 10, torch.cat([task.train.targets, task.validation.targets]))


def test_binary_files(records):
    task = build_task("images", {"data": "cifar100", **SIZES}, data_dir=records)
    assert task.output_size == 100
    number = ((task.train.inputs[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
    assert torch.equal(90 + number % 10, task.train.targets)


def test_validation_does_not_depend_on_the_training_size(archives):
    def held_out(size):
        options = {"data": "cifar10", **SIZES, "train_size": size}
        return build_task("images", options, data_dir=archives).validation.inputs

    assert torch.equal(held_out(8), held_out(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "cifar11"}, "cifar100"),
        ({"pool": 3}, "divisor of 32"),
        ({"train_size": 9}, "together at most 12"),
        ({"test_size": 7}, "give at most 6, the number of test images"),
    ],
)
def test_impossible_options(archives, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_task("images", {"data": "cifar10", **SIZES, **options}, data_dir=archives)


def test_data_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigurationError, match=r"CIFAR-100 was not found.*cifar-100-binary.*PATHSPACE_DATA"
    ):
        build_task("images", {"data": "cifar100"}, data_dir=tmp_path)
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    with pytest.raises(ConfigurationError, match="no data folder was given"):
        build_task("images", {"data": "cifar10"})


def test_broken_files(archives, records):
    path = archives / "cifar10" / "cifar10_train_few.npz"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigurationError, match="Cannot read"):
        build_task("images", {"data": "cifar10", **SIZES}, data_dir=archives)
    # an archive with objects would have to be unpickled
    np.savez(path, images=np.array([object()]), labels=np.zeros(1))
    with pytest.raises(ConfigurationError, match="Cannot read"):
        build_task("images", {"data": "cifar10", **SIZES}, data_dir=archives)
    (records / "cifar-100-binary" / "train.bin").write_bytes(b"123")
    with pytest.raises(ConfigurationError, match="3 bytes"):
        build_task("images", {"data": "cifar100", **SIZES}, data_dir=records)


def test_classes_are_checked(archives):
    path = archives / "cifar10" / "cifar10_test.npz"
    np.savez(path, images=np.zeros((6, 3, 32, 32), dtype=np.uint8), labels=np.full(6, 10))
    with pytest.raises(ConfigurationError, match="class beyond 9"):
        build_task("images", {"data": "cifar10", **SIZES}, data_dir=archives)


def test_numbers_of_images():
    images = torch.tensor([[[[0, 255], [255, 0]]]], dtype=torch.uint8)
    assert as_numbers(images).flatten().tolist() == [0, 1, 1, 0]
    assert as_numbers(images, 2).item() == 0.5
    assert as_numbers(images, centre=True).flatten().tolist() == [-2, 2, 2, -2]


def test_a_model_of_sequences_cannot_read_images():
    with pytest.raises(ConfigurationError, match="cannot read the images"):
        asked({"task": "images", "model": "relu-rnn", "model_options": {"hidden": 3}})
    with pytest.raises(ConfigurationError, match="cannot read the sequences"):
        asked({"task": "adding", "model": "recurrent-cnn", "model_options": {"maps": 3}})


def test_the_real_images():
    folder = os.environ.get("PATHSPACE_DATA")
    if not folder or not (Path(folder) / "cifar10").exists():
        pytest.skip("PATHSPACE_DATA does not name a folder with CIFAR-10")
    task = build_task(
        "images", {"data": "cifar10", "train_size": 100, "validation_size": 100, "test_size": 1000}
    )
    assert set(task.test.targets.tolist()) == set(range(10))
    mnist = build_task(
        "images", {"train_size": 100, "validation_size": 100, "test_size": 100, "pool": 2}
    )
    assert mnist.train.inputs.shape == (100, 1, 14, 14)
