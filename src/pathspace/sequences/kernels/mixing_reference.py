"""The computation of `mixing` in plain Python: dictionaries of contexts, no hashing, one sequence of texts.

Slow and short on purpose: this file is what the compiled kernel is tested against. The two agree to
rounding as long as the compiled table has room.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

K = 12
BIAS = 0.3
FARTHEST = 12.0
LETTER = 1
BLANK = 2
NEWLINE = 3


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


def step_of(f: float) -> tuple[int, float]:
    """Return which of the 33 steps from -8 to 8 f has come to, and how far it is on the way to the next."""
    at = min(max(2 * f + 16, 0), 31.999)
    return int(at), at - int(at)


class Slot:
    """Counts of the digits at a node in a context: share of ones (18 bits), visits, last digits."""

    def __init__(self) -> None:
        self.p = 1 << 17
        self.n = 0
        self.h = 1

    def count(self, digit: int) -> None:
        """Count a digit."""
        ones = (1 << 18) - 1
        self.p += (ones * digit - self.p) * int(65536 / (self.n + 1.5)) >> 16
        self.n = min(self.n + 1, 63)
        self.h = 2 * self.h + digit
        if self.h > 255:
            self.h = 128 + self.h % 128


@dataclass(eq=False)
class Decided:
    """Probability of a decision, and the numbers that it was made of.

    Args:
        x: the inputs.
        chosen: the weights chosen for them.
        final: the weights chosen for the sums.
        s: the sums.
        q: the probability of digit 1 by the mixture.
        corrections: those of the node.
        step: the step that the mixture has come to, and how far it is on the way to the next.
        p: the probability of digit 1.
    """

    x: Array
    chosen: list[Array]
    final: Array
    s: Array
    q: float
    corrections: Array
    step: tuple[int, float]
    p: float


class Mixture:
    """The contexts and mixers.

    Args:
        ways: for each symbol, its decisions (node, digit).
        role: for each symbol, what it is to words and lines.
    """

    def __init__(self, ways: Sequence[Sequence[tuple[int, int]]], role: Sequence[int]) -> None:
        self.ways = ways
        self.role = role
        self.slots: dict[Any, Slot] = defaultdict(Slot)
        self.maps = np.full((K, 256), 0.5)
        self.match_map = np.full(65, 0.75)
        start = np.full(2 * K + 3, 0.15)
        self.weights: dict[tuple[str, int], Array] = defaultdict(start.copy)
        self.final: dict[int, Array] = defaultdict(np.full(4, 1 / 4).copy)
        unchanged = np.array([sigma(step / 2) for step in range(-16, 17)])
        self.corrections: dict[int, Array] = defaultdict(unchanged.copy)
        self.read: list[int] = []
        self.last: dict[tuple[int, ...], int] = {}
        self.restart()

    def restart(self) -> None:
        """Begin another text, with all that has been learned."""
        self.text: list[int] = []
        self.pointer = self.length = 0
        self.misses: list[bool] = []

    def contexts(self) -> list[Any]:
        """Return the contexts: the last 0 to 6 symbols, the words, and the place in the line."""
        padded = [None] * 7 + self.text
        orders = [(d, *padded[len(padded) - d :]) for d in range(7)]
        symbol = padded[-1]
        word, *before = [*reversed(self.words()), (), (), ()]
        basic = [*orders, ("word", word, symbol), ("words", word, before[0], symbol)]
        line = self.line()
        if line is None:
            further = [
                ("skip", *padded[-3:-1]),
                ("far", word, before[1], symbol),
                (7, *padded[-7:]),
            ]
            return basic + further
        field, above, next_above = line
        place = [("above", field, above, symbol), ("field", field, word, symbol)]
        return [*basic, *place, ("both", above, next_above, word, symbol)]

    def words(self) -> list[tuple[int, ...]]:
        """Return the words of the text; the last one is the one so far, which may be empty."""
        words: list[tuple[int, ...]] = [()]
        for y in self.text:
            if self.role[y] == LETTER:
                words[-1] = (*words[-1], y)
            elif words[-1]:
                words.append(())
        return words

    def line(self) -> tuple[int, int | None, int | None] | None:
        """Return the number of the field, the symbol above and the next; None if there is no line before."""
        lines: list[list[int]] = [[]]
        for y in self.text:
            lines[-1].append(y)
            if self.role[y] == NEWLINE:
                lines.append([])
        if len(lines) == 1:
            return None
        before, now = lines[-2:]
        begins = self.fields(before)
        mine = self.fields(now)
        field = len(mine) - 1
        if field >= 32 or field >= len(begins):
            return min(field, 255), None, None
        at = begins[field] + len(now) - mine[-1]
        above, next_above = [*before[at : at + 2], None, None][:2]
        return field, above, next_above

    def fields(self, line: list[int]) -> list[int]:
        """Return where the fields of a line begin."""
        return [0] + [k + 1 for k, y in enumerate(line) if self.role[y] == BLANK]

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
                length < min(32, q, len(self.text))
                and self.read[q - 1 - length] == self.read[t - 1 - length]
            ):
                length += 1
            if length > self.length:
                self.pointer = q
                self.length = length
                self.misses = []
        self.last[tuple(self.text[-6:])] = t
        return self.read[self.pointer] if self.pointer else None

    def state(self) -> int:
        """Return the state of the match: 16 steps of its length, four of its misses."""
        length = self.length
        step = 0
        while length > 8:
            length = length // 2
            step = step + 1
        return 1 + 4 * min(length + step, 15) + min(sum(self.misses), 3)

    def symbol(self, y: int, pi: Array | None, chi: bool = True) -> list[float]:
        """Read a symbol and return the probability that each of its digits had.

        Args:
            y: the symbol.
            pi: (A,) what the network predicts, or None without one.
            chi: whether it is to be predicted; if not, there are no probabilities.
        """
        contexts = self.contexts()
        expected = self.expected(y, self.match())
        state = self.state()
        probabilities = []
        if chi:
            mixed = []
            for k, (v, _) in enumerate(self.ways[y]):
                guess = expected[k]
                network = self.network(pi, list(self.ways[y][:k]), v)
                x = np.array([*self.inputs(contexts, v, guess, state), network, BIAS])
                mixed.append(self.mix(x, contexts, v, 0 if guess is None else state))
            for (_, digit), decided in zip(self.ways[y], mixed, strict=True):
                self.learn(digit, decided)
                probabilities.append(decided.p if digit else 1 - decided.p)
        for (v, digit), guess in zip(self.ways[y], expected, strict=True):
            for k, context in enumerate(contexts):
                slot = self.slots[context, v]
                self.maps[k, slot.h] += 0.01 * (digit - self.maps[k, slot.h])
                slot.count(digit)
            if guess is not None:
                self.match_map[state] += 0.005 * ((guess == digit) - self.match_map[state])
        self.read.append(y)
        self.text.append(y)
        return probabilities

    def expected(self, y: int, guess: int | None) -> list[int | None]:
        """Return the digits that a guess gives symbol ``y``; None from where their ways part."""
        own = list(self.ways[y])
        way = [] if guess is None else list(self.ways[guess])
        digits: list[int | None] = []
        for k in range(len(own)):
            agrees = len(way) > k and way[:k] == own[:k]
            digits.append(way[k][1] if agrees else None)
        return digits

    def inputs(self, contexts: list[Any], v: int, expected: int | None, state: int) -> list[float]:
        """Return the inputs of the mixers that come from the contexts and the match."""
        found: list[float] = []
        for k, context in enumerate(contexts):
            slot = self.slots[context, v]
            found += [stretch(slot.p / 2**18) if slot.n else 0.0, stretch(self.maps[k, slot.h])]
        if expected is None:
            return [*found, 0.0]
        sure = stretch(self.match_map[state])
        return [*found, sure if expected else -sure]

    def network(self, pi: Array | None, done: list[tuple[int, int]], v: int) -> float:
        """Return log of the odds of digit 1 at node v, by the network's probabilities of the symbols behind it."""
        if pi is None:
            return 0.0
        mass = [0.0, 0.0]
        for y, way in enumerate(self.ways):
            if list(way[: len(done)]) == done and way[len(done)][0] == v:
                mass[way[len(done)][1]] += pi[y]
        return bounded(math.log((mass[1] + 1e-300) / (mass[0] + 1e-300)))

    def mix(self, x: Array, contexts: list[Any], v: int, state: int) -> Decided:
        """Return how a decision is taken."""
        seen = sum(self.slots[context, v].n > 0 for context in contexts)
        last = self.text[-1] + 1 if self.text else 0
        names = [("match", state), ("node", v), ("seen", seen), ("last", last)]
        chosen = [self.weights[name] for name in names]
        s = np.array([bounded(float(w @ x)) for w in chosen])
        f = bounded(float(self.final[seen] @ s))
        step, way = step_of(f)
        corrections = self.corrections[v]
        r = (1 - way) * corrections[step] + way * corrections[step + 1]
        q = sigma(f)
        p = min(max(int((q + r) / 2 * 2**30), 256), 2**30 - 256) / 2**30
        return Decided(x, chosen, self.final[seen], s, q, corrections, (step, way), p)

    def learn(self, digit: int, decided: Decided) -> None:
        """Move the weights."""
        rate = 0.002 + 0.02 / (1 + len(self.read) / 20000)
        for w, s_j in zip(decided.chosen, decided.s, strict=True):
            w += rate * (digit - sigma(s_j)) * decided.x
        decided.final[:] += 0.2 * rate * (digit - decided.q) * decided.s
        step, way = decided.step
        for at, share in ((step, 1 - way), (step + 1, way)):
            decided.corrections[at] += 0.02 * share * (digit - decided.corrections[at])
