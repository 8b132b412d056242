"""The idx format of the MNIST files: a big-endian header, then raw bytes, all of it gzipped."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks.packed import UNREADABLE, gunzip

UNSIGNED_BYTE = 0x08  # the only type of number that MNIST uses
MOST_DIMENSIONS = 3


def read_idx(path: Path) -> Tensor:
    """Read one `.gz` file in idx format.

    Args:
        path: The file; its header names the number of dimensions and their sizes.

    Returns:
        A uint8 tensor of the shape that the header names.

    Raises:
        ConfigurationError: The file is missing or broken: it says which file and why.
    """
    try:
        content = gunzip(path.read_bytes())
    except UNREADABLE as error:
        raise ConfigurationError(f"Cannot read {str(path)!r} ({error}): download the file again.") from error
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> Tensor:
    def broken(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{str(path)!r} is no idx file ({reason}): download the file again.")

    # Header: two zero bytes, the type, the number of dimensions, then one unsigned 32-bit size per dimension.
    if len(content) < 4 or content[:2] != b"\0\0":
        raise broken("it does not begin with two zero bytes")
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTE:
        raise broken(f"numbers of type 0x{kind:02x} instead of 0x{UNSIGNED_BYTE:02x}, unsigned bytes")
    if dimensions > MOST_DIMENSIONS:
        raise broken(f"{dimensions} dimensions")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise broken("its header is cut off")
    sizes = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        raise broken(f"{len(content) - start} bytes of data where its header promises {math.prod(sizes)}")
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(sizes)
