"""The mixing kernel against its definition, its probabilities, and its coder."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from pathspace.sequences import PCNN
from pathspace.sequences.decisions import halve, part_by_bits, tree, tree_of
from pathspace.sequences.kernels.contexts import BEGIN, T
from pathspace.sequences.kernels.mixing_reference import Mixture
from pathspace.sequences.mixing import Reading, blank
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.walk import Walk, coder

LOG = "".join(
    f"10:{k // 60:02}:{k % 60:02} GET /{'abc'[k * k % 3]}/page{k % 7}.html {200 + 204 * (k % 11 == 0)}\n"
    for k in range(24)
)


def decisions(text):
    alphabet = Alphabet.of([text])
    x = alphabet.encode(text)
    return alphabet, x, tree(np.bincount(x, minlength=len(alphabet)), alphabet)


def ways(decided):
    return [
        list(zip(node[:depth].tolist(), digit[:depth].tolist(), strict=True))
        for node, digit, depth in zip(decided.node, decided.digit, decided.depth, strict=True)
    ]


def test_the_tree_has_a_way_of_its_own_to_each_symbol():
    rng = np.random.default_rng(0)
    for A in (1, 2, 3, 5, 64, 200):
        counts = rng.integers(0, 1000, A)
        alphabet = Alphabet(bytes(range(A)))
        decided = tree(counts, alphabet)
        digits = ["".join(str(digit) for _, digit in way) for way in ways(decided)]
        assert len(set(digits)) == A
        # alphabetical, and no way is the beginning of another
        assert digits == sorted(digits)
        assert not any(b.startswith(a) for a, b in pairwise(digits))
        # no further than twice the entropy and two from the shortest
        share = (counts + 1) / (counts + 1).sum()
        assert (share * decided.depth).sum() <= -(share * np.log2(share)).sum() + 2
        assert halve(counts).shape == (A - 1, 2)


def test_codes_are_parted_by_their_bits():
    rng = np.random.default_rng(0)
    for A in (1, 2, 5, 100, 256):
        codes = np.sort(rng.choice(256, A, replace=False))
        alphabet = Alphabet(bytes(codes.tolist()))
        decided = tree_of(part_by_bits(codes), alphabet)
        for code, way in zip(codes.tolist(), ways(decided), strict=True):
            bits = f"{code:08b}"
            # the bits in which some code that begins alike differs
            begins = [bits[:k] for k in range(8)]
            all_bits = [f"{other:08b}" for other in codes.tolist()]
            parted = [
                k
                for k, begin in enumerate(begins)
                if len({other[k] for other in all_bits if other.startswith(begin)}) == 2
            ]
            assert [digit for _, digit in way] == [int(bits[k]) for k in parted]


def test_decisions_lie_in_groups_of_three():
    for A in (1, 2, 3, 50):
        decided = tree(np.random.default_rng(A).integers(0, 1000, A))
        for way in ways(decided):
            for k, (v, _) in enumerate(way):
                digits = "".join(str(digit) for _, digit in way[k - k % 3 : k])
                assert decided.root[v] == way[k - k % 3][0]
                assert decided.cell[v] == int("1" + digits, 2)


@pytest.mark.parametrize("with_network", [False, True])
def test_bits_are_those_of_the_definition(with_network):
    texts = [LOG[:700], LOG[300:500], "ab c  d", "a  b\n" + "x " * 40 + "\n" + " y" * 40 + "ab"]
    alphabet, _, decided = decisions("".join(texts))
    A = len(alphabet)
    network = None
    if with_network:
        network = PCNN(units=4, passes=20).fit(texts[0], alphabet="".join(texts)).parameters_
    corpus = Corpus.of([alphabet.encode(text) for text in texts], A)
    # half of what the second text has is not to be predicted
    corpus.chi[800:] = np.arange(len(corpus.chi) - 800) % 2 == 0
    memory = blank(decided, len(corpus.x), cells=1 << 24)
    # room enough that no place of a hash is taken twice
    reading = Reading(network, decided, memory._replace(last=np.zeros(1 << 22, np.int64)))
    definition = Mixture(ways(decided), decided.role.tolist())
    for begin, end in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
        reading.begin()
        definition.restart()
        place = None if network is None else Walk(network)
        for t in range(begin, end):
            part = Corpus(corpus.x[t : t + 1], np.array([0, 1]), corpus.chi[t : t + 1], A)
            pi = None if place is None else place.predict()
            expected = definition.symbol(int(corpus.x[t]), pi, bool(corpus.chi[t]))
            # what `learn` does but for beginning a text
            bits = reading.score(part.x, part.chi)
            assert bits == pytest.approx(-np.log2(expected).sum() if expected else 0.0, abs=1e-7)
            if place is not None:
                place.read(int(corpus.x[t]))
    assert reading.memory.place[T] == len(definition.read)
    np.testing.assert_allclose(reading.memory.maps, definition.maps, atol=1e-12)
    np.testing.assert_allclose(reading.memory.match_map, definition.match_map, atol=1e-12)
    for (name, row), expected in definition.weights.items():
        found = getattr(reading.memory, f"by_{name}")[row, : len(expected)]
        np.testing.assert_allclose(found, expected, atol=1e-9)
    for row, expected in definition.corrections.items():
        np.testing.assert_allclose(reading.memory.corrections[row], expected, atol=1e-9)


def test_probabilities_of_all_symbols_are_those_that_reading_pays_for():
    _, x, decided = decisions(LOG)
    reading = Reading(None, decided, blank(decided, len(x)))
    for y in x:
        p = reading.predict()
        assert p.sum() == pytest.approx(1)
        bits = reading.score(np.array([y]))
        assert bits == pytest.approx(-np.log2(p[y]), abs=1e-9)


def test_reading_at_once_symbol_by_symbol_and_coding_leave_the_same():
    alphabet, x, decided = decisions(LOG)
    corpus = Corpus.of([x], len(alphabet))

    def new():
        return Reading(None, decided, blank(decided, len(x)))

    whole, single, coding, decoding, slots = (new() for _ in range(5))
    bits = whole.learn(corpus)
    single.read_all(x[:100])
    for y in x[100:]:
        single.read(int(y))
    code = coding.encode(x)
    # zeros at the end are not written
    assert bits / 8 - 2 <= len(code) <= bits / 8 + 2
    decoding.decode(code, back := np.zeros(len(x), np.uint8))
    assert back.tolist() == x.tolist()
    assert slots.learn(corpus, slots_alone=True) == 0
    for other in (single, coding, decoding):
        for mine, its in zip(whole.memory, other.memory, strict=True):
            np.testing.assert_array_equal(mine, its)
    for name in ("history", "cells", "last", "maps", "match_map"):
        np.testing.assert_array_equal(getattr(whole.memory, name), getattr(slots.memory, name))


def test_a_copy_learns_without_the_original():
    alphabet, x, decided = decisions(LOG)
    reading = Reading(None, decided, blank(decided, len(x)))
    reading.learn(Corpus.of([x], len(alphabet)))
    before = [array.copy() for array in reading.memory]
    copied = reading.copy()
    copied.read_all(np.tile(x, 3))
    assert copied.memory.place[BEGIN] == len(x)
    for array, kept in zip(reading.memory, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_a_table_that_is_full_still_codes():
    rng = np.random.default_rng(0)
    alphabet = Alphabet(bytes(range(50)))
    x = rng.integers(0, 50, 3000)
    decided = tree(np.bincount(x, minlength=50), alphabet)
    readings = [Reading(None, decided, blank(decided, len(x), cells=1 << 10)) for _ in range(2)]
    code = readings[0].encode(x)
    assert (readings[0].memory.cells[::8] != 0).mean() > 0.99
    readings[1].decode(code, back := np.zeros(len(x), np.uint8))
    assert back.tolist() == x.tolist()
    # noise costs little more than noise
    assert len(code) <= 1.1 * len(x) * np.log2(50) / 8


def test_a_code_that_is_read_takes_few_bytes_a_byte():
    code = bytes(1 << 17)
    tracemalloc.start()
    begun = coder(code)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert begun.content.tobytes() == code
    assert taken < 3 * len(code)
