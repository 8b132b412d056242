"""Round trips through the arithmetic coder, its size, and what it refuses."""

from binascii import crc_hqx

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathspace.sequences import PCNN, CorruptedError, NotFittedError, compress, decompress
from pathspace.sequences.kernels.coding import ENCODE
from pathspace.sequences.tasks import TASKS
from pathspace.sequences.walk import coder

TEXT = b"the quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def model():
    return PCNN(units=8, passes=60).fit(TEXT)


def test_size_is_that_of_the_model_s_bits(model):
    for data in (TEXT[:1], TEXT[:60], TEXT, TEXT * 30):
        packed = compress(model, data)
        assert decompress(model, packed) == data
        assert len(packed) <= model.bits(data) / 8 * 1.001 + 16


def test_a_network_that_is_coded_by_counts_no_bits(model):
    """It said 0 where a mixture says the code length; bits of a network alone are those of its code_length."""
    place = model.begin(0)
    assert not hasattr(place, "run")
    assert place._code(ENCODE, np.zeros(3, np.int64), coder(room=99)) is None


@pytest.mark.slow
def test_size_is_that_of_the_model_s_bits_whatever_symbols_it_knows_besides():
    """Of a code of 24 bits the share of each of 20,000 symbols was more than all that the text takes."""
    model = PCNN(units=3, passes=60).fit("ab" * 300, alphabet="".join(map(chr, range(20_000))))
    text = "ab" * 12_000
    assert len(compress(model, text.encode())) <= model.bits(text) / 8 * 1.001 + 16


@pytest.mark.parametrize("name", ["music", "alphabet"])
def test_task_texts_are_coded_at_the_model_s_bits(name):
    text = TASKS[name].generate(np.random.default_rng(1))[:6000]
    model = PCNN(units=6, passes=20).fit(text)
    packed = compress(model, text.encode())
    assert decompress(model, packed) == text.encode()
    assert model.bits(text) / 8 * 0.999 <= len(packed) <= model.bits(text) / 8 * 1.001 + 16


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_survive_the_round_trip(data):
    model = PCNN(units=3, passes=4).fit(b"\x00\x01\x02ab")
    assert decompress(model, compress(model, data)) == data


@pytest.mark.parametrize("text", ["", "aaaa", "na\u00efve \U0001f600 a", "zz", "ab" * 500])
def test_any_characters_survive_the_round_trip(text):
    for seen in ("a", "ab na"):
        model = PCNN(units=3, passes=4).fit(seen)
        assert decompress(model, compress(model, text.encode())) == text.encode()


def test_data_that_is_no_text_is_refused_by_a_model_of_characters():
    with pytest.raises(ValueError, match="not UTF-8"):
        compress(PCNN(units=3, passes=4).fit("ab"), b"\xff\xfe")


def test_what_cannot_be_compressed_is_named():
    model = PCNN(units=3, passes=2).fit("abc")
    with pytest.raises(TypeError, match="takes bytes, got str: of a str, give"):
        compress(model, "abc")
    for foreign in (None, "abc", [1]):
        with pytest.raises(
            TypeError, match=f"takes bytes, got {type(foreign).__name__}: give what compress"
        ):
            decompress(model, foreign)
    with pytest.raises(NotFittedError, match="call fit first"):
        compress(PCNN(), b"abc")
    packed = compress(model, bytearray(b"abcx"))
    for same in (packed, bytearray(packed), memoryview(packed)):
        assert decompress(model, same) == b"abcx"


def test_every_flipped_bit_and_every_cut_is_refused(model):
    packed = compress(model, TEXT[:100] + b"\x00Z")
    for k in range(len(packed)):
        for bit in range(8):
            damaged = bytearray(packed)
            damaged[k] ^= 1 << bit
            with pytest.raises(CorruptedError):
                decompress(model, bytes(damaged))
        with pytest.raises(CorruptedError):
            decompress(model, packed[:k])
    with pytest.raises(CorruptedError):
        decompress(model, packed + b"x")


def test_damage_that_leads_to_half_a_surrogate_pair_is_refused():
    model = PCNN(units=3, passes=2).fit("ab\udce9" * 20)
    packed = compress(model, b"abab")
    refused = 0
    for value in range(256):
        damaged = bytearray(packed[:8] + bytes([7, 7, 7, value]))
        damaged[5:7] = crc_hqx(bytes(damaged[:5] + damaged[7:]), 0).to_bytes(2, "little")
        try:
            assert decompress(model, bytes(damaged)) == b"abab"
        except CorruptedError:
            refused += 1
    assert refused > 200  # the others have the original's code, written otherwise


def test_another_model_is_refused(model):
    packed = compress(model, TEXT)
    for seed in range(1, 4):
        other = PCNN(units=8, passes=3, seed=seed).fit(TEXT)
        with pytest.raises(CorruptedError):
            decompress(other, packed)


def test_progress_is_reported(model):
    seen = []
    packed = compress(model, TEXT * 50, lambda done, total: seen.append((done, total)))
    assert seen == [(8192, 18_000), (16_384, 18_000), (18_000, 18_000)]
    seen.clear()
    decompress(model, packed, lambda done, total: seen.append((done, total)))
    assert seen == [(8192, 18_000), (16_384, 18_000), (18_000, 18_000)]
