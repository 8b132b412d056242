"""Files compressed without a model, and records of a shared one."""

import contextlib
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, CorruptedError, Mixed, Records, compress, decompress, load

LOG = "".join(
    f"10:{k // 60:02}:{k % 60:02} GET /page{k * k % 7}.html {200 + 204 * (k % 11 == 0)}\n"
    for k in range(150)
).encode()
RARE = bytes(range(256))


@pytest.mark.parametrize(
    "data",
    [b"", b"a", b"\xff" * 9, b"\0\xff" * 9, RARE, LOG, LOG * 6 + RARE, bytes(3000)],
)
@pytest.mark.sample(4)
def test_a_file_comes_back_without_a_model(data):
    packed = compress(None, data)
    assert decompress(None, packed) == data
    assert len(packed) <= 1.02 * len(data) + 12
    if len(data) > 2000:
        assert len(packed) < len(zlib.compress(data, 9))


def test_progress_is_told():
    told = []
    packed = compress(None, LOG * 3, lambda done, total: told.append((done, total)))
    assert told[-1] == (3 * len(LOG), 3 * len(LOG))
    decompress(None, packed, lambda done, total: told.append((done, total)))
    assert told[-1] == (3 * len(LOG), 3 * len(LOG))


def test_damage_is_refused():
    packed = compress(None, LOG[:60])
    for k in range(len(packed)):
        for damaged in (packed[:k] + bytes([packed[k] ^ 4]) + packed[k + 1 :], packed[:k]):
            with pytest.raises(
                (CorruptedError, ValueError), match=r"damaged|not a file made by|checksum"
            ):
                decompress(None, damaged)
    with pytest.raises(ValueError, match="claims to be 60 bytes"):
        decompress(None, packed, max_bytes=59)


@pytest.fixture(scope="module", params=["contexts", "network", "characters"])
def model(request):
    if request.param == "network":
        return PCNN(units=4, passes=20).fit(LOG)
    return Mixed().fit(LOG if request.param == "contexts" else LOG.decode())


def test_a_file_of_a_model_and_one_of_none_are_told_apart(model):
    with pytest.raises(ValueError, match="was compressed without a model: give the file alone"):
        decompress(model, compress(None, LOG))
    for packed in (compress(model, LOG), compress(model, LOG, by_record=True)):
        with pytest.raises(ValueError, match="was compressed with a model: give that model, too"):
            decompress(None, packed)
    with pytest.raises(ValueError, match="by a model that they share"):
        compress(None, LOG, by_record=True)


def test_each_record_comes_back_by_itself_with_few_bytes_more_than_its_code_length(model):
    records, lines = Records(model), LOG.splitlines()[:40]
    packed = [records.pack(line) for line in lines]
    # in another order, and by another compressor
    for line, one in reversed(list(zip(lines, packed, strict=True))):
        assert Records(model).unpack(one) == records.unpack(one) == line
    is_text = isinstance(model.alphabet_.symbols, str)
    for line, one in zip(lines, packed, strict=True):
        place = model.frozen()
        x = model.alphabet_.encode((line + b"\n").decode() if is_text else line + b"\n")
        assert len(one) <= place.lengths(x).sum() / 8 + 3
    assert model.bits(LOG.decode() if is_text else LOG) == model.bits(
        LOG.decode() if is_text else LOG
    )


@pytest.mark.parametrize("line", [b"", b"\xc3\xa9 10:00", b"GET ~ \xe2\x82\xac~", b"~"])
def test_records_of_foreign_symbols_come_back(model, line):
    records = Records(model)
    assert records.unpack(records.pack(line)) == line


def test_records_that_are_damaged_or_none_are_refused(model):
    records, line = Records(model), LOG.splitlines()[9]
    packed, wrong = records.pack(line), 0
    for k in range(len(packed)):
        damaged = packed[:k] + bytes([packed[k] ^ 16]) + packed[k + 1 :]
        with contextlib.suppress(CorruptedError):
            wrong += records.unpack(damaged) != line
    assert wrong == 0
    with pytest.raises(CorruptedError, match="too early"):
        records.unpack(b"")
    with pytest.raises(ValueError, match="holds a newline"):
        records.pack(b"a\nb")
    with pytest.raises(TypeError, match=r"give text\.encode"):
        records.pack("a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="does not know the newline"):
        Records(Mixed().fit(b"abab"))
    with pytest.raises(ValueError, match="this one reads tokens"):
        Records(Mixed().fit([1, 2]))


@pytest.mark.parametrize("data", [b"", b"\n", LOG, LOG[:-1], b"\n\n" + LOG + b"\n~\n"])
def test_files_of_records_come_back(model, data):
    packed = compress(model, data, by_record=True)
    assert decompress(model, packed) == data


def test_files_of_records_that_are_damaged_or_too_long_are_refused(model):
    packed = compress(model, LOG[:200], by_record=True)
    for k in range(len(packed)):
        with pytest.raises((CorruptedError, ValueError)):
            decompress(model, packed[:k] + bytes([packed[k] ^ 4]) + packed[k + 1 :])
    with pytest.raises(ValueError, match="longer than the 99 bytes"):
        decompress(model, packed, max_bytes=99)
    other = Mixed().fit(LOG[:500])
    with pytest.raises(CorruptedError, match="another model"):
        decompress(other, packed)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").write_bytes(LOG)

    def invoke(*words, status=0):
        result = CliRunner().invoke(app, ["sequence", *words])
        assert result.exit_code == status, result.output
        return result.output

    return invoke


def test_the_commands_need_no_model(run, tmp_path):
    assert "log.psq: 4416 bytes to" in run("compress", "log").replace(
        f"{len(LOG)} bytes", "4416 bytes"
    )
    assert "exists" in run("compress", "log", status=2)
    (tmp_path / "log").rename(tmp_path / "kept")
    run("decompress", "log.psq")
    assert (tmp_path / "log").read_bytes() == LOG
    assert "exists" in run("decompress", "log.psq", status=2)
    run("decompress", "log.psq", "--force")
    assert "give --output" in run("decompress", "kept", status=2)
    content = (tmp_path / "log.psq").read_bytes()
    (tmp_path / "bad.psq").write_bytes(content[:-3])
    assert "damaged" in run("decompress", "bad.psq", status=2)
    assert not (tmp_path / "bad").exists()


def test_the_commands_take_records(run, tmp_path):
    Mixed().fit(LOG).save(tmp_path / "m")
    run("compress", "m", "log", "--records", "-o", "packed")
    run("decompress", "m", "packed", "-o", "back")
    assert (tmp_path / "back").read_bytes() == LOG
    assert "needs a model" in run("compress", "log", "--records", status=2)
    assert "no model file 'absent'" in " ".join(run("compress", "absent", "log", status=2).split())
    assert load(tmp_path / "m").bits(LOG) > 0


@pytest.mark.slow
def test_pipes_both_ways(tmp_path):
    def piped(content, *words):
        command = [sys.executable, "-m", "pathspace", "sequence", *words, "-", "-o", "-", "-q"]
        return subprocess.run(
            command, cwd=tmp_path, input=content, capture_output=True, timeout=300, check=True
        ).stdout

    assert piped(piped(LOG, "compress"), "decompress") == LOG
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_was_compressed_before_still_comes_back():
    kept = Path(__file__).parent / "fixtures"
    contexts = load(kept / "contexts-v2.safetensors")
    packed = (kept / "contexts-v2.psq").read_bytes()
    assert decompress(contexts, packed) == b"10:09 GET /a 200\n10:10 GET /c 404\n"
    text = "10:01 GET /a 200\n10:02 GET /b 404\n" * 6
    assert load(kept / "network-v2.safetensors").bits(text[:60]) == pytest.approx(96.09823080327381)
    assert contexts.bits(text[:60].encode()) == pytest.approx(3.8664633612263675)
    assert load(kept / "mixed-v2.safetensors").bits(text[:60]) == pytest.approx(2.782407844548679)
    assert np.isfinite(contexts.bits_)


def test_a_file_is_compressed_to_the_bytes_of_earlier_builds():
    kept = Path(__file__).parent / "fixtures"
    packed = (kept / "alone-v4.psq").read_bytes()
    assert decompress(None, packed) == LOG * 6 + RARE
    assert compress(None, LOG * 6 + RARE) == packed


@pytest.mark.slow
def test_what_was_compressed_with_nine_contexts_still_comes_back(tmp_path):
    kept = Path(__file__).parent / "fixtures"
    contexts, tokens = load(kept / "contexts-v3.safetensors"), load(kept / "tokens-v3.safetensors")
    held = b"10:09 GET /a 200\n10:10 GET /c 404\n"
    packed = (kept / "contexts-v3.psq").read_bytes()
    records = (kept / "records-v3.psq").read_bytes()
    text = "10:01 GET /a 200\n10:02 GET /b 404\n" * 6
    alone = (kept / "alone-v2.psq").read_bytes()
    assert decompress(None, alone) == text.encode() + held + bytes(range(256))
    assert decompress(contexts, packed) == decompress(contexts, records) == held
    assert contexts.bits(text[:60].encode()) == pytest.approx(2.1641741951515123, abs=1e-9)
    assert contexts.predict(b"10:0")[ord("1")] == pytest.approx(0.8191787199991012, abs=1e-9)
    assert tokens.bits(["login", "open", "shut", "close"]) == pytest.approx(
        42.82391240644293, abs=1e-9
    )
    assert load(kept / "mixed-v3.safetensors").bits(text[:60]) == pytest.approx(
        2.0908889846126217, abs=1e-9
    )
    # saved again they stay what they were
    contexts.save(tmp_path / "again")
    again = load(tmp_path / "again")
    assert decompress(again, packed) == held
    assert again.bits(text[:60].encode()) == contexts.bits(text[:60].encode())
    assert compress(again, held) == packed
