"""Memory that grows with T (N + A)."""

import tracemalloc

import numpy as np

from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import start
from pathspace.sequences.text import Corpus
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
