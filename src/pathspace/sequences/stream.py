"""A model that reads symbols as they come, and says what each has cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pathspace.sequences.text import Alphabet
from pathspace.sequences.walk import Place


class Stream:
    """A fitted model in the midst of a sequence that goes on; `model.stream()` makes one.

    A mixture learns what it reads, unless it is frozen, and the model itself stays as it is.

    Args:
        place: where the model is.
        alphabet: of the model.

    Attributes:
        symbols: how many have been pushed.

    Example:
        >>> from pathspace.sequences import Mixed
        >>> stream = Mixed().fit("she sells sea shells " * 9).stream()
        >>> bits = [stream.push(symbol) for symbol in "she sells s"]
        >>> bits[-1] < 1, stream.predict()["e"] > 0.5
        (True, True)
    """

    def __init__(self, place: Place, alphabet: Alphabet) -> None:
        self._place = place
        self._alphabet = alphabet
        self._numbers: dict[Any, int] = {symbol: y for y, symbol in enumerate(alphabet.symbols)}
        if isinstance(alphabet.symbols, bytes):
            self._numbers |= {bytes([symbol]): y for y, symbol in enumerate(alphabet.symbols)}
        self.symbols = 0

    def predict(self) -> dict[Any, float]:
        """Return the probability of each symbol to be the next."""
        p = self._place.predict().tolist()
        return dict(zip(self._alphabet.symbols, p, strict=True))

    def push(self, symbol: Any) -> float:
        """Read a symbol and return its bits; one that the model does not know costs its escape and is passed over.

        Args:
            symbol: a character, a byte (as a number, or bytes), or a token.
        """
        self.symbols += 1
        y = self._numbers.get(symbol)
        if y is None:
            return math.log2(self.symbols + 1) + self._alphabet.spelled(symbol)
        return self._place.push(y)

    def end(self) -> None:
        """End this sequence: what comes next begins a new one, with all that has been learned."""
        self._place.restart()


def bits_of_each(place: Place, alphabet: Alphabet, text: Any) -> np.ndarray:
    """Return the bits of each symbol of a text that a place reads, which passes over those that it does not know."""
    x, known = alphabet.numbers(text)
    bits = np.zeros(len(x))
    bits[known] = place.lengths(x[known])
    bits[~known] = alphabet.escapes(text, known)
    return bits
