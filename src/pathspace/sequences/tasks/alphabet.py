"""Alphabet task: nested insertions into the alphabet.

A line is a..z; after each letter, z too, with probability 1/26 the block "(0..9)"; inside it after each digit,
9 too, with probability 1/5 "[" nine random capitals "]".
"""

from __future__ import annotations

import math
import re
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from .text_error import ImpossibleTextError

_BLOCK, _CAPITALS, _LENGTH = 1 / 26, 1 / 5, 9


def _capitals(rng: np.random.Generator) -> str:
    return "[" + "".join(ascii_uppercase[k] for k in rng.integers(0, 26, _LENGTH)) + "]"


def _block(rng: np.random.Generator) -> str:
    return (
        "(" + "".join(digit + (_capitals(rng) if rng.random() < _CAPITALS else "") for digit in digits) + ")"
    )


def generate(rng: np.random.Generator, lines: int = 1000) -> str:
    """Return a text of so many lines."""
    return "".join(
        "".join(letter + (_block(rng) if rng.random() < _BLOCK else "") for letter in ascii_lowercase) + "\n"
        for _ in range(lines)
    )


_INSERTION = r"(?:\[[A-Z]{9}\])?"
_LINE = re.compile("".join(rf"{letter}(\([^)]*\))?" for letter in ascii_lowercase) + "\n")
_DIGITS = re.compile(r"\(" + "".join(rf"{digit}({_INSERTION})" for digit in digits) + r"\)")


def true_bits(text: str) -> float:
    """Return the code length of a text under the generator, its number of lines being known.

    Raises:
        ImpossibleTextError: if the generator cannot make the text.
    """
    bits, place = 0.0, 0
    while place < len(text):
        line = _LINE.match(text, place)
        if line is None:
            raise ImpossibleTextError(f"not a line of the alphabet task: {text[place : place + 40]!r}...")
        for block in line.groups():
            if block is None:
                bits -= math.log2(1 - _BLOCK)
                continue
            inside = _DIGITS.fullmatch(block)
            if inside is None:
                raise ImpossibleTextError(f"not a block of the alphabet task: {block!r}")
            bits -= math.log2(_BLOCK)
            for capitals in inside.groups():
                bits -= math.log2(_CAPITALS / 26**_LENGTH) if capitals else math.log2(1 - _CAPITALS)
        place = line.end()
    return bits
