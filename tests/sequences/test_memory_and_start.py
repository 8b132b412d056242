"""Memory that grows with T (N + A)."""

import tracemalloc

import numpy as np
import pytest

from pathspace.sequences.evaluation import code_length
from pathspace.sequences.folds import fold_of
from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import start
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.training import Settings, Training, train


def test_memory_grows_with_the_states_and_the_predictions_alone():
    """The peak over the text may hold some arrays of T (N + A) numbers, never one of T N^2."""
    N, A = 40, 12
    peaks = []
    for T in (4000, 12_000):
        rng = np.random.default_rng(0)
        corpus = Corpus.of([rng.integers(0, A, T)], A)
        training = Training.begin(start("pcnn", "tanh", Graph.full(N), corpus, rng))
        train(training, corpus, Settings(metric="rbp-qd", passes=2))
        tracemalloc.start()
        train(training, corpus, Settings(metric="rbp-qd", passes=2))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    slope = (peaks[1] - peaks[0]) / 8000 / 8
    assert slope < 6 * (N + A)
    assert slope < N**2 / 4


def test_scoring_a_text_takes_its_states_and_no_prediction_of_every_symbol():
    N, A, T = 4, 100, 100_000
    rng = np.random.default_rng(0)
    corpus = Corpus.of([rng.integers(0, A, T)], A)
    model = start("pcnn", "tanh", Graph.full(N), corpus, rng)
    code_length(model, corpus)
    tracemalloc.start()
    code_length(model, corpus)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * T * (N + 1 + 8)


def test_a_training_of_no_pass_takes_neither_states_nor_predictions_of_its_text():
    """`fit --passes 0` is for large logs, whose contexts alone are wanted."""
    N, A, T = 8, 50, 100_000
    rng = np.random.default_rng(0)
    corpus = Corpus.of([rng.integers(0, A, T)], A)
    training = Training.begin(start("pcnn", "tanh", Graph.full(N), corpus, rng))
    train(training, corpus, Settings(passes=0))
    tracemalloc.start()
    train(training, corpus, Settings(passes=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * T


@pytest.mark.parametrize("line", [b"10:22 GET /index.html 200\n", "10:22 GET /käse.html 200\n"])
def test_a_text_is_laid_out_in_the_memory_that_mixing_has_for_it(line):
    """16 bytes a symbol, docs/sequences.md says, and a mark."""
    text = line * 40_000
    alphabet = Alphabet.of([text])
    tracemalloc.start()
    fold = fold_of(alphabet, text, 0.1, None, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert alphabet.decode(fold.corpus.x[: len(line)]) == line
    assert peak < 20 * len(text)
