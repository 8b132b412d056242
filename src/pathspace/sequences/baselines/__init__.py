"""Baselines of the models: general compressors, context tree weighting, hidden Markov models.

Every baseline answers the same question as the models: how many bits does a text take after another
has been seen?
"""

from pathspace.sequences.baselines.compressors import COMPRESSORS, compressed_bits
from pathspace.sequences.baselines.context_tree import context_tree_bits
from pathspace.sequences.baselines.hidden_markov import HiddenMarkov
from pathspace.sequences.baselines.sparse_hidden_markov import SparseHiddenMarkov

__all__ = [
    "COMPRESSORS",
    "HiddenMarkov",
    "SparseHiddenMarkov",
    "compressed_bits",
    "context_tree_bits",
]
