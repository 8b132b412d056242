import gzip
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks import TASKS, build_task, preset
from pathspace.experiments.tasks.images import MNIST_FILES


def test_digits_are_split_without_overlap_or_loss() -> None:
    task = build_task("digits")
    assert [len(split) for split in (task.train, task.validation, task.test)] == [1197, 300, 300]
    together = torch.cat(
        [split.inputs for split in (task.train, task.validation, task.test)]
    ).reshape(-1, 64)
    pixels = load_digits().data.astype(np.float32) / 16
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, pixels.tolist()))


def test_digits_read_as_rows_and_as_pixels_hold_the_same_numbers() -> None:
    rows, pixels = build_task("digits"), build_task("digits", {"read": "pixels"})
    assert rows.train.inputs.shape == (1197, 8, 8)
    assert pixels.train.inputs.shape == (1197, 64, 1)
    assert torch.equal(rows.train.inputs.flatten(1), pixels.train.inputs.flatten(1))
    assert torch.equal(rows.train.targets, pixels.train.targets)


def test_adding_targets_are_the_sums_of_the_two_marked_numbers() -> None:
    task = build_task(
        "adding", {"length": 9, "train_size": 500, "validation_size": 5, "test_size": 5}
    )
    numbers, marks = task.train.inputs.unbind(-1)
    assert torch.equal(marks.unique(), torch.tensor([0.0, 1.0]))
    assert torch.equal(marks[:, :4].sum(1), torch.ones(500))
    assert torch.equal(marks[:, 4:].sum(1), torch.ones(500))
    torch.testing.assert_close((numbers * marks).sum(1, keepdim=True), task.train.targets)
    # Always answering 1 costs the variance of a sum of two uniform numbers.
    assert task.errors(torch.ones(500, 1), task.train.targets).mean().item() == pytest.approx(
        1 / 6, rel=0.15
    )


def test_adding_is_the_same_on_every_call_and_its_splits_differ() -> None:
    options = {"length": 5, "train_size": 20, "validation_size": 20, "test_size": 20}
    one, other = build_task("adding", options), build_task("adding", {**options, "train_size": 30})
    assert torch.equal(one.test.inputs, other.test.inputs)
    assert not torch.equal(one.train.inputs, one.test.inputs)


def test_classification_error_is_the_percentage_of_wrong_answers() -> None:
    task = build_task("digits")
    outputs = torch.eye(10)[torch.tensor([1, 2, 3, 4])]
    assert task.errors(outputs, torch.tensor([1, 2, 3, 9])).mean().item() == 25.0


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def tiny_mnist(tmp_path: Path) -> Path:
    """A data folder with 12 training and 3 test images; each image holds its number in the set, then 0, 1, 2, ..."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, count in (("train", 12), ("test", 3)):
        images = np.tile(np.arange(784) % 251, (count, 1))
        images[:, 0] = np.arange(count)
        for name, array in zip(
            MNIST_FILES[part], (images.reshape(count, 28, 28), np.arange(count) % 10), strict=True
        ):
            (folder / name).write_bytes(idx(array))
    return tmp_path


@pytest.mark.parametrize("within", [".", "mnist"])
def test_mnist_is_read_from_idx_files(tiny_mnist: Path, within: str) -> None:
    options = {"steps": 98, "train_size": 8, "validation_size": 4}
    task = build_task("mnist", options, data_dir=tiny_mnist / within)
    assert task.train.inputs.shape == (8, 98, 8)
    assert task.test.inputs.shape == (3, 98, 8)
    assert task.test.inputs[2, 0, :3].mul(255).tolist() == pytest.approx([2, 1, 2])
    numbers = torch.cat([task.train.inputs, task.validation.inputs])[:, 0, 0].mul(255).round()
    assert sorted(numbers.tolist()) == list(range(12))
    assert torch.equal(numbers[:8].long() % 10, task.train.targets)


def test_validation_images_do_not_depend_on_the_training_size(tiny_mnist: Path) -> None:
    few, many = (
        build_task("mnist", {"train_size": size, "validation_size": 3}, data_dir=tiny_mnist)
        for size in (2, 9)
    )
    assert torch.equal(few.validation.inputs, many.validation.inputs)


def test_permuted_mnist_moves_the_pixels_of_all_images_alike(tiny_mnist: Path) -> None:
    options = {"steps": 784, "train_size": 8, "validation_size": 4}
    plain = build_task("mnist", options, data_dir=tiny_mnist)
    moved = build_task("mnist", {**options, "permuted": True}, data_dir=tiny_mnist)
    order = torch.randperm(784, generator=torch.Generator().manual_seed(92))
    assert torch.equal(moved.train.inputs, plain.train.inputs[:, order])
    assert not torch.equal(moved.train.inputs, plain.train.inputs)


def test_pooled_mnist_averages_neighbouring_pixels(tiny_mnist: Path) -> None:
    options = {"train_size": 8, "validation_size": 4}
    single = build_task("mnist", {**options, "steps": 784}, data_dir=tiny_mnist)
    pooled = build_task("mnist", {**options, "steps": 98, "pool": 8}, data_dir=tiny_mnist)
    assert pooled.train.inputs.shape == (8, 98, 1)
    torch.testing.assert_close(
        pooled.train.inputs, single.train.inputs.reshape(8, 98, 8).mean(2, keepdim=True)
    )
    rows = build_task("mnist", {**options, "steps": 28, "pool": 4}, data_dir=tiny_mnist)
    torch.testing.assert_close(rows.train.inputs, single.train.inputs.reshape(8, 28, 7, 4).mean(3))


def test_standardized_mnist_has_the_training_sets_mean_and_deviation_taken_out(
    tiny_mnist: Path,
) -> None:
    options = {"train_size": 8, "validation_size": 4, "steps": 28}
    plain = build_task("mnist", options, data_dir=tiny_mnist)
    ours = build_task("mnist", {**options, "standardize": True}, data_dir=tiny_mnist)
    for split in ("train", "validation", "test"):
        raw, standard = getattr(plain, split), getattr(ours, split)
        torch.testing.assert_close(standard.inputs * 0.3081 + 0.1307, raw.inputs)
        assert torch.equal(standard.targets, raw.targets)
    assert "standardized" in ours.description
    assert "standardized" not in plain.description


def test_mnist_is_found_through_the_environment(
    tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATHSPACE_DATA", str(tiny_mnist))
    assert len(build_task("mnist", {"train_size": 8, "validation_size": 4}).train) == 8


def broken(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # without the time, which would be in the names of tests


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no gzip", "Not a gzipped file"),
        (idx(np.zeros((3, 28, 28)))[:-9], "Compressed file ended"),
        (broken(b"\1\2\3\4"), "two zero bytes"),
        (broken(b"\0\0\x0d\1\0\0\0\1"), "type 0x0d"),
        (broken(b"\0\0\x08\3\0\0"), "header is cut off"),
        (broken(b"\0\0\x08\1\0\0\0\5abc"), "3 bytes of data where its header promises 5"),
    ],
)
def test_a_broken_idx_file_is_named_with_the_reason(
    tiny_mnist: Path, content: bytes, reason: str
) -> None:
    (tiny_mnist / "mnist" / MNIST_FILES["test"][0]).write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        build_task("mnist", {"train_size": 8, "validation_size": 4}, data_dir=tiny_mnist)
    assert MNIST_FILES["test"][0] in str(caught.value)


def test_a_label_beyond_nine_is_no_mnist(tiny_mnist: Path) -> None:
    (tiny_mnist / "mnist" / MNIST_FILES["test"][1]).write_bytes(idx(np.array([0, 10, 2])))
    with pytest.raises(ConfigurationError, match="or a class beyond 9, not MNIST"):
        build_task("mnist", {"train_size": 8, "validation_size": 4}, data_dir=tiny_mnist)


def test_without_data_one_error_names_both_ways(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    for folder in (None, tmp_path):
        with pytest.raises(ConfigurationError) as caught:
            build_task("mnist", data_dir=folder)
        assert "--data-dir" in str(caught.value)
        assert "pip install -e '.[download]' in a clone" in str(caught.value)


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigurationError, match=r"ConnectionError: no route to host\)"):
        build_task("mnist")


def test_downloaded_images_become_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        """What Hugging Face datasets gives for MNIST in torch format: images with a channel in front."""

        def with_format(self, kind: str) -> "Rows":
            assert kind == "torch"
            return self

        def __getitem__(self, _: slice) -> dict[str, torch.Tensor]:
            images = torch.arange(784, dtype=torch.uint8).repeat(6, 1).reshape(6, 1, 28, 28)
            return {"image": images, "label": torch.arange(6)}

    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: Rows())
    )
    task = build_task("mnist", {"train_size": 4, "validation_size": 2})
    assert task.train.inputs.shape == (4, 28, 28)
    assert task.train.inputs[0, 0].mul(255).tolist() == pytest.approx(list(range(28)))


def test_real_mnist(real_data: Path) -> None:
    task = build_task("mnist", {"train_size": 1000, "validation_size": 500}, data_dir=real_data)
    assert task.train.inputs.shape == (1000, 28, 28)
    assert task.test.inputs.shape == (10_000, 28, 28)
    assert task.test.targets[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # The mean grey value of the test set is known.
    assert task.test.inputs.mean().item() == pytest.approx(0.1325, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nothing", {}, "Unknown task 'nothing' in --task: choose from digits, mnist, adding"),
        (
            "digits",
            {"raed": "rows"},
            "Unknown option 'raed' in task_options of the task 'digits': choose from read",
        ),
        ("digits", {"read": "columns"}, "choose from rows, pixels"),
        ("adding", {"length": 1}, "give 2 or more"),
        ("adding", {"test_size": 2.5}, "a whole number"),
        ("mnist", {"steps": 30}, "give a divisor of 784"),
        ("mnist", {"steps": 28, "pool": 3}, "give a divisor of 28"),
        ("mnist", {"steps": True}, "is True: give a whole number"),
        ("mnist", {"pool": True}, "is True: give a whole number"),
        ("mnist", {"standardize": 1}, "give true or false"),
        ("mnist", {"permuted": "no"}, "'permuted' of the task 'mnist' is 'no': give true or false"),
        (
            "mnist",
            {"train_size": 1e4},
            "'train_size' of the task 'mnist' is 10000.0: give a whole number",
        ),
        (
            "images",
            {"test_size": "all"},
            "'test_size' of the task 'images' is 'all': give a whole number",
        ),
        ("mnist", {"data_dir": "x"}, "Unknown option 'data_dir'"),
    ],
)
def test_impossible_options_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build_task(name, options)


def test_too_large_mnist_splits_are_refused(tiny_mnist: Path) -> None:
    with pytest.raises(ConfigurationError, match="together at most 12"):
        build_task("mnist", {"train_size": 9, "validation_size": 4}, data_dir=tiny_mnist)


def test_every_task_has_a_preset() -> None:
    for name in TASKS:
        assert {"epochs", "batch_size"} <= preset(name).keys()
