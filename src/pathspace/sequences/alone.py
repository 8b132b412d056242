"""A file compressed without a model: contexts that know nothing at its beginning learn it while they code it.

    byte 0-1   magic and version              byte 2-5   CRC-32 of the original
    byte 6-7   CRC-16 of all else in the file
    then       the number of bytes as a varint, and the code of the arithmetic coder, without trailing zeros

It is unpacked by the same version on the same kind of machine, as files of a model are, and refused if it comes out
otherwise.
"""

from __future__ import annotations

import zlib
from binascii import crc_hqx

import numpy as np

from .byte_reader import ByteReader, CorruptedError, varint
from .decisions import tree
from .mixing import Reading, blank
from .text import Alphabet, IntArray
from .walk import Progress

MAGIC = b"\xb5\x02"
_CHECKED = 8


def _nothing_learned(length: int) -> Reading:
    """Return contexts before a text of so many bytes."""
    decisions = tree(np.zeros(256, np.int64), Alphabet(bytes(range(256))))
    return Reading(None, decisions, blank(decisions, length))


def pack(data: bytes, progress: Progress | None = None) -> bytes:
    """Return the bytes of a file without a model."""
    x: IntArray = np.frombuffer(data, np.uint8).astype(np.int64)
    code = _nothing_learned(len(x)).encode(x, progress)
    body = varint(len(data)) + code
    front = MAGIC + zlib.crc32(data).to_bytes(4, "little")
    return front + crc_hqx(front + body, 0).to_bytes(2, "little") + body


def unpack(content: bytes, progress: Progress | None, max_bytes: int) -> bytes:
    """Return what was packed; raises what `decompress` does."""
    front, body = content[:6], content[_CHECKED:]
    if len(content) <= _CHECKED or crc_hqx(front + body, 0).to_bytes(2, "little") != content[6:_CHECKED]:
        raise CorruptedError(
            "the compressed file is damaged: its checksum does not fit. Take another copy of it"
        )
    reader = ByteReader(content, _CHECKED)
    length = reader.varint()
    check_size(length, max_bytes)
    x = np.zeros(length, np.uint8)
    _nothing_learned(length).decode(reader.rest(), x, progress)
    data = x.tobytes()
    if zlib.crc32(data).to_bytes(4, "little") != content[2:6]:
        raise CorruptedError(
            "the bytes do not fit their checksum: unpack the file with the version and on the kind of processor that "
            "compressed it"
        )
    return data


def check_size(size: int, max_bytes: int) -> None:
    """Refuse a file that claims to be longer than is allowed; raises ValueError."""
    if size > max_bytes:
        raise ValueError(
            f"the compressed file claims to be {size} bytes or more, more than the {max_bytes} that are allowed: if "
            "you trust it, allow more by max_bytes (--max-bytes)"
        )
