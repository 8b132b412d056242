"""A model at some place of a text: prediction, sampling, and the arithmetic coder.

Alphabet of this module: A symbols, N units.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.decisions import Tree, tree
from pathspace.sequences.kernels import coding, walk
from pathspace.sequences.kernels.coding import DECODE, ENCODE, NOWHERE, Coder, Network
from pathspace.sequences.kernels.elementary import squash
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.text import IntArray

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]

_BLOCK = 1 << 13


def network(model: Parameters | None, A: int) -> Network:
    """Return the network before a text, or, of None, one without units, which says nothing."""
    pi = np.full(A, 1 / A)
    mass = np.zeros(max(A - 1, 1))
    if model is None:
        none = np.zeros((1, 1))
        nobody = np.zeros(1, np.int64)
        return Network(
            none, none, nobody, nobody, np.zeros(2, bool), np.zeros(1), np.ones(1), pi, mass
        )
    a = np.empty(model.units + 1)
    logistic = model.squash == "logistic"
    squash(model.V0, logistic, a)
    return Network(
        np.ascontiguousarray(model.contextual_tau()),
        model.w,
        model.graph.first,
        model.graph.sources,
        np.array([model.kind == "pcnn", logistic]),
        model.V0.copy(),
        a,
        pi,
        mass,
    )


def coder(code: bytes | None = None, room: int = 0) -> Coder:
    """Return a coder before the first digit: of a code that is to be read, or with room for one to be written."""
    content = np.zeros(room, np.uint8) if code is None else np.frombuffer(bytearray(code), np.uint8)
    first = np.concatenate([content[:7], np.zeros(7, np.uint8)])[:7]
    at = 0 if code is None else 7
    return Coder(
        np.array([0, (1 << 56) - 1, int.from_bytes(first.tobytes(), "big")], np.int64),
        np.array([at]),
        content,
    )


def blocks(length: int, progress: Progress | None = None) -> Iterator[slice]:
    """Yield the blocks in which a kernel reads so many symbols, and say after each how many are done."""
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        yield slice(begin, end)
        if progress is not None:
            progress(end, length)


class Place(ABC):
    """A model at some place of a text: it predicts, reads and codes what comes next."""

    tree: Tree

    @abstractmethod
    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""

    @abstractmethod
    def read(self, y: int) -> None:
        """Read the symbol number y."""

    @abstractmethod
    def read_all(self, x: Iterable[int]) -> Self:
        """Read several symbols and return the place after them."""

    @abstractmethod
    def restart(self) -> None:
        """Begin a new text, with all that has been learned."""

    @abstractmethod
    def push(self, y: int) -> float:
        """Read the symbol number y and return its bits."""

    @abstractmethod
    def lengths(self, x: IntArray) -> Array:
        """Read symbols and return the bits of each."""

    @abstractmethod
    def _code(self, mode: int, x: IntArray, coder: Coder) -> None:
        """Read a block of symbols: ENCODE writes their code, DECODE reads it and writes x."""

    @abstractmethod
    def _decode_until(self, stop: int, x: IntArray, coder: Coder) -> int:
        """Read the symbols of a code into a block, up to one after which it stops, and return how many there were."""

    def encode(self, x: IntArray, progress: Progress | None = None) -> bytes:
        """Read symbols and return their code."""
        code = coder(room=8 * int(self.tree.depth[x].sum()))
        for part in blocks(len(x), progress):
            self._code(ENCODE, x[part].astype(np.int64), code)
        low = int(code.interval[0])
        last = int(code.interval[1])
        # the number in the interval with the most zeros at its end, which need not be written
        for zeros in range(8, 64, 8):
            rounded = last >> zeros << zeros
            if rounded < low:
                break
            last = rounded
        return (code.content[: code.at[0]].tobytes() + last.to_bytes(7, "big")).rstrip(b"\0")

    def decode_until(self, code: bytes, stop: int, most: int) -> IntArray:
        """Read the symbols that have this code up to one after which it stops, and return them with it.

        Raises:
            ValueError: if it has not come after so many symbols.
        """
        read = coder(code)
        parts = []
        length = 0
        while length < most:
            block = np.zeros(min(256, most - length), np.int64)
            done = self._decode_until(stop, block, read)
            parts.append(block[:done])
            length += done
            if block[done - 1] == stop:
                return np.concatenate(parts)
        raise ValueError(f"the code has no end within {most} symbols")

    def decode(self, code: bytes, x: NDArray[Any], progress: Progress | None = None) -> None:
        """Read the symbols that have this code, and write them to x."""
        read = coder(code)
        for part in blocks(len(x), progress):
            block = np.zeros(len(x[part]), np.int64)
            self._code(DECODE, block, read)
            x[part] = block


class Walk(Place):
    """A network at some place of a text.

    Args:
        model: the parameters.
        t: symbols scored before, by which the uniform part of the predictions shrinks.
        frozen: whether every text begins with as many.

    Example:
        >>> from pathspace.sequences import PCNN
        >>> place = Walk(PCNN(units=3, passes=4).fit("abab").parameters_)
        >>> round(float(place.read_all([0, 1]).predict().sum()), 9)
        1.0
    """

    def __init__(self, model: Parameters, t: int = 0, *, frozen: bool = False) -> None:
        self._model = model
        self._t = t
        self._first = t if frozen else None
        self._net = network(model, model.symbols)

    @cached_property
    def tree(self) -> Tree:  # pyright: ignore[reportIncompatibleVariableOverride] - made where something is coded
        """The decisions: the alphabet halved again and again."""
        return tree(np.zeros(len(self._net.pi), np.int64))

    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""
        walk.predict(self._net.a, self._net.w, self._net.pi)
        return self._net.pi.copy()

    def read(self, y: int) -> None:
        """Read the symbol number y."""
        net = self._net
        walk.read(y, net.tau, net.first, net.sources, net.kind[0], net.kind[1], net.V, net.a)
        self._t += 1

    def read_all(self, x: Iterable[int]) -> Self:
        """Read several symbols and return the walk itself."""
        for y in x:
            self.read(int(y))
        return self

    def restart(self) -> None:
        """Begin a new text; the uniform part of the predictions goes on to shrink unless frozen."""
        self._t = self._t if self._first is None else self._first
        self._net.V[:] = self._model.V0
        squash(self._model.V0, self._model.squash == "logistic", self._net.a)

    def lengths(self, x: IntArray) -> Array:
        """Read symbols and return the bits of each, by predictions mixed with the uniform one."""
        return np.array([self.push(int(y)) for y in x])

    def push(self, y: int) -> float:
        """Read the symbol number y and return its bits, by predictions mixed with the uniform one."""
        net = self._net
        walk.predict(net.a, net.w, net.pi)
        bits = -math.log2(mix_with_uniform(float(net.pi[y]), self._t, len(net.pi)))
        self.read(y)
        return bits

    def _code(self, mode: int, x: IntArray, coder: Coder) -> None:
        coding.run(mode, x, self._t, self.tree, self._net, coder, NOWHERE)
        self._t += len(x)

    def _decode_until(self, stop: int, x: IntArray, coder: Coder) -> int:
        done = coding.run(DECODE, x, self._t, self.tree, self._net, coder, stop)
        self._t += done
        return done


def mix_with_uniform(p: Any, t: Any, A: int) -> Any:
    """Return (1 - 1/(t+2)) p + 1/((t+2) A), which keeps every code length finite.

    Args:
        p: probabilities of symbols at the times t.
        t: how many symbols the model has been scored on before.
        A: number of symbols.

    Example:
        >>> mix_with_uniform(0.0, 0, 4)
        0.125
    """
    share = 1 / (t + 2)
    return (1 - share) * p + share / A


def sample(
    place: Place,
    length: int,
    rng: np.random.Generator,
    prompt: IntArray,
    temperature: float = 1.0,
    end: int | None = None,
) -> IntArray:
    """Return ``length`` symbols drawn from a model after it has read a prompt, or those before the first end.

    Args:
        place: the model before a text; it reads the prompt and what is drawn.
        length: how many symbols.
        rng: source of randomness.
        prompt: symbols to read first; they are not part of the result.
        temperature: probabilities are taken to the power 1/temperature; 1 is the model itself.
        end: the symbol before which the sample ends, or None.

    Raises:
        ValueError: if the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, got {temperature}")
    place.read_all(prompt)
    drawn = np.empty(length, dtype=np.int64)
    for t in range(length):
        p = place.predict()
        if temperature != 1.0:
            p = (p / p.max()) ** (1 / temperature)
        drawn[t] = min(
            int(np.searchsorted(np.cumsum(p), rng.random() * p.sum(), side="right")), len(p) - 1
        )
        if drawn[t] == end:
            return drawn[:t]
        place.read(int(drawn[t]))
    return drawn
