"""A network and contexts at some place of a text: memories made, filled, copied, and driven through texts.

Alphabet of this module: A symbols, T symbols of a text, N units, K contexts, M mixers, J inputs of
each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.decisions import Tree
from pathspace.sequences.kernels import mixing, mixing_3
from pathspace.sequences.kernels.coding import DECODE, FROZEN, NOWHERE, READ, SCORE, Coder
from pathspace.sequences.kernels.contexts import BEGIN, PLACES, STATES, T
from pathspace.sequences.kernels.mixing import Memory
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.text import Corpus, IntArray
from pathspace.sequences.walk import Place, Progress, blocks, coder, network

Array = NDArray[np.float64]

_nowhere = coder()
_SPARE = 1 << 10  # symbols
_CELLS = 16
"""Of a table for each symbol, at least: one number in four bytes."""
_FEWEST, _MOST = 21, 25  # bits of their number: 8 to 128 MiB
_FEWEST_LAST, _MOST_LAST = 16, 22  # bits of the number of last places: 0.5 to 32 MiB

NOW = 2
BEFORE = 1
"""Generations of contexts: those of new models, and those of files of versions 1 to 3."""


def blank(decisions: Tree, T: int, cells: int | None = None) -> Memory:
    """Return a memory that has read nothing, with room for a text of T symbols.

    Args:
        decisions: of the alphabet.
        T: symbols that it will learn from.
        cells: size of the table, a power of 2; None: at least 16 for each symbol, but from 2^21 to
            2^25.
    """
    K = mixing.CONTEXTS
    J = mixing.INPUTS
    M = mixing.MIXERS
    (A, L) = decisions.node.shape
    weights = mixing.shapes(A)
    return Memory(
        history=np.zeros(T, np.int32),
        place=np.zeros(PLACES, np.int64),
        cells=np.zeros(cells or _power_of_two(_CELLS * T, _FEWEST, _MOST), np.uint32),
        last=np.zeros(_power_of_two(T, _FEWEST_LAST, _MOST_LAST), np.int64),
        maps=np.full((K, 256), 0.5),
        match_map=np.full(STATES, 0.75),
        by_match=np.full(weights["by_match"], 0.15),
        by_node=np.full(weights["by_node"], 0.15),
        by_seen=np.full(weights["by_seen"], 0.15),
        by_last=np.full(weights["by_last"], 0.15),
        final=np.full(weights["final"], 1 / M),
        corrections=mixing.no_corrections(weights["corrections"][0]),
        keys=np.zeros(K, np.int64),
        lines=np.zeros(K, np.int64),
        x=np.zeros((L, J)),
        s=np.zeros((L, M)),
        f=np.zeros(L),
        p=np.zeros(L),
        seen=np.zeros(L, np.int64),
    )


def blank_before(decisions: Tree, T: int) -> mixing_3.Memory:
    """Return a memory of files of versions 1 to 3 that has read nothing, with room for a text of T symbols."""
    slots = _power_of_two(4 * T, 20, 24)
    K = mixing_3.CONTEXTS
    J = mixing_3.INPUTS
    (A, L) = decisions.node.shape
    weights = mixing_3.shapes(A)
    return mixing_3.Memory(
        history=np.zeros(T, np.int32),
        place=np.zeros(PLACES, np.int64),
        slots=np.zeros(slots, np.int64),
        last=np.zeros(slots // 4, np.int64),
        maps=np.full((K, 256), 0.5),
        match_map=np.full(STATES, 0.75),
        by_match=np.full(weights["by_match"], 0.15),
        by_node=np.full(weights["by_node"], 0.15),
        by_seen=np.full(weights["by_seen"], 0.15),
        final=np.full(weights["final"], 1 / 3),
        keys=np.zeros(K, np.int64),
        x=np.zeros((L, J)),
        s=np.zeros((L, 3)),
        p=np.zeros(L, np.int64),
        seen=np.zeros(L, np.int64),
    )


def blank_of(generation: int, decisions: Tree, T: int) -> Memory | mixing_3.Memory:
    """Return a memory of a generation that has read nothing, with room for a text of T symbols."""
    return blank(decisions, T) if generation == NOW else blank_before(decisions, T)


def shapes_of(generation: int, A: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights of a generation by name, for A symbols."""
    return mixing.shapes(A) if generation == NOW else mixing_3.shapes(A)


def _power_of_two(least: int, fewest: int, most: int) -> int:
    """Return the power of two that is at least so large, whose bits are at least and at most so many."""
    return 1 << min(max((least - 1).bit_length(), fewest), most)


@dataclass(eq=False)
class Reading(Place):
    """A network and contexts, in the midst of a text.

    Args:
        model: the network, or None.
        tree: the decisions.
        memory: all that reading changes.
        frozen: whether nothing is learned, so that every text begins with the same memory.
    """

    model: Parameters | None
    tree: Tree
    memory: Memory | mixing_3.Memory
    frozen: bool = False

    def __post_init__(self) -> None:
        self._net = network(self.model, len(self.tree.depth))
        self._learned = int(self.memory.place[T])
        self._one = np.zeros(1, np.int64), np.ones(1, bool), np.zeros(1)
        self._compiled: Any = None
        self._kernel = mixing if isinstance(self.memory, Memory) else mixing_3

    @property
    def generation(self) -> int:
        """The generation of contexts."""
        return NOW if self._kernel is mixing else BEFORE

    @property
    def weights(self) -> dict[str, Array]:
        """The learned arrays that reading the text again does not restore, by name."""
        return {name: getattr(self.memory, name) for name in self._kernel.WEIGHTS}

    def frozen_copy(self) -> Reading:
        """Return a reading before a new text that learns nothing, and shares the tables."""
        copies = {name: getattr(self.memory, name).copy() for name in self._kernel.OWN}
        copied = Reading(self.model, self.tree, self.memory._replace(**copies), frozen=True)
        copied.restart()
        return copied

    def round_weights(self) -> None:
        """Round the weights of the mixers to float32, in which a file keeps them."""
        for weights in self.weights.values():
            weights[:] = weights.astype(np.float32)

    def copy(self, more: int = 0) -> Reading:
        """Return a reading that has learned as much, before a new text, with room for so many symbols more."""
        memory = self.memory._make(array.copy() for array in self.memory)
        copied = Reading(self.model, self.tree, memory)
        copied._make_room(more)
        copied.begin()
        return copied

    def _make_room(self, more: int) -> None:
        t = int(self.memory.place[T])
        if t + more > len(self.memory.history):
            history = np.zeros(max(t + more, t + t // 8 + _SPARE), np.int32)
            history[:t] = self.memory.history[:t]
            self.memory = self.memory._replace(history=history)

    def begin(self) -> None:
        """Begin a new text, with all that has been learned."""
        if self.frozen:
            self.memory.place[T] = self._learned
        self.memory.place[BEGIN] = self.memory.place[T]
        if self.model is not None:
            self._net = network(self.model, len(self.tree.depth))

    def restart(self) -> None:
        """Begin a new text, with all that has been learned."""
        self.begin()

    def _run(
        self, mode: int, x: IntArray, chi: NDArray[np.bool_], code: Coder, stop: int = NOWHERE
    ) -> tuple[int, Array]:
        """Read a block of symbols and return how many were read, and, with SCORE, the bits of the predicted ones."""
        bits = np.zeros(len(x))
        # what a file claims to be its length takes memory when it has been decoded, not before
        self._make_room(len(x))
        mode += FROZEN if self.frozen else 0
        done = self._kernel.run(mode, x, chi, self.memory, self.tree, self._net, code, bits, stop)
        return done, bits

    def _code(self, mode: int, x: IntArray, coder: Coder) -> None:
        self._run(mode, x, np.ones(len(x), bool), coder)

    def _decode_until(self, stop: int, x: IntArray, coder: Coder) -> int:
        return self._run(DECODE, x, np.ones(len(x), bool), coder, stop)[0]

    def lengths(self, x: IntArray) -> Array:
        """Read symbols, learn from them unless frozen, and return the bits of each."""
        return self._run(SCORE, x, np.ones(len(x), bool), _nowhere)[1]

    def push(self, y: int) -> float:
        """Read the symbol number y, learn from it unless frozen, and return its bits."""
        self._make_room(1)
        mode = SCORE + FROZEN if self.frozen else SCORE
        x, chi, bits = self._one
        x[0] = y
        arguments = (mode, x, chi, self.memory, self.tree, self._net, _nowhere, bits, NOWHERE)
        if self._compiled is None:
            self._kernel.run(*arguments)
            # the types of the arguments are those of every other symbol: asking again takes as long
            # as the symbol
            self._compiled = self._kernel.run.get_overload(
                tuple(numba.typeof(each) for each in arguments)
            )
        else:
            self._compiled(*arguments)
        return float(bits[0])

    def score(
        self,
        x: IntArray,
        chi: NDArray[np.bool_] | None = None,
        mode: int = SCORE,
        progress: Progress | None = None,
    ) -> float:
        """Read symbols, learn from them, and return the bits of the predicted ones, which chi marks; None: of all."""
        chi = np.ones(len(x), bool) if chi is None else chi
        total = 0.0
        for part in blocks(len(x), progress):
            total += float(self._run(mode, x[part].astype(np.int64), chi[part], _nowhere)[1].sum())
        return total

    def learn(
        self,
        corpus: Corpus,
        slots_alone: bool = False,
        progress: Progress | None = None,
        *,
        since: int = 0,
    ) -> float:
        """Read texts, learn from them, and return their bits: the predicted symbols, each before it is learned.

        Args:
            corpus: the texts.
            slots_alone: learn all but the weights, without the network, which brings a memory back;
                returns 0.
            progress: called with the symbols done and their number.
            since: how many of the symbols have been read already.
        """
        mode = READ if slots_alone else SCORE
        total = 0.0
        for start, end in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
            if end <= since:
                continue
            if start >= since:
                self.begin()
            begin = max(start, since)
            told = None if progress is None else _shifted(progress, int(begin), len(corpus.x))
            total += self.score(corpus.x[begin:end], corpus.chi[begin:end], mode, told)
        return total

    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""
        A = len(self.tree.depth)
        p = np.zeros(A)
        mass = np.zeros(max(A - 1, 1))
        self._make_room(1)
        looking = self.memory._replace(place=self.memory.place.copy())
        self._kernel.distribution(looking, self.tree, self._net, mass, p)
        return p

    def read(self, y: int) -> None:
        """Read the symbol number y, and learn from it."""
        self.score(np.array([y], np.int64))

    def read_all(self, x: Iterable[int]) -> Self:
        """Read several symbols and return the reading itself."""
        self.score(np.array(list(x), np.int64))
        return self


def _shifted(progress: Progress, begin: int, total: int) -> Progress:
    return lambda done, _: progress(begin + done, total)
