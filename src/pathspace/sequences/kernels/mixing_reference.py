"""What `mixing` computes, in plain Python: dictionaries of contexts, no hashing, one sequence of texts.

Slow and short on purpose: this file is what the compiled kernel is tested against. The two agree to rounding as long as
the compiled table has room.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

K, BIAS, FARTHEST = 9, 0.3, 12.0


def stretch(p: float) -> float:
    """Return log p/(1-p), for the middle of the one of 4096 steps in which p lies."""
    step = int(p * 4096)
    return math.log((step + 0.5) / (4095.5 - step))


def bounded(s: float) -> float:
    """Return s, but at most 12 and at least -12."""
    return min(max(s, -FARTHEST), FARTHEST)


def sigma(s: float) -> float:
    """Return the logistic function of s."""
    return 1 / (1 + math.exp(-s))


class Slot:
    """What is known of the digits at a node in a context: share of ones (22 bits), visits, last digits."""

    def __init__(self) -> None:
        self.p, self.n, self.h = 1 << 21, 0, 1

    def count(self, digit: int) -> None:
        """Count a digit."""
        ones = (1 << 22) - 1
        self.p += (ones * digit - self.p) * int(65536 / (self.n + 1.5)) >> 16
        self.n = min(self.n + 1, 255)
        self.h = 2 * self.h + digit
        if self.h > 255:
            self.h = 128 + self.h % 128


class Mixture:
    """The contexts and mixers.

    Args:
        ways: for each symbol, its decisions (node, digit).
        letter: for each symbol, whether words are made of it.
    """

    def __init__(self, ways: Sequence[Sequence[tuple[int, int]]], letter: Sequence[bool]) -> None:
        self.ways, self.letter = ways, letter
        self.slots: dict[Any, Slot] = defaultdict(Slot)
        self.maps = np.full((K, 256), 0.5)
        self.match_map = np.full(65, 0.75)
        start = np.full(2 * K + 3, 0.15)
        self.weights: dict[tuple[str, int], Array] = defaultdict(start.copy)
        self.final: dict[int, Array] = defaultdict(np.full(3, 1 / 3).copy)
        self.read: list[int] = []
        self.last: dict[tuple[int, ...], int] = {}
        self.restart()

    def restart(self) -> None:
        """Begin another text, with all that has been learned."""
        self.text: list[int] = []
        self.word: tuple[int, ...] = ()
        self.word_before: tuple[int, ...] = ()
        self.pointer = self.length = 0
        self.misses: list[bool] = []

    def contexts(self) -> list[Any]:
        """Return the contexts: the last 0 to 6 symbols, the word, the word and the one before."""
        padded = [None] * 6 + self.text
        orders = [(d, *padded[len(padded) - d :]) for d in range(7)]
        symbol = padded[-1]
        return [*orders, ("word", self.word, symbol), ("words", self.word, self.word_before, symbol)]

    def match(self) -> int | None:
        """Return the symbol that followed the longest match, and remember this place."""
        if len(self.text) < 6:
            return None
        t = len(self.read)
        if self.pointer:
            missed = self.read[self.pointer] != self.read[-1]
            self.length = 0 if missed else self.length + 1
            self.misses = [*self.misses, missed][-4:]
            self.pointer += 1
        q = self.last.get(tuple(self.text[-6:]), 0)
        if self.length < 16 and q:
            length = 0
            while (
                length < min(32, q, len(self.text)) and self.read[q - 1 - length] == self.read[t - 1 - length]
            ):
                length += 1
            if length > self.length:
                self.pointer, self.length, self.misses = q, length, []
        self.last[tuple(self.text[-6:])] = t
        return self.read[self.pointer] if self.pointer else None

    def state(self) -> int:
        """Return the state of the match: 16 steps of its length, four of its misses."""
        length, step = self.length, 0
        while length > 8:
            length, step = length // 2, step + 1
        return 1 + 4 * min(length + step, 15) + min(sum(self.misses), 3)

    def symbol(self, y: int, pi: Array | None, chi: bool = True) -> list[float]:
        """Read a symbol and return the probability that each of its digits had.

        Args:
            y: the symbol.
            pi: (A,) what the network predicts, or None without one.
            chi: whether it is to be predicted; if not, there are no probabilities.
        """
        contexts, guess, state = self.contexts(), self.match(), self.state()
        decisions = []
        for k, (v, digit) in enumerate(self.ways[y]):
            way = [] if guess is None else self.ways[guess]
            expected = way[k][1] if list(way[:k]) == list(self.ways[y][:k]) and len(way) > k else None
            decisions.append((v, digit, expected))
        probabilities = []
        if chi:
            mixed = []
            for k, (v, _, expected) in enumerate(decisions):
                network = self.network(pi, list(self.ways[y][:k]), v)
                x = np.array([*self.inputs(contexts, v, expected, state), network, BIAS])
                mixed.append(self.mix(x, contexts, v, 0 if expected is None else state))
            for (_, digit, _), (x, chosen, final, s, p) in zip(decisions, mixed, strict=True):
                self.learn(digit, x, chosen, final, s, p)
                probabilities.append(p if digit else 1 - p)
        for v, digit, expected in decisions:
            for k, context in enumerate(contexts):
                slot = self.slots[context, v]
                self.maps[k, slot.h] += 0.01 * (digit - self.maps[k, slot.h])
                slot.count(digit)
            if expected is not None:
                self.match_map[state] += 0.005 * ((expected == digit) - self.match_map[state])
        self.read.append(y)
        self.text.append(y)
        if self.letter[y]:
            self.word = (*self.word, y)
        elif self.word:
            self.word_before, self.word = self.word, ()
        return probabilities

    def inputs(self, contexts: list[Any], v: int, expected: int | None, state: int) -> list[float]:
        """Return the inputs of the mixers that come from the contexts and the match."""
        found: list[float] = []
        for k, context in enumerate(contexts):
            slot = self.slots[context, v]
            found += [stretch(slot.p / 2**22) if slot.n else 0.0, stretch(self.maps[k, slot.h])]
        sure = stretch(self.match_map[state])
        return [*found, 0.0 if expected is None else sure if expected else -sure]

    def network(self, pi: Array | None, done: list[tuple[int, int]], v: int) -> float:
        """Return log of the odds of digit 1 at node v, by the network's probabilities of the symbols behind it."""
        if pi is None:
            return 0.0
        mass = [0.0, 0.0]
        for y, way in enumerate(self.ways):
            if list(way[: len(done)]) == done and way[len(done)][0] == v:
                mass[way[len(done)][1]] += pi[y]
        return bounded(math.log((mass[1] + 1e-300) / (mass[0] + 1e-300)))

    def mix(
        self, x: Array, contexts: list[Any], v: int, state: int
    ) -> tuple[Array, list[Array], Array, Array, float]:
        """Return the inputs, the weights chosen for them and for the sums, the sums, and the probability of digit 1."""
        seen = sum(self.slots[context, v].n > 0 for context in contexts)
        chosen = [self.weights["match", state], self.weights["node", v], self.weights["seen", seen]]
        s = np.array([bounded(float(w @ x)) for w in chosen])
        p = sigma(bounded(float(self.final[seen] @ s)))
        return x, chosen, self.final[seen], s, min(max(int(p * 2**30), 256), 2**30 - 256) / 2**30

    def learn(self, digit: int, x: Array, chosen: list[Array], final: Array, s: Array, p: float) -> None:
        """Move the weights."""
        rate = 0.002 + 0.02 / (1 + len(self.read) / 20000)
        for w, s_j in zip(chosen, s, strict=True):
            w += rate * (digit - sigma(s_j)) * x
        final += 0.2 * rate * (digit - p) * s
