"""Records compressed one by one by a shared model, each of which can be unpacked without the others.

    a record   byte 0: twice seven bits of its CRC-16, plus one if some of its symbols are foreign
               foreign symbols, if any: their number, then place and value of each, as varints
               the code of its symbols and of a newline, without trailing zeros
    a file     byte 0-1 magic and version, byte 2 fingerprint of the model, byte 3-6 CRC-32 of all that follows, byte 7:
               1 if its last record ends with a newline; then each record after its size as a varint

The newline ends a record, and is no part of it. The model learns nothing from records.
"""

from __future__ import annotations

import zlib
from binascii import crc_hqx
from typing import Any

import numpy as np

from pathspace.sequences.byte_reader import ByteReader, CorruptedError, varint
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.text import Text, codes_of
from pathspace.sequences.tokens import TokenAlphabet
from pathspace.sequences.walk import Progress

MAGIC = b"\xb5\x03"
_FRONT = 8
_LONGEST = 1 << 16
"""Symbols of a record at most."""
_NEWLINE = ord("\n")


class Records:
    r"""A compressor of short records, such as lines of a log, that have a fitted model in common.

    Each record takes at most 3 bytes more than its code length, without its size. A mixture neither
    learns from records nor copies its tables for them.

    Args:
        model: fitted to bytes or characters with newlines among them.

    Raises:
        NotFittedError: if the model has not been fitted.
        ValueError: if it does not know the newline, or reads tokens.

    Example:
        >>> from pathspace.sequences import Mixed
        >>> records = Records(Mixed().fit(b"GET /a 200\nGET /b 404\n" * 9))
        >>> packed = records.pack(b"GET /b 200")
        >>> len(packed) < 6, records.unpack(packed)
        (True, b'GET /b 200')
    """

    def __init__(self, model: SequenceModel | Mixed) -> None:
        self._place = model.frozen()
        alphabet = model.alphabet_
        if isinstance(alphabet, TokenAlphabet):
            raise ValueError(
                "records are compressed by models of bytes or characters, and this one reads tokens"
            )
        newline = np.flatnonzero(alphabet.codes == _NEWLINE)
        if not len(newline):
            raise ValueError(
                "the model does not know the newline, which ends a record: fit it to several lines"
            )
        self._alphabet = alphabet
        self._newline = int(newline[0])

    @property
    def _is_text(self) -> bool:
        return isinstance(self._alphabet.symbols, str)

    def pack(self, record: bytes) -> bytes:
        """Return a record compressed.

        Raises:
            TypeError: if it is not bytes.
            ValueError: if it holds a newline, is too long, or is not UTF-8 where the model reads
                characters.
        """
        if not isinstance(record, bytes | bytearray | memoryview):
            raise TypeError(
                f"a record is bytes, got {type(record).__name__}: of a str, give text.encode()"
            )
        record = bytes(record)
        if b"\n" in record:
            raise ValueError("a record holds a newline, which ends it: give each line by itself")
        text: Text = record.decode("utf-8") if self._is_text else record
        if len(text) >= _LONGEST:
            raise ValueError(
                f"a record has {len(text)} symbols, and at most {_LONGEST - 1} are allowed"
            )
        x, known = self._alphabet.numbers(text)
        foreign = b"" if known.all() else _foreign(text, known)
        self._place.restart()
        code = self._place.encode(np.append(x[known], self._newline))
        return bytes([_check(record) << 1 | bool(foreign)]) + foreign + code

    def unpack(self, packed: bytes) -> bytes:
        """Return a record.

        Raises:
            CorruptedError: if it is damaged, or packed by another model.
        """
        reader = ByteReader(bytes(packed))
        first = reader.take(1)[0]
        places, codes = _read_foreign(reader) if first & 1 else ([], [])
        self._place.restart()
        try:
            x = self._place.decode_until(reader.rest(), self._newline, _LONGEST)[:-1]
            record = self._joined(x, places, codes)
        except ValueError as error:
            raise CorruptedError(f"the record is damaged, or of another model: {error}") from error
        if _check(record) != first >> 1:
            raise CorruptedError(
                "the record does not fit its checksum: it is damaged, or of another model"
            )
        return record

    def _joined(self, x: Any, places: list[int], codes: list[int]) -> bytes:
        """Return the record with these symbols, the foreign ones put into their places."""
        values = self._alphabet.codes[x].tolist()
        for place, code in zip(places, codes, strict=True):
            if place > len(values):
                raise ValueError("a foreign symbol lies behind its end")
            values.insert(place, code)
        return "".join(map(chr, values)).encode() if self._is_text else bytes(values)


def _check(record: bytes) -> int:
    return crc_hqx(record, 0) & 0x7F


def _foreign(text: Text, known: np.ndarray) -> bytes:
    places = np.flatnonzero(~known)
    packed = varint(len(places))
    for place, code in zip(places, codes_of(text)[places], strict=True):
        packed += varint(int(place)) + varint(int(code))
    return packed


def _read_foreign(reader: ByteReader) -> tuple[list[int], list[int]]:
    pairs = [(reader.varint(), reader.varint()) for _ in range(min(reader.varint(), _LONGEST))]
    return [place for place, _ in pairs], [code for _, code in pairs]


def pack_lines(
    model: SequenceModel | Mixed, fingerprint: bytes, data: bytes, progress: Progress | None = None
) -> bytes:
    """Return the file of the lines of some data, each a record."""
    records = Records(model)
    ends = data.endswith(b"\n")
    lines = data.split(b"\n")[: -1 if ends or not data else None]
    body = bytearray([ends])
    done = 0
    for number, line in enumerate(lines):
        done += len(line) + 1
        packed = records.pack(line)
        body += varint(len(packed)) + packed
        if progress is not None and number % 100 == 0:
            progress(done, len(data) + 1)
    return MAGIC + fingerprint + zlib.crc32(bytes(body)).to_bytes(4, "little") + bytes(body)


def unpack_lines(
    model: SequenceModel | Mixed,
    fingerprint: bytes,
    content: bytes,
    progress: Progress | None,
    max_bytes: int,
) -> bytes:
    """Return the lines of a file; raises what `decompress` does."""
    body = content[_FRONT - 1 :]
    if not body or zlib.crc32(body).to_bytes(4, "little") != content[3 : _FRONT - 1]:
        raise CorruptedError(
            "the compressed file is damaged: its checksum does not fit. Take another copy of it"
        )
    if content[2:3] != fingerprint:
        raise CorruptedError("the file was compressed with another model")
    records = Records(model)
    reader = ByteReader(body, 1)
    lines = []
    size = 0
    while not reader.is_at_end:
        lines.append(records.unpack(reader.take(reader.varint())))
        size += len(lines[-1]) + 1
        if size - 1 > max_bytes:
            raise ValueError(
                f"the records are longer than the {max_bytes} bytes that are allowed: if you trust the file, allow "
                "more by max_bytes (--max-bytes)"
            )
        if progress is not None and len(lines) % 100 == 0:
            progress(reader.place, len(body))
    return b"\n".join(lines) + (b"\n" if body[0] and lines else b"")
