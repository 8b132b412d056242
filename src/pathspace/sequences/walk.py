"""Walking through a text symbol by symbol: prediction and sampling.

Alphabet of this module: A symbols, N units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .kernels import walk
from .kernels.elementary import squash
from .parameters import Parameters
from .text import IntArray

Array = NDArray[np.float64]


class Walk:
    """A model at some place of a text.

    Args:
        model: the parameters.

    Example:
        >>> from pathspace.sequences import PCNN
        >>> place = Walk(PCNN(units=3, passes=4).fit("abab").parameters_)
        >>> round(float(place.read_all([0, 1]).predict().sum()), 9)
        1.0
    """

    def __init__(self, model: Parameters) -> None:
        self._tau, self._w = np.ascontiguousarray(model.contextual_tau()), model.w
        self._first, self._sources = model.graph.first, model.graph.sources
        self._persistent, self._logistic = model.kind == "pcnn", model.squash == "logistic"
        self._V, self._a = model.V0.copy(), np.empty(model.units + 1)
        self._pi = np.empty(model.symbols)
        squash(self._V, self._logistic, self._a)

    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""
        walk.predict(self._a, self._w, self._pi)
        return self._pi.copy()

    def read(self, y: int) -> None:
        """Read the symbol number y."""
        walk.read(
            y, self._tau, self._first, self._sources, self._persistent, self._logistic, self._V, self._a
        )

    def read_all(self, x: Iterable[int]) -> Walk:
        """Read several symbols and return the walk itself."""
        for y in x:
            self.read(int(y))
        return self


class Place(Protocol):
    """A model at some place of a text."""

    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""
        ...

    def read(self, y: int) -> None:
        """Read the symbol number y."""
        ...


def sample(
    place: Place, length: int, rng: np.random.Generator, prompt: IntArray, temperature: float = 1.0
) -> IntArray:
    """Return ``length`` symbols drawn from a model after it has read a prompt.

    Args:
        place: the model before a text; it reads the prompt and what is drawn.
        length: how many symbols.
        rng: source of randomness.
        prompt: symbols to read first; they are not part of the result.
        temperature: probabilities are taken to the power 1/temperature; 1 is the model itself.

    Raises:
        ValueError: if the length is negative or the temperature not positive.
    """
    if length < 0:
        raise ValueError(f"the length must be at least 0, got {length}")
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, got {temperature}")
    for y in prompt:
        place.read(int(y))
    drawn = np.empty(length, dtype=np.int64)
    for t in range(length):
        p = place.predict()
        if temperature != 1.0:
            p = (p / p.max()) ** (1 / temperature)
        drawn[t] = min(int(np.searchsorted(np.cumsum(p), rng.random() * p.sum(), side="right")), len(p) - 1)
        place.read(int(drawn[t]))
    return drawn
