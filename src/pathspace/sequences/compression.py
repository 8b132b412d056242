"""A compressor: the model's predictions and an arithmetic coder.

    byte 0-1   magic and version              byte 2     fingerprint of the model
    byte 3-4   CRC-16 of the original         byte 5-6   CRC-16 of all else in the file
    then       twice the number of symbols, plus one if some are foreign, as a varint
               foreign symbols, if any: size as a varint, then places and values, deflated
               the code of the arithmetic coder, without trailing zeros

A foreign symbol is one that the alphabet of the model lacks. It is stored as it is and not read by
the model, so that any file survives the round trip. A `Mixed` model goes on learning in both
directions; of the others the predictions are mixed with the uniform distribution as in the code
length of the model. Encoder and decoder compute every probability with the same instructions; a
file must be unpacked by the same version on the same kind of processor, and is refused, not
misread, if it is not.
"""

from __future__ import annotations

import zlib
from binascii import crc_hqx
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences import alone, records
from pathspace.sequences.byte_reader import ByteReader, CorruptedError
from pathspace.sequences.byte_reader import varint as _varint
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.text import Alphabet, IntArray, Text, codes_of
from pathspace.sequences.tokens import TokenAlphabet
from pathspace.sequences.walk import Progress

_MAGIC = b"\xb5\x01"
_CHECKED = 7
_INFLATED = 1 << 17
_LONGEST = 9  # bytes of a varint below 2^63

MAX_BYTES = 1 << 26


def _fingerprint(model: SequenceModel | Mixed) -> bytes:
    check = 0
    arrays = []
    network = model.model if isinstance(model, Mixed) else model
    if isinstance(model, Mixed):
        reading = model.reading_
        arrays = [reading.memory.history[: reading.memory.place[0]], *reading.weights.values()]
    if network is not None:
        parameters = network.parameters_
        arrays += [
            parameters.w,
            parameters.contextual_tau(),
            parameters.V0,
            parameters.graph.sources,
        ]
    for array in arrays:
        check = zlib.crc32(np.ascontiguousarray(array).tobytes(), check)
    return bytes([check & 0xFF])


def _bytes(data: Any, command: str, instead: str) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"{command} takes bytes, got {type(data).__name__}: {instead}")
    return bytes(data)


def _text(alphabet: Alphabet, data: bytes) -> Text:
    _check_characters(alphabet)
    if isinstance(alphabet.symbols, bytes):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the model reads characters, but the data is not UTF-8: {error}"
        ) from error


def _check_characters(alphabet: Alphabet) -> None:
    if isinstance(alphabet, TokenAlphabet):
        raise ValueError(
            "files are compressed by models of bytes or characters, and this one reads tokens: fit another one without "
            "tokens (--tokens bytes)"
        )


def _pack_foreign(text: Text, known: NDArray[np.bool_]) -> bytes:
    places = np.flatnonzero(~known)
    packed = bytearray()
    for gap, code in zip(np.diff(places, prepend=-1), codes_of(text)[places], strict=True):
        packed += _varint(int(gap)) + _varint(int(code))
    return zlib.compress(bytes(packed), 9)


def _unpack_foreign(packed: bytes, symbols: NDArray[Any], most: int) -> NDArray[np.bool_]:
    """Put the foreign symbols, all at most ``most``, into their places and return which those are."""
    is_foreign = np.zeros(len(symbols), bool)
    inflater = zlib.decompressobj()
    place = -1
    rest = b""
    while not inflater.eof:
        try:
            block = inflater.decompress(packed, _INFLATED)
        except zlib.error as error:
            raise CorruptedError("the foreign symbols are damaged") from error
        packed = inflater.unconsumed_tail
        numbers, rest = _varints(rest + block)
        gaps = numbers[::2]
        codes = numbers[1::2]
        ended = not block and not packed and not inflater.eof
        if ended or (gaps < 1).any() or (gaps > len(symbols)).any() or (codes > most).any():
            raise CorruptedError("the foreign symbols are damaged or do not fit into the text")
        places = place + np.cumsum(gaps)
        if len(places) and (place := int(places[-1])) >= len(symbols):
            raise CorruptedError("the foreign symbols do not fit into the text")
        symbols[places] = codes
        is_foreign[places] = True
    if rest:
        raise CorruptedError("the foreign symbols are damaged: they end too early")
    return is_foreign


def _varints(content: bytes) -> tuple[IntArray, bytes]:
    """Return an even number of varints and the bytes after them."""
    values = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(values < 0x80)
    ends = ends[: len(ends) // 2 * 2]
    used = int(ends[-1]) + 1 if len(ends) else 0
    first = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    sizes = ends - first + 1
    if sizes.max(initial=0) > _LONGEST or len(content) - used > 2 * _LONGEST:
        raise CorruptedError("the foreign symbols are damaged: a number is too long")
    if not used:
        return np.empty(0, np.int64), content
    shifts = 7 * (np.arange(used) - np.repeat(first, sizes))
    return np.add.reduceat((values[:used] & 0x7F).astype(np.int64) << shifts, first), content[used:]


def compress(
    model: SequenceModel | Mixed | None,
    data: bytes,
    progress: Progress | None = None,
    *,
    by_record: bool = False,
) -> bytes:
    """Return data compressed by a fitted model, or by none.

    Without foreign symbols the size is at most 16 bytes and 0.1 % more than ``model.bits`` of the
    data.

    Args:
        model: fitted on bytes, or on characters if the data is UTF-8 text. None: contexts that
            learn the data while they code it, and what comes out needs no model.
        data: what to compress.
        progress: called with the symbols done and their number.
        by_record: compress each line by itself, see `Records`.

    Raises:
        NotFittedError: if the model has not been fitted.
        TypeError: if the data are not bytes.
        ValueError: if the model reads characters and the data is not UTF-8, or there is none for
            records.

    Example:
        >>> len(compress(None, b"she sells sea shells " * 99)) < 60
        True
        >>> from pathspace.sequences import PCNN
        >>> model = PCNN(units=3, passes=4).fit(b"abab")
        >>> decompress(model, compress(model, b"abbx"))
        b'abbx'
    """
    data = _bytes(data, "compress", "of a str, give text.encode()")
    if model is None:
        if by_record:
            raise ValueError("records are compressed by a model that they share: give one")
        return alone.pack(data, progress)
    fingerprint = _fingerprint(model)
    if by_record:
        return records.pack_lines(model, fingerprint, data, progress)
    text = _text(model.alphabet_, data)
    x, known = model.alphabet_.numbers(text)
    head = _varint(2 * len(text) + (not known.all()))
    if not known.all():
        foreign = _pack_foreign(text, known)
        head += _varint(len(foreign)) + foreign
        x = x[known]
    # one symbol of the alphabet alone carries no information
    code = b"" if len(model.alphabet_) == 1 else model.begin(len(x)).encode(x, progress)
    front = _MAGIC + fingerprint + crc_hqx(data, 0).to_bytes(2, "little")
    return front + crc_hqx(front + head + code, 0).to_bytes(2, "little") + head + code


def decompress(
    model: SequenceModel | Mixed | None,
    content: bytes,
    progress: Progress | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """Return what was compressed.

    Args:
        model: the one that compressed it, or None.
        content: what `compress` returned.
        progress: called with the symbols done and their number.
        max_bytes: most that it may become: a few bytes can claim to be any number of likely
            symbols. Memory and time are in proportion to what is claimed below that.

    Raises:
        CorruptedError: if the content is damaged, no compressed file, or made with another model.
        TypeError: if it is not bytes.
        ValueError: if it claims to be longer than ``max_bytes``, or is of another kind: with a
            model, or without one.
    """
    content = _bytes(content, "decompress", "give what compress has returned")
    kind = content[:2]
    if len(content) < _CHECKED or kind not in (_MAGIC, *alone.MAGICS, records.MAGIC):
        raise CorruptedError("this is not a file made by `pathspace sequence compress`")
    if (model is None) != (kind in alone.MAGICS):
        if model is None:
            raise ValueError(
                "the file was compressed with a model: give that model, too, as in `pathspace sequence decompress "
                "MODEL FILE`"
            )
        raise ValueError("the file was compressed without a model: give the file alone")
    if model is None:
        return alone.unpack(content, progress, max_bytes)
    _check_characters(model.alphabet_)
    if kind == records.MAGIC:
        return records.unpack_lines(model, _fingerprint(model), content, progress, max_bytes)
    return _unpack_text(model, content, progress, max_bytes)


def _unpack_text(
    model: SequenceModel | Mixed, content: bytes, progress: Progress | None, max_bytes: int
) -> bytes:
    """Return a text that was compressed with a model."""
    front = content[:5]
    check = content[5:7]
    body = content[_CHECKED:]
    if crc_hqx(front + body, 0).to_bytes(2, "little") != check:
        raise CorruptedError("the compressed file is damaged: its checksum does not fit")
    if content[2:3] != _fingerprint(model):
        raise CorruptedError("the file was compressed with another model")
    reader = ByteReader(content, _CHECKED)
    size = reader.varint()
    length = size // 2
    alone.check_size(length, max_bytes)
    is_text = isinstance(model.alphabet_.symbols, str)
    symbols = np.empty(length, np.uint32 if is_text else np.uint8)
    is_foreign = np.zeros(length, bool)
    if size % 2:
        largest = 0x10FFFF if is_text else 0xFF
        is_foreign = _unpack_foreign(reader.take(reader.varint()), symbols, largest)
        if is_text and _has_halves(symbols[is_foreign]):
            raise CorruptedError("the foreign symbols are damaged: not all are characters")
    x = np.zeros(length - int(is_foreign.sum()), symbols.dtype)
    if len(model.alphabet_) > 1:
        model.begin(0).decode(reader.rest(), x, progress)
    symbols[~is_foreign] = model.alphabet_.codes.astype(symbols.dtype)[x]
    data = _in_utf_8(symbols, max_bytes) if is_text else symbols.tobytes()
    if crc_hqx(data, 0).to_bytes(2, "little") != content[3:5]:
        raise CorruptedError(
            "the text does not fit its checksum: another model, version or kind of processor"
        )
    return data


def _in_utf_8(symbols: Any, max_bytes: int) -> bytes:
    """Return the bytes of characters, given by their code points, if they are few enough."""
    if _has_halves(symbols):
        raise CorruptedError(
            "the compressed file is damaged: not all of its symbols are characters"
        )
    more = sum(int((symbols >= first).sum()) for first in (0x80, 0x800, 0x10000))
    alone.check_size(len(symbols) + more, max_bytes)
    return symbols.astype("<u4").tobytes().decode("utf-32-le").encode()


def _has_halves(symbols: Any) -> bool:
    """Return whether there are halves of surrogate pairs, which an alphabet may have, and UTF-8 has not."""
    return bool((symbols - np.uint32(0xD800) < 0x800).any())
