"""General compressors of the standard library."""

from __future__ import annotations

import bz2
import contextlib
import importlib
import lzma
from collections.abc import Callable


def _xz(content: bytes) -> bytes:
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"bzip2": bz2.compress, "xz": _xz}
"""Compressors by name; zstd is among them where the standard library has it (from Python 3.14 on)."""

with contextlib.suppress(ModuleNotFoundError):
    _zstd = importlib.import_module("compression.zstd")
    COMPRESSORS["zstd"] = lambda content: _zstd.compress(content, 19)


def compressed_bits(name: str, text: bytes, seen: bytes = b"") -> int:
    """Return the bits a text takes after ``seen``: the compressed size of both minus that of the first.

    Args:
        name: "bzip2", "xz", or "zstd" where there is one.
        text: what is scored.
        seen: what came before; empty for the plain compressed size.

    Raises:
        ValueError: if the compressor is unknown.
    """
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}, choose from {sorted(COMPRESSORS)}")
    compress = COMPRESSORS[name]
    before = len(compress(seen)) if seen else 0
    return 8 * (len(compress(seen + text)) - before)
