"""Generative models of symbol sequences: PCNN, CNN and RNN trained in invariant metrics, alone or mixed with contexts.

Needs the extra ``sequences``: ``pip install -e '.[sequences]'`` in a clone of pathspace.
"""

from pathspace.extras import missing_package

try:
    from .byte_reader import CorruptedError
    from .compression import compress, decompress
    from .estimators import CNN, PCNN, RNN, load, merge
    from .mixed import Mixed
    from .records import Records
    from .sequence_model import NotFittedError, SequenceModel
    from .storage import ModelFileError
    from .stream import Stream
    from .text import UnseenSymbolError
    from .training import Training
except ModuleNotFoundError as error:
    raise missing_package(__name__, error, "sequences") from error

__all__ = [
    "CNN",
    "PCNN",
    "RNN",
    "CorruptedError",
    "Mixed",
    "ModelFileError",
    "NotFittedError",
    "Records",
    "SequenceModel",
    "Stream",
    "Training",
    "UnseenSymbolError",
    "compress",
    "decompress",
    "load",
    "merge",
]
