"""Generative models of symbol sequences: PCNN, CNN and RNN trained in invariant metrics, alone or mixed with contexts.

Needs the extra ``sequences``: ``pip install -e '.[sequences]'`` in a clone of pathspace.
"""

from pathspace.extras import missing_package

try:
    from pathspace.sequences.byte_reader import CorruptedError
    from pathspace.sequences.compression import compress, decompress
    from pathspace.sequences.estimators import CNN, PCNN, RNN, load, merge
    from pathspace.sequences.mixed import Mixed
    from pathspace.sequences.records import Records
    from pathspace.sequences.sequence_model import NotFittedError, SequenceModel
    from pathspace.sequences.storage import ModelFileError
    from pathspace.sequences.stream import Stream
    from pathspace.sequences.text import UnseenSymbolError
    from pathspace.sequences.training import Training
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
