"""Generative models of symbol sequences: PCNN, CNN and RNN trained in invariant metrics.

Needs the extra: ``pip install pathspace[sequences]``.
"""

from .compression import CorruptedError, compress, decompress
from .estimators import CNN, PCNN, RNN, load, merge
from .sequence_model import NotFittedError, SequenceModel
from .storage import ModelFileError
from .text import UnseenSymbolError
from .training import Training

__all__ = [
    "CNN",
    "PCNN",
    "RNN",
    "CorruptedError",
    "ModelFileError",
    "NotFittedError",
    "SequenceModel",
    "Training",
    "UnseenSymbolError",
    "compress",
    "decompress",
    "load",
    "merge",
]
