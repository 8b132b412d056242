"""Reading packed files without believing what they claim: no more bytes than a data set can have.

A byte of a deflated file can stand for 1,032 bytes, so that a file of one megabyte can fill a
gigabyte.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from pathlib import Path

MOST = 1 << 28  # bytes; the largest data set that the tasks know, CIFAR-10 or -100, has 154 million
_BLOCK = 1 << 17

# What the standard library raises at files that are cut off, damaged or packed in ways it does not
# know.
UNREADABLE = (
    OSError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
)


class OversizeError(OSError):
    """A file is larger, unpacked, than any data set it could be."""


def gunzip(content: bytes, most: int = MOST) -> bytes:
    """Return what a gzip file holds.

    Raises:
        OversizeError: It is more than `most` bytes.
        EOFError, OSError, zlib.error: It is no gzip file, cut off or damaged.
    """
    unpacked = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while block := file.read(_BLOCK):
            unpacked += block
            if len(unpacked) > most:
                raise OversizeError(f"it is larger than {most} bytes unpacked")
    return bytes(unpacked)


def check_zip(path: Path, most: int = MOST) -> None:
    """Raise an `OversizeError` if the files in a zip archive claim more bytes than `most`; they cannot have more.

    Raises:
        OSError, zipfile.BadZipFile: It cannot be read or is no such archive.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > most:
            raise OversizeError(f"it is larger than {most} bytes unpacked")


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
