"""A file compressed without a model: contexts that know nothing at its beginning learn it while they code it.

    byte 0-1   magic and version              byte 2-5   CRC-32 of the original
    byte 6-7   CRC-16 of all else in the file
    then       the number of bytes as a varint
               which of the 256 bytes occur, as varints: how many in a row do not, how many do, ...
               the code of the arithmetic coder, without trailing zeros; of one byte alone
               there is none

The magic of version 2 stands for nine contexts and for all 256 bytes, which it does not list.

It is unpacked by the same version on the same kind of machine, as files of a model are, and refused
if it comes out otherwise.
"""

from __future__ import annotations

import zlib
from binascii import crc_hqx

import numpy as np

from pathspace.sequences.byte_reader import ByteReader, CorruptedError, varint
from pathspace.sequences.decisions import part_by_bits, tree, tree_of
from pathspace.sequences.mixing import Reading, blank, blank_before
from pathspace.sequences.text import Alphabet, IntArray
from pathspace.sequences.walk import Progress

_MAGIC = b"\xb5\x04"
_MAGIC_BEFORE = b"\xb5\x02"
MAGICS = (_MAGIC, _MAGIC_BEFORE)
_CHECKED = 8


def _nothing_learned(length: int, present: IntArray) -> Reading:
    """Return contexts before a text of so many of these bytes."""
    alphabet = Alphabet(bytes(present.tolist()))
    decisions = tree_of(part_by_bits(present), alphabet)
    return Reading(None, decisions, blank(decisions, length))


def _nothing_learned_before(length: int) -> Reading:
    """Return the nine contexts of version 2 before a text of so many bytes."""
    decisions = tree(np.zeros(256, np.int64), Alphabet(bytes(range(256))))
    return Reading(None, decisions, blank_before(decisions, length))


def _runs(present: IntArray) -> bytes:
    """Return which bytes occur."""
    occurs = np.zeros(256, bool)
    occurs[present] = True
    changes = np.flatnonzero(np.diff(occurs, prepend=False, append=not occurs[-1]))
    lengths = np.diff(changes, prepend=0)
    return b"".join(varint(int(length)) for length in lengths)


def _read_runs(reader: ByteReader) -> IntArray:
    """Return the bytes that occur."""
    occurs = np.zeros(256, bool)
    at = 0
    is_present = False
    while at < 256:
        length = reader.varint()
        occurs[at : at + length] = is_present
        at = at + length
        is_present = not is_present
    if at > 256 or not occurs.any():
        raise CorruptedError("the compressed file does not say which bytes occur in it")
    return np.flatnonzero(occurs)


def pack(data: bytes, progress: Progress | None = None) -> bytes:
    """Return the bytes of a file without a model."""
    symbols = np.frombuffer(data, np.uint8)
    present: IntArray = np.unique(symbols).astype(np.int64)
    body = varint(len(data))
    if len(data):
        body += _runs(present)
    if len(present) > 1:
        x = np.searchsorted(present, symbols)
        body += _nothing_learned(len(x), present).encode(x, progress)
    front = _MAGIC + zlib.crc32(data).to_bytes(4, "little")
    return front + crc_hqx(front + body, 0).to_bytes(2, "little") + body


def unpack(content: bytes, progress: Progress | None, max_bytes: int) -> bytes:
    """Return what was packed; raises what `decompress` does."""
    front = content[:6]
    body = content[_CHECKED:]
    if (
        len(content) <= _CHECKED
        or crc_hqx(front + body, 0).to_bytes(2, "little") != content[6:_CHECKED]
    ):
        raise CorruptedError(
            "the compressed file is damaged: its checksum does not fit. Take another copy of it"
        )
    reader = ByteReader(content, _CHECKED)
    length = reader.varint()
    check_size(length, max_bytes)
    if content[:2] == _MAGIC_BEFORE:
        data = _decoded(_nothing_learned_before(length), length, reader, progress).tobytes()
    else:
        data = _unpacked(length, reader, progress)
    if zlib.crc32(data).to_bytes(4, "little") != content[2:6]:
        raise CorruptedError(
            "the bytes do not fit their checksum: unpack the file with the version and on the kind of processor that "
            "compressed it"
        )
    return data


def _unpacked(length: int, reader: ByteReader, progress: Progress | None) -> bytes:
    """Return what the rest of a file stands for."""
    if length == 0:
        return b""
    present = _read_runs(reader).astype(np.uint8)
    if len(present) == 1:
        return present.tobytes() * length
    reading = _nothing_learned(length, present.astype(np.int64))
    return present[_decoded(reading, length, reader, progress)].tobytes()


def _decoded(
    reading: Reading, length: int, reader: ByteReader, progress: Progress | None
) -> np.ndarray:
    """Return the numbers of the symbols that have this code."""
    x = np.zeros(length, np.uint8)
    reading.decode(reader.rest(), x, progress)
    return x


def check_size(size: int, max_bytes: int) -> None:
    """Refuse a file that claims to be longer than is allowed; raises ValueError."""
    if size > max_bytes:
        raise ValueError(
            f"the compressed file claims to be {size} bytes or more, more than the {max_bytes} that are allowed: if "
            "you trust it, allow more by max_bytes (--max-bytes)"
        )
