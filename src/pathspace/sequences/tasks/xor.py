"""Distant XOR task: remember two marked bits over a long line of noise.

A line has T' random bits, T' uniform in [T, 1.1 T], each after a blank, two of them after "X"
instead, at positions in [0, T'/10) and [T'/10, T'/2); then "=", the XOR of the marked bits, and a
newline. Only the bit after "=" is to be predicted.
"""

from __future__ import annotations

import math
import re

import numpy as np

from pathspace.sequences.tasks.text_error import ImpossibleTextError
from pathspace.sequences.text import marks_after


def generate(rng: np.random.Generator, lines: int = 10_000, T: int = 100) -> str:
    """Return a text of so many lines of about T bits.

    Raises:
        ValueError: if T is below 10, where the first mark has no room.
    """
    if T < 10:
        raise ValueError(f"T must be at least 10, got {T}")
    text = []
    for _ in range(lines):
        length = int(rng.integers(T, T + T // 10 + 1))
        bits = rng.integers(0, 2, length)
        # positions p with p < length/10, and with length/10 <= p < length/2
        first = int(rng.integers(0, -(-length // 10)))
        second = int(rng.integers(-(-length // 10), -(-length // 2)))
        marks = [" "] * length
        marks[first] = marks[second] = "X"
        line = "".join(mark + str(bit) for mark, bit in zip(marks, bits, strict=True))
        text.append(f"{line}={bits[first] ^ bits[second]}\n")
    return "".join(text)


_LINE = re.compile(r"((?:[ X][01])+)=([01])\n")


def true_bits(text: str) -> float:
    """Return the code length of the predicted bits: 0, as each follows from its line.

    Raises:
        ImpossibleTextError: if the generator cannot make the text.
    """
    place = 0
    while place < len(text):
        line = _LINE.match(text, place)
        if line is None:
            raise ImpossibleTextError(
                f"not a line of the xor task: {text[place : place + 40]!r}..."
            )
        marks = line[1][::2]
        bits = line[1][1::2]
        marked = [k for k, mark in enumerate(marks) if mark == "X"]
        half = len(marks) / 2
        tenth = len(marks) / 10
        if len(marked) != 2 or not (marked[0] < tenth <= marked[1] < half):
            raise ImpossibleTextError(f"the marks stand at {marked} of {len(marks)} bits")
        if int(bits[marked[0]]) ^ int(bits[marked[1]]) != int(line[2]):
            raise ImpossibleTextError(f"the bit after '=' is not the XOR in {line[0]!r}")
        place = line.end()
    return 0.0


def mask(text: str) -> np.ndarray:
    """Return, for each symbol, whether it is to be predicted: it follows "="."""
    return marks_after(text, "=")


def error_rate(probabilities: np.ndarray, symbols: np.ndarray) -> float:
    """Return the share of lines whose more probable bit is wrong.

    Args:
        probabilities: (P, 2) probabilities of "0" and "1" after each "=".
        symbols: (P,) the bits, 0 or 1.
    """
    if not len(symbols):
        return math.nan
    return float(np.mean(probabilities.argmax(axis=1) != symbols))
