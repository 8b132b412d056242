"""Texts that are learned one after the other."""

import numpy as np
import pytest

from pathspace.sequences import (
    PCNN,
    Mixed,
    NotFittedError,
    UnseenSymbolError,
    compress,
    decompress,
    load,
)

LINES = [f"10:{k // 6:02} GET /page{k * k % 7}.html 200\n" for k in range(120)]
FIRST, SECOND, HELD = "".join(LINES[:50]), "".join(LINES[50:100]), "".join(LINES[100:])


def test_contexts_learn_two_texts_as_two_of_a_list():
    one = Mixed().partial_fit(FIRST, alphabet=HELD + SECOND).partial_fit(SECOND)
    assert one.bits(HELD) < 0.7 * Mixed().fit(FIRST, alphabet=HELD + SECOND).bits(HELD)
    both = Mixed().fit([FIRST, SECOND], alphabet=HELD)
    # the decisions are those of the first text, and mixing weights are rounded after it
    assert one.bits(HELD) == pytest.approx(both.bits(HELD), rel=0.1)
    assert one.bits_ == pytest.approx(both.bits_, rel=0.1)
    assert one.validation_bits_ is None


@pytest.mark.parametrize("network", [False, True])
def test_a_file_holds_all_that_was_learned(tmp_path, network):
    model = Mixed()
    if network:
        model = Mixed(PCNN(units=3, passes=4).fit(FIRST, alphabet=HELD + SECOND))
    alphabet = None if network else HELD + SECOND
    model.partial_fit(FIRST[:200], alphabet=alphabet).partial_fit([FIRST[200:], SECOND])
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.bits(HELD) == model.bits(HELD)
    assert loaded.bits_ == model.bits_
    packed = compress(model, HELD.encode())
    assert decompress(loaded, packed) == HELD.encode()
    # both go on alike
    assert loaded.partial_fit(HELD).bits(HELD) == model.partial_fit(HELD).bits(HELD)
    # the tables have room for the first text alone, and the history for all
    assert model.reading_.memory.place[0] == len(FIRST + SECOND + HELD)


def test_an_interrupted_text_is_not_learned():
    model = Mixed().fit(FIRST)
    before = model.bits(FIRST)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(FIRST, progress=interrupt)
    assert model.bits(FIRST) == before


def test_a_network_makes_passes_over_each_text():
    model = PCNN(units=4, connectivity=None, seed=1).partial_fit(
        FIRST, alphabet=SECOND + HELD, passes=20
    )
    same = PCNN(units=4, connectivity=None, seed=1).fit(FIRST, alphabet=SECOND + HELD, passes=20)
    assert np.array_equal(model.parameters_.w, same.parameters_.w)
    before = model.bits(SECOND)
    model.partial_fit(SECOND, passes=40)
    assert model.training_.passes == 60
    assert model.bits(SECOND) < 0.95 * before
    # the weights of a mixture trust it with neither text
    for text in (FIRST, SECOND):
        assert Mixed(model).read(text).bits_ == Mixed(model).read(text, unseen=False).bits_


def test_mistakes_are_named():
    for model in (Mixed(), PCNN(units=2)):
        model.partial_fit("abab", alphabet="c")
        with pytest.raises(ValueError, match="first call of partial_fit settles the alphabet"):
            model.partial_fit("abab", alphabet="d")
        with pytest.raises(ValueError, match="first call of partial_fit settles the alphabet"):
            model.partial_fit("abab", tokens=True)
        with pytest.raises(UnseenSymbolError):
            model.partial_fit("abd")
        with pytest.raises(ValueError, match="empty"):
            model.partial_fit("")
    with pytest.raises(NotFittedError):
        Mixed(PCNN(units=2)).partial_fit("abab")
