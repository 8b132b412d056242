"""A network and contexts at some place of a text: memories made, filled, copied, and driven through texts.

Alphabet of this module: A symbols, T symbols of a text, N units, K contexts, J inputs of a
mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decisions import Tree
from .kernels import mixing
from .kernels.elementary import squash
from .kernels.mixing import BEGIN, DECODE, ENCODE, READ, SCORE, Coder, Memory, Network, T, shapes
from .parameters import Parameters
from .text import Corpus, IntArray

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]

_BLOCK = 1 << 13
_FEWEST, _MOST = 20, 24  # bits of the number of slots: 8 to 128 MiB, and a quarter of that for `last`


def blank(decisions: Tree, T: int, slots: int | None = None) -> Memory:
    """Return a memory that has read nothing, with room for a text of T symbols.

    Args:
        decisions: of the alphabet.
        T: symbols that it will learn from.
        slots: size of the table, a power of 2; None: four for each symbol, but at least 2^20 and at most 2^24.
    """
    bits = min(max((4 * T - 1).bit_length(), _FEWEST), _MOST)
    K, J, (A, L) = mixing.CONTEXTS, mixing.INPUTS, decisions.node.shape
    weights = shapes(A)
    return Memory(
        history=np.zeros(T, np.int32),
        place=np.zeros(9, np.int64),
        slots=np.zeros(slots or 1 << bits, np.int64),
        last=np.zeros(1 << bits - 2, np.int64),
        maps=np.full((K, 256), 0.5),
        match_map=np.full(mixing.STATES, 0.75),
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


def _network(model: Parameters | None, A: int) -> Network:
    """Return the network before a text, or, of None, one without units, which says nothing."""
    pi, mass = np.full(A, 1 / A), np.zeros(max(A - 1, 1))
    if model is None:
        none, nobody = np.zeros((1, 1)), np.zeros(1, np.int64)
        return Network(none, none, nobody, nobody, np.zeros(2, bool), np.zeros(1), np.ones(1), pi, mass)
    a, logistic = np.empty(model.units + 1), model.squash == "logistic"
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


def _coder(code: bytes | None = None, room: int = 0) -> Coder:
    """Return a coder before the first digit: of a code that is to be read, or with room for one to be written."""
    content = np.zeros(room, np.uint8) if code is None else np.frombuffer(bytearray(code), np.uint8)
    first = np.concatenate([content[:7], np.zeros(7, np.uint8)])[:7]
    at = 0 if code is None else 7
    return Coder(
        np.array([0, (1 << 56) - 1, int.from_bytes(first.tobytes(), "big")], np.int64),
        np.array([at]),
        content,
    )


@dataclass(eq=False)
class Reading:
    """A network and contexts, in the midst of a text.

    Args:
        model: the network, or None.
        tree: the decisions.
        memory: all that reading changes.
    """

    model: Parameters | None
    tree: Tree
    memory: Memory

    def __post_init__(self) -> None:
        self._net = _network(self.model, len(self.tree.depth))

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
            history = np.zeros(max(t + more, t + t // 8), np.int32)
            history[:t] = self.memory.history[:t]
            self.memory = self.memory._replace(history=history)

    def begin(self) -> None:
        """Begin a new text, with all that has been learned."""
        self.memory.place[BEGIN] = self.memory.place[T]
        self._net = _network(self.model, len(self.tree.depth))

    def run(
        self,
        mode: int,
        x: NDArray[Any],
        chi: NDArray[np.bool_] | None = None,
        coder: Coder | None = None,
        progress: Progress | None = None,
    ) -> float:
        """Run the kernel block by block and return the bits; DECODE writes x."""
        coder, total = coder or _coder(), 0.0
        for begin in range(0, len(x), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            block = x[part].astype(np.int64)
            bits, marks = np.zeros(len(block)), np.ones(len(block), bool) if chi is None else chi[part]
            # what a file claims to be its length takes memory when it has been decoded, not before
            self._make_room(len(block))
            mixing.run(mode, block, marks, self.memory, self.tree, self._net, coder, bits)
            total += float(bits.sum())
            if mode == DECODE:
                x[part] = block
            if progress is not None:
                progress(min(begin + _BLOCK, len(x)), len(x))
        return total

    def learn(self, corpus: Corpus, slots_alone: bool = False, progress: Progress | None = None) -> float:
        """Read texts, learn from them, and return their bits: the predicted symbols, each before it is learned.

        Args:
            corpus: the texts.
            slots_alone: learn all but the weights, without the network, which brings a memory back; returns 0.
            progress: called with the symbols done and their number.
        """
        mode, total = READ if slots_alone else SCORE, 0.0
        for begin, end in zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True):
            self.begin()
            told = None if progress is None else _shifted(progress, int(begin), len(corpus.x))
            total += self.run(mode, corpus.x[begin:end], corpus.chi[begin:end], progress=told)
        return total

    def encode(self, x: IntArray, progress: Progress | None = None) -> bytes:
        """Read symbols and return their code."""
        coder = _coder(room=8 * int(self.tree.depth[x].sum()))
        self.run(ENCODE, x, coder=coder, progress=progress)
        low, high = (int(end) for end in coder.interval[:2])
        # the number in the interval with the most zeros at its end, which need not be written
        last = next(end for zeros in range(56, -1, -8) if (end := high >> zeros << zeros) >= low)
        return (coder.content[: coder.at[0]].tobytes() + last.to_bytes(7, "big")).rstrip(b"\0")

    def decode(self, code: bytes, x: NDArray[Any], progress: Progress | None = None) -> None:
        """Read the symbols that have this code, and write them to x."""
        self.run(DECODE, x, coder=_coder(code), progress=progress)

    def predict(self) -> Array:
        """Return the probabilities (A,) of the next symbol."""
        A = len(self.tree.depth)
        p, mass = np.zeros(A), np.zeros(max(A - 1, 1))
        self._make_room(1)
        looking = self.memory._replace(place=self.memory.place.copy())
        mixing.distribution(looking, self.tree, self._net, mass, p)
        return p

    def read(self, y: int) -> None:
        """Read the symbol number y, and learn from it."""
        self.run(SCORE, np.array([y], np.int64))

    def read_all(self, x: Iterable[int]) -> Reading:
        """Read several symbols and return the reading itself."""
        self.run(SCORE, np.array(list(x), np.int64))
        return self


def _shifted(progress: Progress, begin: int, total: int) -> Progress:
    return lambda done, _: progress(begin + done, total)
