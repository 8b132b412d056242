"""Growing parts of a text: on a short one, which doubles, a network makes many more passes in the same time.

Alphabet of this module: T symbols of the text, k doublings from a part to the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from pathspace.sequences.text import Corpus

SHORTEST = 1 << 14
"""Symbols of the first part, at least: a text of less than twice as many has no parts."""
DOUBLINGS = 6
"""At most: the first part is no shorter than T / 2^6."""
WORK = 2
"""What a part costs, in passes over the whole text."""


def growing_parts(corpus: Corpus) -> Iterator[tuple[Corpus, int]]:
    """Yield the parts, the shortest first, each with the number of passes since the beginning at which it ends.

    The part T / 2^k has WORK 2^k passes, so that all of them cost the same. A part in which nothing
    is to be predicted is left out.
    """
    T = len(corpus.x)
    end = 0
    for k in range(DOUBLINGS, 0, -1):
        if T >> k >= SHORTEST and corpus.chi[: T >> k].any():
            end += WORK << k
            yield corpus.beginning(T >> k), end
