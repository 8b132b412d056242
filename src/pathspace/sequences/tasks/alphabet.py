"""Alphabet task: nested insertions into the alphabet.

A line is a..z; after each letter, z too, with probability 1/26 the block "(0..9)"; inside it after
each digit, 9 too, with probability 1/5 "[" nine random capitals "]".

O13 says "after each digit", and its example line in section 4 has capitals after the 9. Its
validation text has 88,482 true bits, where such a text has 97,942 with a standard deviation of
3,477. Without capitals after the 9 it has 88,760: that is the task "alphabet-9".
"""

from __future__ import annotations

import math
import re
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from pathspace.sequences.tasks.text_error import ImpossibleTextError

_BLOCK = 1 / 26
_CAPITALS = 1 / 5
_LENGTH = 9
_LAST = digits[-1]


def _capitals(rng: np.random.Generator) -> str:
    return "[" + "".join(ascii_uppercase[k] for k in rng.integers(0, 26, _LENGTH)) + "]"


def _block(rng: np.random.Generator, *, after_last: bool) -> str:
    parts = []
    for digit in digits:
        may_follow = after_last or digit != _LAST
        parts.append(digit + (_capitals(rng) if may_follow and rng.random() < _CAPITALS else ""))
    return f"({''.join(parts)})"


def generate(rng: np.random.Generator, lines: int = 1000, *, after_last: bool = True) -> str:
    """Return a text of so many lines.

    Args:
        rng: source of randomness.
        lines: how many.
        after_last: whether capitals may follow the digit 9, as the paper says.
    """
    written = []
    for _ in range(lines):
        for letter in ascii_lowercase:
            written.append(letter)
            if rng.random() < _BLOCK:
                written.append(_block(rng, after_last=after_last))
        written.append("\n")
    return "".join(written)


_INSERTION = r"(?:\[[A-Z]{9}\])?"
_LINE = re.compile("".join(rf"{letter}(\([^)]*\))?" for letter in ascii_lowercase) + "\n")
_DIGITS = re.compile(r"\(" + "".join(rf"{digit}({_INSERTION})" for digit in digits) + r"\)")


def true_bits(text: str, *, after_last: bool = True) -> float:
    """Return the code length of a text under the generator, its number of lines being known.

    Args:
        text: whole lines.
        after_last: whether capitals may follow the digit 9, as the paper says.

    Raises:
        ImpossibleTextError: if the generator cannot make the text.
    """
    bits = 0.0
    place = 0
    while place < len(text):
        line = _LINE.match(text, place)
        if line is None:
            raise ImpossibleTextError(
                f"not a line of the alphabet task: {text[place : place + 40]!r}..."
            )
        for block in line.groups():
            bits -= math.log2(1 - _BLOCK) if block is None else math.log2(_BLOCK)
            if block is not None:
                bits += _block_bits(block, after_last=after_last)
        place = line.end()
    return bits


def _block_bits(block: str, *, after_last: bool) -> float:
    inside = _DIGITS.fullmatch(block)
    if inside is None or (inside[len(digits)] and not after_last):
        raise ImpossibleTextError(f"not a block of the alphabet task: {block!r}")
    bits = 0.0
    for capitals in inside.groups() if after_last else inside.groups()[:-1]:
        bits -= math.log2(_CAPITALS / 26**_LENGTH) if capitals else math.log2(1 - _CAPITALS)
    return bits
