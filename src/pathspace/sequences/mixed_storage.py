"""Mixed models in safetensors files: the network, the weights of the mixers, and the text instead of its contexts.

tensors   network.* as in `storage` if there is a network; history: the numbers of the symbols of the training text,
          little-endian in 1, 2 or 4 bytes each, packed by LZMA; bounds; the weights of
          the mixers
metadata  "pathspace.sequences.mixed": JSON with the version, the alphabet, the description of the network, whether
          it is silent, the code lengths, the size of the history and of what was learned first, the generation of the
          contexts (1 without it) and a checksum of all that and of the tensors

The table of the contexts would take tens of megabytes; reading the text again brings it back in a
second or two for each million symbols. What keeps a context keeps the text anyway.
"""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from pathspace.sequences import storage
from pathspace.sequences.mixing import BEFORE, NOW, shapes_of
from pathspace.sequences.storage import Stored
from pathspace.sequences.text import Alphabet, IntArray
from pathspace.sequences.tokens import alphabet_from, described

KEY = "pathspace.sequences.mixed"

_NETWORK = "network."
"""Before the names of the network's tensors."""
_SMALLEST = 1 << 12
_WINDOW = 1 << 23
"""Bytes that LZMA looks back, at least and at most."""
_OVERHEAD = 1 << 18
"""Bytes that unpacking takes beside the window; liblzma 5.2 to 5.8 take a quarter of it."""


@dataclass(frozen=True, eq=False)
class StoredMixture:
    """Content of the file of a mixed model.

    Args:
        network: the network, or None.
        alphabet: the symbols.
        history: (T,) the training text.
        bounds: (S+1,) where each of its texts begins, and T.
        weights: the weights of the mixers by name.
        bits: code lengths of training and validation text.
        silent: whether the network has no say.
        generation: of the contexts.
        first: symbols of the first text, by which decisions and tables were made.
    """

    network: Stored | None
    alphabet: Alphabet
    history: IntArray
    bounds: IntArray
    weights: dict[str, NDArray[np.float64]]
    bits: tuple[float, float | None]
    silent: bool = False
    generation: int = NOW
    first: int = 0


def _width(A: int) -> str:
    """Return the narrowest type that numbers the symbols."""
    if A <= 1 << 8:
        return "<u1"
    return "<u2" if A <= 1 << 16 else "<u4"


def _window(size: int) -> int:
    return min(max(size, _SMALLEST), _WINDOW)


def _kept_window(size: int) -> int:
    """Return the bytes of the window that xz keeps where `size` were asked for: the next of 2^n and 3 * 2^(n-1)."""
    power = _SMALLEST
    while power < size:
        if 3 * power // 2 >= size:
            return 3 * power // 2
        power *= 2
    return power


def _pack(x: IntArray, A: int) -> np.ndarray:
    """Return the numbers of symbols as an LZMA stream."""
    return np.frombuffer(_compress(x.astype(_width(A)).tobytes()), np.uint8)


def _compress(content: bytes) -> bytes:
    """Return an LZMA stream, whose window is hardly larger than the content."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": _window(len(content))}]
    return lzma.compress(content, lzma.FORMAT_XZ, filters=filters)


def _narrow(weights: NDArray[np.float64]) -> np.ndarray:
    """Return weights in float32 where that changes none, which only an older file's does."""
    narrow = weights.astype(np.float32)
    return narrow if np.array_equal(narrow, weights) else weights


def dump(stored: StoredMixture) -> bytes:
    """Return the bytes of a model file."""
    network = None
    tensors = {}
    if stored.network is not None:
        network, tensors = storage.parts(stored.network)
    tensors = {f"{_NETWORK}{name}": array for name, array in tensors.items()}
    tensors |= {
        "history": _pack(stored.history, len(stored.alphabet)),
        "bounds": stored.bounds,
        **{name: _narrow(array) for name, array in stored.weights.items()},
    }
    description: dict[str, Any] = {
        "version": storage.VERSION,
        "alphabet": described(stored.alphabet),
        "end": stored.alphabet.end,
        "symbols": len(stored.history),
        "bits": stored.bits,
        "network": network,
        "silent": stored.silent,
        "generation": stored.generation,
        "first": stored.first,
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    description["checksum"] = storage.checksum(description, tensors)
    return save(tensors, {KEY: json.dumps(description)})


def load(path: Path) -> Stored | StoredMixture:
    """Return what a model file holds, of a mixture without its contexts.

    Raises:
        OSError: if it cannot be read.
        ModelFileError: if it is no model file, of a later version, or damaged.
    """
    return _of_contents(path, storage.contents(path))


def check_content(content: bytes) -> None:
    """Raise ModelFileError if the bytes are not those of a model file that can be read."""
    _of_contents("the model", storage.contents_of(content))


def _of_contents(
    path: str | Path, contents: tuple[dict[str, str], dict[str, np.ndarray]]
) -> Stored | StoredMixture:
    metadata, tensors = contents
    if KEY in metadata:
        return read(path, metadata, tensors)
    return storage.read(path, metadata, tensors)


def read(path: Any, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> StoredMixture:
    """Return what a model file holds, of its `storage.contents`.

    Raises:
        ModelFileError: if it is of a later version, or damaged.
    """
    return storage.checked(path, metadata[KEY], tensors, _build)


def _build(description: dict[str, Any], tensors: dict[str, np.ndarray]) -> StoredMixture:
    alphabet = alphabet_from(description["alphabet"], description.get("end"))
    network = _network(description["network"], tensors)
    if network is not None and network.alphabet != alphabet:
        raise ValueError("the network has another alphabet")
    A = len(alphabet)
    T = description["symbols"]
    if type(T) is not int or T < 1:
        raise ValueError(f"the text has {T!r} symbols")
    history = _unpack(tensors["history"], T, np.dtype(_width(A)))
    if history.max() >= A:
        raise ValueError("a symbol of the text is not in the alphabet")
    bounds = tensors["bounds"]
    _check_bounds(bounds, T)
    first = description.get("first", T)
    if type(first) is not int or not 1 <= first <= T:
        raise ValueError(f"the first text has {first!r} symbols")
    generation = description.get("generation", BEFORE)
    weights = _weights(tensors, generation, A)
    bits = _bits(description["bits"])
    silent = description.get("silent", False)
    if not isinstance(silent, bool):
        raise ValueError(f"the network is silent: {silent!r}")
    return StoredMixture(
        network, alphabet, history, bounds, weights, bits, silent, generation, first
    )


def _network(description: Any, tensors: dict[str, np.ndarray]) -> Stored | None:
    """Return the network of a mixture; None for contexts alone."""
    if description is None:
        return None
    own = {
        name.removeprefix(_NETWORK): array
        for name, array in tensors.items()
        if name.startswith(_NETWORK)
    }
    return storage.build(description, own)


def _check_bounds(bounds: np.ndarray, T: int) -> None:
    """Raise ValueError unless the bounds are those of texts of T symbols together."""
    if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError("there are no bounds of the texts")
    if bounds[0] != 0 or bounds[-1] != T or (np.diff(bounds) < 1).any():
        raise ValueError("the bounds of the texts do not fit")


def _bits(told: Any) -> tuple[float, float | None]:
    """Return the code lengths of training and validation text; raises ValueError if one is not finite."""
    bits, held = told
    is_finite = isinstance(bits, float) and math.isfinite(bits)
    if not is_finite or not (held is None or math.isfinite(held)):
        raise ValueError("the code lengths are not finite")
    return bits, held


def _weights(
    tensors: dict[str, np.ndarray], generation: Any, A: int
) -> dict[str, NDArray[np.float64]]:
    """Return the weights of the mixers; raises ValueError if they do not fit the contexts."""
    if generation not in (BEFORE, NOW):
        raise ValueError(f"the contexts are of generation {generation!r}")
    shapes = shapes_of(generation, A)
    weights = {name: tensors[name].astype(np.float64) for name in shapes}
    for name, shape in shapes.items():
        array = weights[name]
        is_float = tensors[name].dtype in (np.float32, np.float64)
        if array.shape != shape or not is_float or not np.isfinite(array).all():
            raise ValueError(f"the weights {name!r} are not {shape} finite numbers")
    return weights


def _unpack(packed: np.ndarray, T: int, width: np.dtype) -> IntArray:
    """Return the T numbers of an LZMA stream."""
    content = _decompress(packed.astype(np.uint8).tobytes(), T * width.itemsize)
    return np.frombuffer(content, width).astype(np.int64)


def _decompress(packed: bytes, size: int) -> bytes:
    """Return the content of an LZMA stream; no stream takes more memory than content of this size needs.

    Raises:
        ValueError: if the content has another size.
        LZMAError: if it is no such stream, or asks for more memory.
    """
    memory = _kept_window(_window(size)) + _OVERHEAD
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=memory)
    content = unpacker.decompress(packed, size + 1)
    if len(content) != size or not unpacker.eof:
        raise ValueError(f"the text has not {size} bytes")
    return content
