"""Readers at damaged files: each gives the right content or an error of its own, within bounds that are counted.

Memory is counted in bytes and work in calls of Python functions; seconds are not, because a busy
machine adds to them.
"""

import contextlib
import gzip
import json
import random
import struct
import sys

import numpy as np
import pytest
from safetensors.numpy import load as tensors_of
from safetensors.numpy import save as written

from faults.readers import MEBIBYTE, memory_below, mutants
from pathspace.experiments import configuration, context
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import RESULT, RunResult, Validation
from pathspace.experiments.runner import RUNS, PlacedRun
from pathspace.experiments.settings import settings_from
from pathspace.experiments.storage import write_json
from pathspace.experiments.tasks.images import read_idx
from pathspace.sequences import (
    PCNN,
    Mixed,
    ModelFileError,
    compress,
    decompress,
    load,
    mixed_storage,
    storage,
)
from pathspace.sequences.compression import _MAGIC, _fingerprint
from pathspace.sequences.storage import _KEY, checksum

COUNTS = [100, pytest.param(2000, marks=pytest.mark.slow)]
many = pytest.mark.parametrize("count", COUNTS)
TEXT = "she sells sea shells by the sea shore " * 4


@contextlib.contextmanager
def calls_below(limit):
    """Fail if more functions than that are called in the block."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert calls < limit, f"{calls} calls"


@pytest.fixture(scope="module")
def model():
    return PCNN(units=3, passes=4).fit(TEXT.encode())


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    model.save(path)
    return path.read_bytes()


def check_model_file(path, content, original):
    path.write_bytes(content)
    try:
        with memory_below(MEBIBYTE), calls_below(20_000):
            stored = storage.load(path)
    except ModelFileError:
        return 1
    if original is not None:  # blanks and the order of names in the header mean nothing
        assert storage.dump(stored) == storage.dump(original)
    return 0


@many
def test_model_files(saved, tmp_path, count):
    (tmp_path / "m").write_bytes(saved)
    original = storage.load(tmp_path / "m")
    refused = sum(
        check_model_file(tmp_path / "n", damaged, original)
        for damaged in mutants(saved, count, seed=2)
    )
    assert refused > 0.9 * count


VALUES = [
    None,
    True,
    0,
    -1,
    1,
    2.5,
    2**31,
    3_000_000,
    2**63,
    1e308,
    float("nan"),
    "",
    "a",
    "tanh",
    [],
    [0] * 50,
    {},
    [[]],
]


def changed(value, rng, inner=False):
    """A copy of a table made of plain values, with one place in it changed."""
    if isinstance(value, dict) and value and not (inner and rng.random() < 0.1):
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {other: v for other, v in value.items() if other != name}
        return {**value, name: changed(value[name], rng, True)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return [*value[:place], changed(value[place], rng, True), *value[place + 1 :]]
    return rng.choice(VALUES)


@many
def test_model_files_with_checksums_that_fit(saved, tmp_path, count):
    rng = random.Random(3)
    size = struct.unpack("<Q", saved[:8])[0]
    description = json.loads(json.loads(saved[8 : 8 + size])["__metadata__"][_KEY])
    refused = 0
    for _ in range(count):
        said, tensors = changed(description, rng), tensors_of(saved)
        if rng.random() < 0.5:
            name = rng.choice(sorted(tensors))
            array = tensors[name]
            change = rng.choice(("lost", "flat", "short", "type", "values"))
            if change == "lost":
                del tensors[name]
            elif change == "values":
                tensors[name] = np.full_like(array, rng.choice((-1, 0, 7, 2**40)))
            else:
                tensors[name] = {
                    "flat": array.ravel(),
                    "short": array[:-1],
                    "type": array.astype(np.int32),
                }[change]
        if isinstance(said, dict) and isinstance(said.get("version"), int):
            said["checksum"] = checksum(said, tensors)
        refused += check_model_file(
            tmp_path / "n", written(tensors, {_KEY: json.dumps(said)}), None
        )
    assert refused > 0.5 * count


@pytest.fixture(scope="module")
def saved_mixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture") / "m"
    Mixed(PCNN(units=3, passes=4)).fit(b"abracadabra").save(path)
    return path.read_bytes()


def check_mixture_file(path, content):
    path.write_bytes(content)
    try:
        with memory_below(MEBIBYTE), calls_below(20_000):
            metadata, tensors = storage.contents(path)
            mixed_storage.read(
                path, metadata | {mixed_storage.KEY: metadata.get(mixed_storage.KEY, "")}, tensors
            )
    except ModelFileError:
        return 1
    return 0


@many
def test_mixture_files(saved_mixture, tmp_path, count):
    damaged = mutants(saved_mixture, count, seed=4)
    assert sum(check_mixture_file(tmp_path / "n", content) for content in damaged) > 0.9 * count


@many
def test_mixture_files_with_checksums_that_fit(saved_mixture, tmp_path, count):
    rng = random.Random(5)
    size = struct.unpack("<Q", saved_mixture[:8])[0]
    description = json.loads(
        json.loads(saved_mixture[8 : 8 + size])["__metadata__"][mixed_storage.KEY]
    )
    refused = 0
    for _ in range(count):
        said, tensors = changed(description, rng), tensors_of(saved_mixture)
        if rng.random() < 0.5:
            name = rng.choice(sorted(tensors))
            tensors[name] = rng.choice(
                (tensors[name][:-1], np.full_like(tensors[name], 7), tensors[name].ravel())
            )
        if isinstance(said, dict) and isinstance(said.get("version"), int):
            said["checksum"] = checksum(said, tensors)
        refused += check_mixture_file(
            tmp_path / "n", written(tensors, {mixed_storage.KEY: json.dumps(said)})
        )
    assert refused > 0.5 * count


def resealed(model, content):
    """A stream whose first checksum fits again, and that of the model."""
    from binascii import crc_hqx

    front = _MAGIC + _fingerprint(model) + content[3:5].ljust(2, b"\0")
    return front + crc_hqx(front + content[7:], 0).to_bytes(2, "little") + content[7:]


@many
def test_streams(model, count):
    data = TEXT.encode() + b"XYZ" * 9
    packed = compress(model, data)
    for damaged in mutants(packed, count, seed=4):
        for each in (damaged, resealed(model, damaged)):
            try:
                with memory_below(MEBIBYTE), calls_below(40_000):  # ten for each symbol
                    assert decompress(model, each, max_bytes=4000) == data
            except ValueError:
                pass


def idx(sizes, content):
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + content


@many
def test_idx_files(tmp_path, count):
    content = idx((5, 4, 4), bytes(range(80)))
    path = tmp_path / "f.gz"
    for packed in (
        *mutants(gzip.compress(content), count // 2, seed=5),
        *map(gzip.compress, mutants(content, count // 2, seed=6)),
    ):
        path.write_bytes(packed)
        try:
            with memory_below(MEBIBYTE), calls_below(2000):
                read_idx(path)
        except ConfigurationError:
            pass


@pytest.fixture(scope="module")
def config():
    return settings_from(("a test", {"task": "adding"})).run_config(
        "sgd", "default", 0.1, 0, evaluate_test=True
    )


@many
def test_results(config, tmp_path, count):
    result = RunResult(config, (1.0, 0.5, 0.25), (Validation(0, 1.0, 2.0),), 1.5, None, 0.1, 0.03)
    job = PlacedRun(config, tmp_path)
    job.keep(result)
    content = (tmp_path / RESULT).read_bytes()
    for damaged in mutants(content, count, seed=9):
        (tmp_path / RESULT).write_bytes(damaged)
        try:
            with memory_below(MEBIBYTE), calls_below(20_000):
                found = job.stored()
        except ConfigurationError:
            continue
        assert found in (result, None)  # None: of another configuration, which is not used


@many
def test_configurations(tmp_path, count):
    asked = configuration.Configuration(
        "train", "a run", settings_from(("a test", {"task": "adding"})), seed=0
    )
    write_json(tmp_path / context.CONFIGURATION, asked.as_dict())
    content = (tmp_path / context.CONFIGURATION).read_bytes()
    (tmp_path / RUNS / "one").mkdir(parents=True)
    (tmp_path / RUNS / "one" / RESULT).write_bytes(b"")
    rng = random.Random(10)
    plain = (json.dumps(changed(json.loads(content), rng)).encode() for _ in range(count // 2))
    for damaged in (*mutants(content, count // 2, seed=11), *plain):
        (tmp_path / context.CONFIGURATION).write_bytes(damaged)
        with memory_below(4 * MEBIBYTE), calls_below(100_000):
            context.is_own(tmp_path)
            configuration.is_same(tmp_path, asked)
            with contextlib.suppress(ConfigurationError):
                configuration.read(tmp_path, asked)


def test_a_model_that_survived_can_be_used(saved, tmp_path):
    (tmp_path / "m").write_bytes(saved)
    assert load(tmp_path / "m").bits(TEXT.encode()) > 0
