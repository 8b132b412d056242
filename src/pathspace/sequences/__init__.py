"""Generative models of symbol sequences: PCNN, CNN and RNN trained in invariant metrics.

Needs the extra: ``pip install pathspace[sequences]``.
"""

from .estimators import CNN, PCNN, RNN, NotFittedError, SequenceModel, load, merge
from .storage import ModelFileError
from .text import UnseenSymbolError
from .training import Training

__all__ = [
    "CNN",
    "PCNN",
    "RNN",
    "ModelFileError",
    "NotFittedError",
    "SequenceModel",
    "Training",
    "UnseenSymbolError",
    "load",
    "merge",
]
