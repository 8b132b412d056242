"""anbn task: blocks a^n newline b^n newline, n uniform in [1024, 2048]."""

from __future__ import annotations

import math
import re

import numpy as np

from pathspace.sequences.tasks.text_error import ImpossibleTextError

_LOW = 1024
_HIGH = 2048


def generate(rng: np.random.Generator, blocks: int = 10) -> str:
    """Return a text of so many blocks."""
    return "".join(
        "a" * n + "\n" + "b" * n + "\n" for n in rng.integers(_LOW, _HIGH, blocks, endpoint=True)
    )


_BLOCK = re.compile(r"(a+)\n(b+)\n")


def true_bits(text: str) -> float:
    """Return the code length of a text under the generator, its number of blocks being known.

    Raises:
        ImpossibleTextError: if the generator cannot make the text.
    """
    bits = 0.0
    place = 0
    while place < len(text):
        block = _BLOCK.match(text, place)
        if block is None:
            raise ImpossibleTextError(
                f"not a block of the anbn task: {text[place : place + 40]!r}..."
            )
        a = len(block[1])
        b = len(block[2])
        if a != b or not _LOW <= a <= _HIGH:
            raise ImpossibleTextError(f"a block of {a} a and {b} b")
        bits += math.log2(_HIGH - _LOW + 1)
        place = block.end()
    return bits
