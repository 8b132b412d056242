"""Compressed files that claim more than they hold."""

import os
import time

import pytest
from typer.testing import CliRunner

from faults.readers import MEBIBYTE, memory_below, stream
from pathspace.cli import app
from pathspace.sequences import PCNN, CorruptedError, compress, decompress

ONE = b"\x01\xc8\x01"  # a foreign byte 200 right after the one before


@pytest.fixture(scope="module")
def model():
    return PCNN(units=3, passes=4).fit(b"abab")


@pytest.fixture(scope="module")
def single():
    return PCNN(units=3, passes=4).fit(b"aaaa")


def test_foreign_symbols_are_unpacked_in_linear_time(model):
    # CPU seconds: each symbol copying the rest once took hundreds of them.
    n = 2 * MEBIBYTE
    began = time.process_time()
    assert decompress(model, stream(model, n, ONE * n, data=b"\xc8" * n)) == b"\xc8" * n
    assert time.process_time() - began < 60


def test_all_bytes_come_back_whatever_is_foreign(model):
    for data in (os.urandom(3000), b"a" * 300 + b"z" + b"b" * 70_000 + b"yz", b"z", b""):
        assert decompress(model, compress(model, data)) == data
    characters = PCNN(units=3, passes=4).fit("abab")
    for text in ("x", "aß\u20acb\U0001f600", "\U0010ffff" * 400 + "ab" * 200 + "\0"):
        assert decompress(characters, compress(characters, text.encode())) == text.encode()


@pytest.mark.parametrize("length", [2**27, 2**45, 2**61])
def test_a_claimed_length_takes_no_memory_before_it_is_allowed(model, single, length):
    for each in (model, single):
        with (
            memory_below(MEBIBYTE),
            pytest.raises(ValueError, match=r"more than .* allowed: .*max_bytes"),
        ):
            decompress(each, stream(each, length))
        with memory_below(MEBIBYTE), pytest.raises(ValueError, match="max_bytes"):
            decompress(each, stream(each, length, ONE))


def test_the_limit_is_of_bytes_and_can_be_raised(single):
    assert decompress(single, stream(single, 1000, data=b"a" * 1000), max_bytes=1000) == b"a" * 1000
    with pytest.raises(ValueError, match="max_bytes"):
        decompress(single, stream(single, 1001), max_bytes=1000)
    euros = PCNN(units=3, passes=4).fit("€€€€")
    packed = stream(euros, 400, data="€".encode() * 400)
    assert decompress(euros, packed, max_bytes=1200) == "€".encode() * 400
    with pytest.raises(ValueError, match="max_bytes"):
        decompress(euros, packed, max_bytes=1199)


def test_deflated_symbols_are_inflated_no_further_than_the_text_can_have(model):
    packed = stream(model, 1000, ONE * (8 * MEBIBYTE))
    with memory_below(8 * MEBIBYTE), pytest.raises(CorruptedError, match="foreign symbols"):
        decompress(model, packed)


@pytest.mark.parametrize(
    "foreign",
    [
        b"\x00\xc8\x01",  # at no distance from the one before
        b"\x09\xc8\x01",  # behind the end
        b"\x01\x80\x02",  # 256 is no byte
        b"\x01",  # a place without a symbol
        b"\x01\xc8",  # a number without an end
        b"\x80" * 30 + b"\x01\x01",  # a number of 30 bytes
        b"\xff" * 8 + b"\x7f\x01",  # a distance of 2^63 - 1
        ONE * 9,
    ],
)
def test_foreign_symbols_that_do_not_fit_are_refused(model, foreign):
    with pytest.raises(CorruptedError, match="foreign symbols"):
        decompress(model, stream(model, 8, foreign))


@pytest.mark.parametrize("code", [0xD800, 0xDFFF, 0x110000, 2**40])
def test_what_is_no_character_is_refused(code):
    characters = PCNN(units=3, passes=4).fit("abab")
    varint = bytes([*(code >> 7 * k & 0x7F | 0x80 for k in range(6)), 0])
    with pytest.raises(CorruptedError, match="foreign symbols"):
        decompress(characters, stream(characters, 8, b"\x01" + varint))


def test_the_command_has_the_limit(single, tmp_path):
    single.save(tmp_path / "m")
    (tmp_path / "packed").write_bytes(stream(single, 2**26 + 1))
    arguments = [
        "sequence",
        "decompress",
        str(tmp_path / "m"),
        str(tmp_path / "packed"),
        "-o",
        str(tmp_path / "out"),
    ]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "--max-bytes" in refused.output
    assert "checksum" in CliRunner().invoke(app, [*arguments, "--max-bytes", str(2**26 + 1)]).output
    assert not (tmp_path / "out").exists()
