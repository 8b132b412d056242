"""Code lengths of texts under a model.

Alphabet of this module: A symbols, P predicted positions, t position from 0, which goes on from
text to text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels import output
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.passes import activities, predicting
from pathspace.sequences.text import Corpus
from pathspace.sequences.walk import mix_with_uniform


def code_lengths(
    model: Parameters, corpus: Corpus, buffers: Buffers | None = None
) -> NDArray[np.float64]:
    """Return the bits of each predicted symbol, which `code_length` adds up."""
    a = predicting(activities(model, corpus, buffers), corpus)
    seen = np.exp(output.log_seen(a, model.w, corpus.expected))
    return -np.log2(mix_with_uniform(seen, corpus.positions, corpus.A))


def code_length(model: Parameters, corpus: Corpus, buffers: Buffers | None = None) -> float:
    """Return the length in bits of the predicted symbols of a corpus, mixed with the uniform distribution.

    bits = - sum_t chi_t log2( (1 - 1/(t+2)) pi_t(x_t) + 1/((t+2) A) )

    The paper counts t from 0 in its one text. Here it goes on from each text to the next: begun
    anew, a text of L symbols would cost log2(L + 1) bits more, and short texts would be nothing but
    that.

    Args:
        model: the parameters.
        corpus: the text.
        buffers: memory to use.
    """
    return float(code_lengths(model, corpus, buffers).sum())
