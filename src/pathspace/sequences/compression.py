"""A compressor: the model's predictions and an arithmetic coder.

    byte 0-1   magic and version              byte 2     fingerprint of the model
    byte 3-4   CRC-16 of the original         byte 5-6   CRC-16 of all else in the file
    then       twice the number of symbols, plus one if some are foreign, as a varint
               foreign symbols, if any: size as a varint, then places and values, deflated
               the code words of the range coder, without trailing zeros

A foreign symbol is one that the alphabet of the model lacks. It is stored as it is and not read by the model, so
that any file survives the round trip. The coder mixes the predictions with the uniform distribution as the code
length of the model does. Encoder and decoder compute every probability with the same instructions; a file must be
unpacked by the same version on the same kind of processor, and is refused, not misread, if it is not.
"""

from __future__ import annotations

import zlib
from binascii import crc_hqx
from collections.abc import Callable, Iterator
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from .evaluation import mix_with_uniform
from .sequence_model import SequenceModel
from .text import Alphabet, IntArray, Text
from .walk import Walk

_stream: Any = constriction.stream  # pyright: ignore[reportAttributeAccessIssue] - a compiled submodule

_MAGIC = b"\xb5\x01"
_CHECKED = 7
_BLOCK = 1024

Progress = Callable[[int, int], None]


class CorruptedError(ValueError):
    """A compressed file is damaged, or does not belong to the model."""


def _fingerprint(model: SequenceModel) -> bytes:
    parameters = model.parameters_
    check = 0
    for array in (parameters.w, parameters.contextual_tau(), parameters.V0, parameters.graph.sources):
        check = zlib.crc32(np.ascontiguousarray(array).tobytes(), check)
    return bytes([check & 0xFF])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _Reader:
    """The bytes of a file, from front to back."""

    def __init__(self, content: bytes, place: int) -> None:
        self._content, self._place = content, place

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            if self._place >= len(self._content) or shift > 63:
                raise CorruptedError("the compressed file ends too early")
            byte = self._content[self._place]
            self._place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def take(self, size: int) -> bytes:
        taken = self._content[self._place : self._place + size]
        if len(taken) < size:
            raise CorruptedError("the compressed file ends too early")
        self._place += size
        return taken

    def rest(self) -> bytes:
        return self._content[self._place :]


def _text(alphabet: Alphabet, data: bytes) -> Text:
    if isinstance(alphabet.symbols, bytes):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the model reads characters, but the data is not UTF-8: {error}") from error


def _pack_foreign(text: Text, known: NDArray[np.bool_]) -> bytes:
    places = np.flatnonzero(~known)
    packed = bytearray()
    for gap, place in zip(np.diff(places, prepend=-1), places, strict=True):
        symbol = text[place]
        packed += _varint(int(gap)) + _varint(ord(symbol) if isinstance(symbol, str) else symbol)
    return zlib.compress(bytes(packed), 9)


def _unpack_foreign(packed: bytes) -> Iterator[tuple[int, int]]:
    try:
        content = zlib.decompress(packed)
    except zlib.error as error:
        raise CorruptedError("the foreign symbols are damaged") from error
    reader, place = _Reader(content, 0), -1
    while reader.rest():
        place += reader.varint()
        yield place, reader.varint()


def _family() -> Any:
    # imperfect: fast, and the same on both sides; off by less than 2^-23 per symbol
    return _stream.model.Categorical(perfect=False)


def _encode(model: SequenceModel, x: IntArray, progress: Progress | None) -> bytes:
    encoder, family, place = _stream.queue.RangeEncoder(), _family(), Walk(model.parameters_)
    A = len(model.alphabet_)
    for begin in range(0, len(x), _BLOCK):
        block = x[begin : begin + _BLOCK]
        p = np.empty((len(block), A))
        for k, y in enumerate(block):
            p[k] = mix_with_uniform(place.predict(), begin + k, A)
            place.read(int(y))
        encoder.encode(block.astype(np.int32), family, p)
        if progress is not None:
            progress(begin + len(block), len(x))
    return encoder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")


def _decode(model: SequenceModel, code: bytes, length: int, progress: Progress | None) -> IntArray:
    words = np.frombuffer(code + b"\0" * (-len(code) % 4), "<u4").astype(np.uint32)
    decoder, family, place = _stream.queue.RangeDecoder(words), _family(), Walk(model.parameters_)
    A = len(model.alphabet_)
    x = np.empty(length, dtype=np.int64)
    for t in range(length):
        p = np.asarray(mix_with_uniform(place.predict(), t, A))
        x[t] = decoder.decode(family, p[None])[0]
        place.read(int(x[t]))
        if progress is not None and ((t + 1) % _BLOCK == 0 or t + 1 == length):
            progress(t + 1, length)
    return x


def compress(model: SequenceModel, data: bytes, progress: Progress | None = None) -> bytes:
    """Return data compressed by a fitted model.

    Without foreign symbols the size is at most 16 bytes and 0.1 % more than ``model.bits`` of the data.

    Args:
        model: fitted on bytes, or on characters if the data is UTF-8 text.
        data: what to compress.
        progress: called with the symbols done and their number.

    Raises:
        ValueError: if the model reads characters and the data is not UTF-8.

    Example:
        >>> from pathspace.sequences import PCNN
        >>> model = PCNN(units=3, passes=4).fit(b"abab")
        >>> decompress(model, compress(model, b"abbx"))
        b'abbx'
    """
    text = _text(model.alphabet_, data)
    known = model.alphabet_.known(text)
    head = _varint(2 * len(text) + (not known.all()))
    if not known.all():
        foreign = _pack_foreign(text, known)
        head += _varint(len(foreign)) + foreign
        kept = [symbol for symbol, is_known in zip(text, known, strict=True) if is_known]
        text = "".join(map(str, kept)) if isinstance(text, str) else bytes(map(int, kept))
    # one symbol of the alphabet alone carries no information, and no coder can code it
    code = b"" if len(model.alphabet_) == 1 else _encode(model, model.alphabet_.encode(text), progress)
    front = _MAGIC + _fingerprint(model) + crc_hqx(data, 0).to_bytes(2, "little")
    return front + crc_hqx(front + head + code, 0).to_bytes(2, "little") + head + code


def decompress(model: SequenceModel, content: bytes, progress: Progress | None = None) -> bytes:
    """Return what was compressed.

    Args:
        model: the one that compressed it.
        content: what `compress` returned.
        progress: called with the symbols done and their number.

    Raises:
        CorruptedError: if the content is damaged, no compressed file, or made with another model.
    """
    if len(content) < _CHECKED or content[:2] != _MAGIC:
        raise CorruptedError("this is not a file made by `pathspace sequence compress`")
    front, check, body = content[:5], content[5:7], content[_CHECKED:]
    if crc_hqx(front + body, 0).to_bytes(2, "little") != check:
        raise CorruptedError("the compressed file is damaged: its checksum does not fit")
    if content[2:3] != _fingerprint(model):
        raise CorruptedError("the file was compressed with another model")
    reader = _Reader(content, _CHECKED)
    size = reader.varint()
    length = size // 2
    foreign = dict(_unpack_foreign(reader.take(reader.varint()))) if size % 2 else {}
    inside = length - len(foreign)
    if inside < 0 or any(place >= length for place in foreign):
        raise CorruptedError("the foreign symbols do not fit into the text")
    one = len(model.alphabet_) == 1
    x = np.zeros(inside, np.int64) if one else _decode(model, reader.rest(), inside, progress)
    data = _join(model.alphabet_, x, foreign, length)
    if crc_hqx(data, 0).to_bytes(2, "little") != content[3:5]:
        raise CorruptedError(
            "the text does not fit its checksum: another model, version or kind of processor"
        )
    return data


def _join(alphabet: Alphabet, x: IntArray, foreign: dict[int, int], length: int) -> bytes:
    text = alphabet.decode(x)
    if not foreign:
        return text.encode("utf-8") if isinstance(text, str) else text
    if isinstance(text, str):
        characters = iter(text)
        return "".join(chr(foreign[k]) if k in foreign else next(characters) for k in range(length)).encode()
    values = iter(text)
    return bytes(foreign[k] if k in foreign else next(values) for k in range(length))
