"""Data files that claim more than they hold or unpack to more than any data set has."""

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest

from faults.readers import MEBIBYTE, memory_below
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks import build_task, corpora
from pathspace.experiments.tasks.corpora import MOST, OversizeError, check_zip, gunzip
from pathspace.experiments.tasks.images import read_idx


def idx(*sizes, content):
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + content


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """A megabyte that unpacks to a gigabyte of zeros, the header of which tells the truth."""
    path = tmp_path_factory.mktemp("bomb") / "train-images-idx3-ubyte.gz"
    part = gzip.compress(bytes(16 * MEBIBYTE), 9)  # gzip files one after the other are one file
    path.write_bytes(gzip.compress(idx(64, 1024, 16384, content=b"")) + part * 64)
    assert path.stat().st_size < 1.1 * MEBIBYTE
    return path


def test_no_gigabyte_comes_from_a_megabyte(bomb, monkeypatch):
    monkeypatch.setattr(gunzip, "__defaults__", (16 * MEBIBYTE,))
    with (
        memory_below(64 * MEBIBYTE),
        pytest.raises(ConfigurationError, match=r"larger than .* bytes unpacked"),
    ):
        read_idx(bomb)


def test_the_limit_holds_every_data_set_and_is_exact():
    assert MOST > 200_000_000
    content = gzip.compress(bytes(1000))
    assert gunzip(content, 1000) == bytes(1000)
    with pytest.raises(OversizeError):
        gunzip(content, 999)


@pytest.mark.parametrize(
    "sizes", [(2**32 - 1,) * 3, (3, 2**31), (0, 2**32 - 1), (1,) * 200, (2, 2, 2, 1)]
)
def test_an_idx_header_is_not_believed(tmp_path, sizes):
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(idx(*sizes, content=bytes(8))))
    with memory_below(MEBIBYTE), pytest.raises(ConfigurationError, match="no idx file"):
        read_idx(path)


def archive(path, **arrays):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in arrays.items():
            file.writestr(f"{name}.npy", content)


def npy(shape, dtype="|u1", content=b""):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + content


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (npy((10**11, 3, 32, 32)), npy((0,)), "promises"),
        (npy((0, 3, 32, 32)), npy((2**62,), "<i8"), "promises"),
        (npy((0, 3, 32, 32)), npy((1,), "|O"), "promises"),
        (npy((1, 3, 32, 32), content=bytes(3072)), npy((1,), "<f8", bytes(8)), "labels of type"),
        (b"not an array", npy((0,)), "Cannot read"),
        (b"", b"", "Cannot read"),
    ],
)
def test_arrays_that_promise_more_than_they_hold_are_refused(tmp_path, images, labels, says):
    (tmp_path / "cifar10").mkdir()
    archive(tmp_path / "cifar10" / "cifar10_train.npz", images=images, labels=labels)
    with memory_below(MEBIBYTE), pytest.raises(ConfigurationError, match=says):
        build_task("images", {"data": "cifar10"}, data_dir=tmp_path)


def test_zip_archives_are_not_unpacked_beyond_what_a_data_set_has(tmp_path, monkeypatch):
    archive(tmp_path / "a.zip", a=bytes(700), b=bytes(400))
    check_zip(tmp_path / "a.zip", 1100)
    with pytest.raises(OversizeError):
        check_zip(tmp_path / "a.zip", 1099)
    (tmp_path / "text8").mkdir()
    with zipfile.ZipFile(tmp_path / "text8" / "text8.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("text8", bytes(64 * MEBIBYTE))
    monkeypatch.setattr(check_zip, "__defaults__", (MEBIBYTE,))
    with memory_below(MEBIBYTE), pytest.raises(ConfigurationError, match="larger than"):
        corpora.read_corpus(corpora.CHARACTERS["text8"], tmp_path)
