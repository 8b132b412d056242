"""Model files that were damaged or made up, some of them with a checksum that fits."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load as tensors_of
from safetensors.numpy import save as written

from faults.readers import MEBIBYTE, memory_below
from pathspace.sequences import PCNN, RNN, ModelFileError, load
from pathspace.sequences.storage import _KEY, checksum

TEXT = "she sells sea shells by the sea shore " * 6


@pytest.fixture(scope="module", params=[PCNN, RNN])
def content(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    request.param(units=4, passes=8, prior_writing=0.1).fit(TEXT, validation=0.2).save(path)
    return path.read_bytes()


def parts(content):
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"][_KEY]), tensors_of(content)


def forged(content, change):
    """The file after a change of its description and tensors, with a checksum that fits."""
    description, tensors = parts(content)
    change(description, tensors)
    description["checksum"] = checksum(description, tensors)
    return written(tensors, {_KEY: json.dumps(description)})


def refused(tmp_path, content, match="damaged"):
    (tmp_path / "m").write_bytes(content)
    with memory_below(MEBIBYTE), pytest.raises(ModelFileError, match=match):
        load(tmp_path / "m")


def test_an_unchanged_file_is_read(content, tmp_path):
    (tmp_path / "m").write_bytes(forged(content, lambda _, __: None))
    assert load(tmp_path / "m").parameters_.units == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"passes": 8', '"passes": 9'),
        ('"rate_w": 0', '"rate_w": 1'),
        ('"damping": 1.0', '"damping": 2.0'),
        ('"squash": "tanh"', '"squash": "logistic"'),
        ('"seed": 0', '"seed": 1'),
    ],
)
def test_the_checksum_covers_the_description(content, tmp_path, old, new):
    description, tensors = parts(content)
    changed = json.dumps(description).replace(old, new)
    assert changed != json.dumps(description)
    refused(tmp_path, written(tensors, {_KEY: changed}), "checksum")


def test_the_checksum_covers_names_types_and_shapes(content, tmp_path):
    description, tensors = parts(content)
    tensors["last.w"] = tensors["last.w"].reshape(-1)
    refused(tmp_path, written(tensors, {_KEY: json.dumps(description)}), "checksum")
    del description["checksum"]
    refused(tmp_path, written(tensors_of(content), {_KEY: json.dumps(description)}), "checksum")


def put(name, value):
    def change(description, tensors):
        *places, last = name.split("/")
        for place in places:
            description = description[place]
        description[last] = value

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("units", value) for value in (3_000_000, 2**62, 0, -1, 3, 4.5, "4", None, [4])),
        *(
            ("alphabet", value)
            for value in (2**31, -1, None, {}, "", "aa", [97, 97], [300], ["a"], "ab")
        ),
        *(("settings", value) for value in (None, [], {"passes": "many"}, {"metric": "adam"})),
        *(("counters", value) for value in (None, [], {})),
        ("counters/passes", "eight"),
        ("counters/passes", -1),
        ("counters/rate_w", float("nan")),
        ("counters/seconds", None),
        ("kind", "lstm"),
        ("kind", ["pcnn"]),
        ("squash", None),
        ("options", 3),
        ("options", {"restarts": "four"}),
    ],
)
def test_descriptions_that_say_what_cannot_be_are_refused(content, tmp_path, name, value):
    refused(tmp_path, forged(content, put(name, value)))


@pytest.mark.parametrize("version", ["two", None, [], 0, 1, -(10**400)])
def test_a_version_that_is_none_is_refused(content, tmp_path, version):
    description, tensors = parts(content)
    refused(tmp_path, written(tensors, {_KEY: json.dumps({**description, "version": version})}))


@pytest.mark.parametrize("description", ["[]", "3", "{}", "nothing", '"text"', "[" * 100_000])
def test_what_is_no_description_is_refused(content, tmp_path, description):
    refused(tmp_path, written(tensors_of(content), {_KEY: description}))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("sources"),
        lambda t: t.pop("last.w"),
        lambda t: t.pop("best.tau"),
        lambda t: t.update(sources=t["sources"][:-1]),
        lambda t: t.update(sources=t["sources"].reshape(1, -1)),
        lambda t: t.update(sources=t["sources"].astype(np.float64)),
        lambda t: t.update(sources=np.array(3)),
        lambda t: t.update(targets=t["targets"] + 1),
        lambda t: t.update(targets=t["targets"][::-1].copy()),
        lambda t: t.update({"last.V0": np.array(1.0)}),
        lambda t: t.update({"last.w": t["last.w"].astype(np.float32)}),
        lambda t: t.update({"last.w": np.full_like(t["last.w"], np.nan)}),
        lambda t: t.update({"centre.V0": t["centre.V0"][:-1]}),
    ],
)
def test_tensors_that_do_not_fit_are_refused(content, tmp_path, change):
    refused(tmp_path, forged(content, lambda _, tensors: change(tensors)))


def test_a_network_of_no_symbol_is_refused(content, tmp_path):
    def empty(description, tensors):
        description["alphabet"] = []
        for name in tensors:
            if name.endswith(".w"):
                tensors[name] = tensors[name][:, :0].copy()
            elif name.endswith(".rho") or (name.endswith(".tau") and description["kind"] != "rnn"):
                tensors[name] = tensors[name][:0]

    refused(tmp_path, forged(content, empty), "no symbol")
