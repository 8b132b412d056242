"""Training on growing parts of a text: which parts, and that it is the same as training on one after the other."""

from dataclasses import replace

import numpy as np
import pytest

from pathspace.sequences import PCNN, growing
from pathspace.sequences.evaluation import code_length
from pathspace.sequences.growing import DOUBLINGS, SHORTEST, WORK, growing_parts
from pathspace.sequences.passes import forward
from pathspace.sequences.text import Corpus
from pathspace.sequences.training import Settings, train
from sequences.test_training import some_training

ARRAYS = ("w", "tau", "V0")
PASSES = 2 * (4 + 2) + 6  # those of the parts T / 4 and T / 2, and some on the whole


@pytest.fixture
def short(monkeypatch):
    """Parts of 100 symbols on."""
    monkeypatch.setattr(growing, "SHORTEST", 100)


def same(one, other):
    return all(
        np.array_equal(getattr(one.model, name), getattr(other.model, name)) for name in ARRAYS
    )


@pytest.mark.parametrize(
    ("T", "count"),
    [(100, 0), (2 * SHORTEST - 1, 0), (2 * SHORTEST, 1), (900_000, 5), (10**7, DOUBLINGS)],
)
def test_parts_double_and_cost_the_same(T, count):
    corpus = Corpus.of([np.arange(T) % 3], 3)
    parts = list(growing_parts(corpus))
    assert [len(part.x) for part, _ in parts] == [T >> k for k in range(count, 0, -1)]
    passes = np.diff([0, *(end for _, end in parts)])
    assert list(passes) == [WORK << k for k in range(count, 0, -1)]  # even: a writing step is first
    for part, _ in parts:
        assert np.array_equal(part.x, corpus.x[: len(part.x)])


def test_a_beginning_keeps_sequences_and_marks():
    sequences = [np.array([0, 1, 2]), np.array([2, 1]), np.array([0, 0, 1])]
    masks = [
        np.array([True, False, True]),
        np.array([False, False]),
        np.array([False, True, False]),
    ]
    corpus = Corpus.of(sequences, 3, masks)
    part = corpus.beginning(4)
    assert part.x.tolist() == [0, 1, 2, 2]
    assert part.bounds.tolist() == [0, 3, 4]
    assert part.chi.tolist() == [True, False, True, False]
    assert corpus.beginning(3).bounds.tolist() == [0, 3]


@pytest.mark.usefixtures("short")
def test_parts_without_a_symbol_to_predict_are_left_out():
    corpus = Corpus.of([np.zeros(400, int)], 2, [np.arange(400) >= 150])
    assert [len(part.x) for part, _ in growing_parts(corpus)] == [200]


@pytest.mark.usefixtures("short")
def test_it_is_training_on_one_part_after_the_other():
    training, corpus, validation = some_training(length=800)
    grown = train(training, corpus, Settings(passes=PASSES, grow=True), validation)
    by_hand = training
    for part, passes in ((corpus.beginning(100), 8), (corpus.beginning(200), 12)):
        by_hand = train(by_hand, part, Settings(passes=passes))
    by_hand = train(by_hand, corpus, Settings(passes=PASSES), validation)
    assert same(grown, by_hand)
    assert (grown.passes, grown.tries, grown.best_bits) == (
        PASSES,
        by_hand.tries,
        by_hand.best_bits,
    )


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("stop", [3, 8, 10, 12, 15])
def test_it_goes_on_bit_by_bit_wherever_it_was_stopped(stop):
    training, corpus, validation = some_training(length=800)
    settings = Settings(passes=PASSES, grow=True)
    whole = train(training, corpus, settings, validation)
    half = train(training, corpus, replace(settings, passes=stop), validation)
    # even there the validation text is looked at, and the log-likelihood that of the whole text
    assert half.result_bits == pytest.approx(code_length(half.result, validation))
    assert half.log_likelihood == pytest.approx(forward(half.model, corpus).log_likelihood)
    resumed = train(half, corpus, settings, validation)
    assert same(whole, resumed)
    assert (whole.best_bits, whole.tries) == (resumed.best_bits, resumed.tries)


@pytest.mark.usefixtures("short")
def test_what_is_reported_on_a_part_is_of_the_size_of_the_whole():
    training, corpus, _ = some_training(length=800)
    seen = []
    train(training, corpus, Settings(passes=PASSES, grow=True), report=seen.append)
    each = np.array([record.log_likelihood for record in seen]) / len(corpus.x)
    # nats a symbol: no jump by a factor of two between parts
    assert np.abs(np.diff(each)).max() < 0.5


def test_a_short_text_is_learned_as_ever():
    text = "she sells sea shells by the sea shore; " * 20
    plain, grown = (PCNN(units=4, passes=10, grow=grow).fit(text) for grow in (False, True))
    assert same(plain.training_, grown.training_)
