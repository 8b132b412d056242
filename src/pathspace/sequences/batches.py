"""Batches of texts: each is stepped on in turn, as in a stochastic gradient.

Alphabet of this module: S texts of the corpus, b of them in a batch.
"""

from __future__ import annotations

import numpy as np

from pathspace.sequences.text import Corpus


class Batches:
    """The texts in batches, dealt anew for each round through all of them.

    A batch serves one writing and one transition step. The order depends on the pass alone, so that
    a training that was stopped goes on with the same batches. Texts of which nothing is predicted
    are left out.

    Args:
        corpus: all texts.
        size: b; None for all texts in every pass.
    """

    def __init__(self, corpus: Corpus, size: int | None) -> None:
        self._corpus = corpus
        self._size = size
        predicted = np.logical_or.reduceat(corpus.chi, corpus.bounds[:-1])
        self._texts = np.flatnonzero(predicted)
        self._number = -1
        self._batch = corpus

    @property
    def are_whole(self) -> bool:
        """True if each batch has all texts."""
        return self._size is None or self._size >= len(self._texts)

    def at(self, passes: int) -> Corpus:
        """Return the batch of the pass that follows so many others; the same object while it is the same batch."""
        if self._size is None or self.are_whole:
            return self._corpus
        number = passes // 2
        if number != self._number:
            a_round = -(-len(self._texts) // self._size)
            order = np.random.default_rng(number // a_round).permutation(self._texts)
            begin = number % a_round * self._size
            self._number, self._batch = (
                number,
                self._corpus.batch(order[begin : begin + self._size]),
            )
        return self._batch
