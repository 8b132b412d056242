"""Model files: what `save` writes can be loaded again, whatever the size of the text."""

import lzma
import random

import pytest
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, ModelFileError, load, mixed_storage
from pathspace.sequences.kernels import mixing

STEPS = sorted([1 << n for n in range(12, 27)] + [3 << n for n in range(11, 25)])
"""All sizes of the window that xz knows, from 4 KiB to 64 MiB."""


@pytest.fixture(scope="module")
def pages():
    """Compressible bytes, more than 64 MiB of them."""
    block = bytes(range(256)) * 4096
    return memoryview(block * 65)


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [step for step in STEPS if step <= 1 << 20 or step >= 1 << 23])
def test_a_text_of_any_size_comes_back(pages, step):
    """xz rounds the window up to 2^n or 3 * 2^(n-1), and refuses to unpack with less memory than that."""
    near = (step,) if step > 1 << 24 else (step - 1, step, step + 1)
    for size in near:
        content = bytes(pages[:size])
        assert mixed_storage._decompress(mixed_storage._compress(content), size) == content


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", STEPS)
def test_the_window_is_the_one_that_xz_writes_into_the_file(step):
    """The byte of the properties of LZMA2 stands in the header of the block, at position 16 of the file."""
    if step > 1 << 23:
        assert mixed_storage._window(step) == 1 << 23
        return
    for size in (step - 1, step, step + 1):
        code = mixed_storage._compress(bytes(size))[16]
        kept = (2 | code & 1) << (code // 2 + 11)
        window = mixed_storage._kept_window(mixed_storage._window(size))
        assert window == kept


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 3 << 20, 5_000_000])
@pytest.mark.sample(2)
def test_a_stream_that_asks_for_more_memory_is_refused(size):
    window = next(step for step in STEPS if step >= size)
    more = STEPS[STEPS.index(window) + 1]
    for asked, refused in ((window, False), (more, True), (1 << 30, True)):
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": asked}]
        packed = lzma.compress(bytes(size), lzma.FORMAT_XZ, filters=filters)
        if refused:
            with pytest.raises(lzma.LZMAError, match="limit"):
                mixed_storage._decompress(packed, size)
        else:
            assert mixed_storage._decompress(packed, size) == bytes(size)


def test_a_stream_of_more_than_the_declared_size_is_refused():
    packed = mixed_storage._compress(bytes(1 << 24))
    for size in (1, 1 << 23, (1 << 24) - 1, (1 << 24) + 1):
        with pytest.raises((ValueError, lzma.LZMAError), match=r"the text has not|limit"):
            mixed_storage._decompress(packed, size)


@pytest.mark.slow
def test_a_model_is_loaded_and_replaced_where_xz_rounds_its_window_far_up(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(50)]
    text = " ".join(rng.choices(words, k=110_000))[:530_000]  # xz keeps a window of 786,432 bytes
    model = Mixed().fit(text)
    model.save(tmp_path / "m")
    assert load(tmp_path / "m").bits("abcd efgh") == model.bits("abcd efgh")
    (tmp_path / "text").write_text("she sells sea shells; " * 30)
    fit(tmp_path, "--no-context")
    assert isinstance(load(tmp_path / "m"), PCNN)


def fit(folder, *more, status=0):
    files = (str(folder / "text"), "-o", str(folder / "m"))
    result = CliRunner().invoke(app, ["sequence", "fit", *files, "--passes", "4", *more])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def unreadable(monkeypatch):
    """Let models be written with a text that cannot be unpacked."""
    monkeypatch.setattr(mixed_storage, "_compress", lambda content: b"no stream " + content)


@pytest.mark.usefixtures("unreadable")
def test_a_model_that_cannot_be_read_back_replaces_none(tmp_path):
    PCNN(units=3, passes=4).fit("abab").save(tmp_path / "m")
    before = (tmp_path / "m").read_bytes()
    with pytest.raises(
        ModelFileError, match=r"cannot be read back .* stays as it was: save it to another disk"
    ):
        Mixed().fit("abab").save(tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises(ModelFileError, match="cannot be read back"):
        Mixed().fit("abab").save("/dev/null")


@pytest.mark.usefixtures("unreadable")
def test_a_fit_says_that_its_model_cannot_be_read_back(tmp_path):
    (tmp_path / "text").write_text("she sells sea shells; " * 30)
    assert "cannot be read back" in fit(tmp_path, "--context", status=2)
    assert not isinstance(load(tmp_path / "m"), Mixed)  # the network, which was saved first


def test_the_bytes_of_a_model_are_checked_as_its_file_is(tmp_path):
    content = Mixed().fit("abab").content()
    mixed_storage.check_content(content)
    tensors = load_tensors(content)
    with pytest.raises(ModelFileError):
        mixed_storage.check_content(save_tensors(tensors, {"a": "b"}))


def test_parameters_and_weights_are_not_kept_twice(tmp_path):
    text = "she sells sea shells; " * 30
    network = PCNN(units=8, passes=0).fit(text, 0.2)
    tensors = load_tensors(network.content())
    assert not any(name.startswith("best") for name in tensors)
    network.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.training_.best is loaded.training_.model
    assert loaded.fit(text, 0.2, passes=6, resume=True).bits(text) == pytest.approx(
        PCNN(units=8, passes=6).fit(text, 0.2).bits(text)
    )
    contexts = Mixed().fit(text)
    weights = load_tensors(contexts.content())
    assert {weights[name].dtype.name for name in mixing.WEIGHTS} == {"float32"}
    contexts.save(tmp_path / "m")
    assert load(tmp_path / "m").bits(text) == contexts.bits(text)
    assert (tmp_path / "m").stat().st_size < 13_000
