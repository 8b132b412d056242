"""The mixing of model files of versions 1 to 3, and of files compressed alone before 4: nine contexts, three mixers.

It is kept so that these files still come back; `mixing` is the one of new models.

A decision is a node v of the tree of `decisions`; its digit is 0 or 1.  st(p) = log p/(1-p).

    K contexts s_k    the last 0..6 symbols; the word so far; the word so far and the one before
    slot (s_k, v)     p_k  share of ones, a running mean over the last 255;  n_k  visits, up to 255;
                      h_k  the last digits, at most 7, behind a leading 1
    maps[k, h]        how often a one follows these last digits in contexts of this kind
    guess             the symbol that followed the longest match of what was read last, at least 6 symbols long
    match_map[state]  how often the guess is right, by the length of the match and its last misses
    inputs x          st(p_k) (0 if n_k = 0), st(maps[k, h_k]) for each k;  +-st(match_map);  st(network);  0.3
    three mixers      s_j = w_j . x,  with weights chosen by the state of the match, by v, by how many n_k > 0
    result            p = sigma( sum_j c_j s_j ),  with weights c chosen by how many n_k > 0
    learning          w_j += rate (digit - sigma(s_j)) x,   c_j += (rate/5) (digit - p) s_j

The slots of all contexts lie in one hash table; when four neighbouring places are taken, the least
visited gives way.

`run` codes what it reads by p, with the coder of `coding`.

Alphabet of this module: K contexts, J inputs, L most decisions of a symbol, A symbols, N units, t
symbols read so far.

Source: M. Mahoney, *Adaptive weighing of context models for lossless data compression*, 2005 (the
PAQ programs).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels import walk
from pathspace.sequences.kernels.coding import (
    DECODE,
    ENCODE,
    FARTHEST,
    FROZEN,
    LEAST,
    READ,
    SCALE,
    SCORE,
    decode,
    encode,
    masses,
    network_log_odds,
)
from pathspace.sequences.kernels.contexts import (
    BASIC,
    HERE,
    LENGTH,
    MISSES,
    STATE,
    STATES,
    T,
    basic_contexts,
    combine,
    expected_digit,
    match,
    state_of_match,
)
from pathspace.sequences.kernels.elementary import logistic
from pathspace.sequences.kernels.machine_code import njit

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

CONTEXTS = BASIC
INPUTS = 2 * CONTEXTS + 3

_HALF, _ONES = 1 << 21, (1 << 22) - 1  # p_k has 22 bits
_EMPTY = (1 << 30) | _HALF
_LIMIT = 255
_RATE = 0.002
_MORE_RATE = 0.02
_UNTIL = 20000.0
_MAP_RATE = 0.01
_MATCH_RATE = 0.005
_BIAS = 0.3
_CELLS = 4096

_STRETCH = np.log((np.arange(_CELLS) + 0.5) / (_CELLS - 0.5 - np.arange(_CELLS)))
_SHARE = (65536 / (np.arange(_LIMIT + 1) + 1.5)).astype(np.int64)


WEIGHTS = ("by_match", "by_node", "by_seen", "final")
"""What reading without deciding does not bring back."""
OWN = ("place", "history", "keys", "x", "s", "p", "seen")
"""What two readers that share the tables have each for itself."""


class Memory(NamedTuple):
    """All that reading changes.

    Args:
        history: (capacity,) symbols read so far.
        place: (PLACES,) numbers named in `contexts`.
        slots: (2^b,) from the lowest bit: 22 of p, 8 of n, 8 of h, 23 that tell the slot's own
            context from others.
        last: (2^c,) where the last symbols were last seen, by hash.
        maps: (K, 256).
        match_map: (STATES,).
        by_match: (STATES, J) weights.
        by_node: (A-1 or 1, J) weights.
        by_seen: (K+1, J) weights.
        final: (K+1, 3) weights.
        keys: (K,) hashes of the contexts; from here on, nothing is kept from one symbol to the
            next.
        x: (L, J) inputs at each decision on the way to the symbol.
        s: (L, 3) sums of the mixers.
        p: (L,) probabilities of digit 1, of 2^30.
        seen: (L,) how many n_k > 0.
    """

    history: NDArray[np.int32]
    place: Integers
    slots: Integers
    last: Integers
    maps: Array
    match_map: Array
    by_match: Array
    by_node: Array
    by_seen: Array
    final: Array
    keys: Integers
    x: Array
    s: Array
    p: Integers
    seen: Integers


def shapes(A: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights by name, for A symbols."""
    return {
        "by_match": (STATES, INPUTS),
        "by_node": (max(A - 1, 1), INPUTS),
        "by_seen": (CONTEXTS + 1, INPUTS),
        "final": (CONTEXTS + 1, 3),
    }


@njit(error_model="numpy", fastmath=False, cache=True)
def _find(slots, key):
    """Return where the slot of a key is, or, if there is none, the place of four that it should take."""
    at = (key >> 5) & (len(slots) - 1)
    check = _check(key)
    free = at
    fewest = 1 << 20
    for j in range(4):
        slot = slots[at ^ j]
        if slot >> 38 == check:
            return at ^ j
        n = (slot >> 22) & 255 if slot else -1
        if n < fewest:
            free = at ^ j
            fewest = n
    return free


@njit(error_model="numpy", fastmath=False, cache=True)
def _check(key):
    return ((key >> 37) & 0x3FFFFF) | 0x400000


@njit(error_model="numpy", fastmath=False, cache=True)
def _slot(slots, key):
    """Return the slot of a key, an empty one if there is none."""
    slot = slots[_find(slots, key)]
    return slot if slot >> 38 == _check(key) else _EMPTY


@njit(error_model="numpy", fastmath=False, cache=True)
def _dot(w, x):
    s = 0.0
    for i in range(len(x)):
        s += w[i] * x[i]
    return min(max(s, -FARTHEST), FARTHEST)


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _decide(m, child, v, k, expected, net):
    """Return the probability of digit 1 at node v, of 2^30, and keep in row k what is needed to learn from the digit.

    The digit that the match lets expect may be -1, for none.
    """
    seen = 0
    x = m.x[k]
    for c in range(CONTEXTS):
        slot = _slot(m.slots, combine(m.keys[c], v + 1))
        is_new = (slot >> 22) & 255 == 0
        seen += not is_new
        x[2 * c] = 0.0 if is_new else _STRETCH[(slot & _ONES) >> 10]
        x[2 * c + 1] = _STRETCH[int(m.maps[c, (slot >> 30) & 255] * _CELLS)]
    x[2 * CONTEXTS] = 0.0
    state = 0 if expected < 0 else m.place[STATE]
    if expected >= 0:
        sure = _STRETCH[int(m.match_map[state] * _CELLS)]
        x[2 * CONTEXTS] = sure if expected == 1 else -sure
    x[2 * CONTEXTS + 1] = network_log_odds(child, v, net) if len(net.V) > 1 else 0.0
    x[2 * CONTEXTS + 2] = _BIAS
    s = m.s[k]
    s[0] = _dot(m.by_match[state], x)
    s[1] = _dot(m.by_node[v], x)
    s[2] = _dot(m.by_seen[seen], x)
    p = min(max(int(logistic(_dot(m.final[seen], s)) * SCALE), LEAST), SCALE - LEAST)
    m.p[k] = p
    m.seen[k] = seen
    return p


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _learn_weights(m, v, k, expected, digit):
    """Move the weights that have decided at node v, as row k tells."""
    rate = _RATE + _MORE_RATE / (1.0 + m.place[T] / _UNTIL)
    state = 0 if expected < 0 else m.place[STATE]
    seen = m.seen[k]
    for j in range(3):
        w = m.by_match[state] if j == 0 else m.by_node[v] if j == 1 else m.by_seen[seen]
        step = rate * (digit - logistic(m.s[k, j]))
        for i in range(INPUTS):
            w[i] += step * m.x[k, i]
    step = 0.2 * rate * (digit - m.p[k] / SCALE)
    for j in range(3):
        m.final[seen, j] += step * m.s[k, j]


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _learn_slots(m, v, expected, digit):
    """Count the digit in all contexts."""
    for c in range(CONTEXTS):
        key = combine(m.keys[c], v + 1)
        i = _find(m.slots, key)
        slot = m.slots[i]
        if slot >> 38 != _check(key):
            slot = _EMPTY
        p = slot & _ONES
        n = (slot >> 22) & 255
        h = (slot >> 30) & 255
        m.maps[c, h] += _MAP_RATE * (digit - m.maps[c, h])
        p += ((_ONES if digit else 0) - p) * _SHARE[n] >> 16
        n = min(n + 1, _LIMIT)
        h = h << 1 | digit
        if h > 255:
            h = h & 127 | 128
        m.slots[i] = _check(key) << 38 | h << 30 | n << 22 | p
    if expected >= 0:
        state = m.place[STATE]
        m.match_map[state] += _MATCH_RATE * ((expected == digit) - m.match_map[state])


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _before(m, tree, net):
    """Look at what has been read before the next symbol is predicted; return the guess of the match, or -1."""
    basic_contexts(m, tree.role)
    guess = match(m)
    m.place[STATE] = state_of_match(m.place[LENGTH], m.place[MISSES])
    if len(net.V) > 1:
        walk.predict(net.a, net.w, net.pi)
        masses(tree.child, net)
    return guess


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _decide_symbol(mode, y, guess, m, tree, net, coder):
    """Decide the digits of symbol y one after the other, or decode them; return the symbol and its bits.

    The bits are 0 unless the mode is SCORE.
    """
    cost = 0.0
    v = len(tree.child) - 1
    k = 0
    while v >= 0:
        p = _decide(m, tree.child, v, k, expected_digit(tree, guess, v, k), net)
        digit = decode(coder, p) if mode == DECODE else tree.digit[y, k]
        if mode == ENCODE:
            encode(coder, digit, p)
        if mode == SCORE:
            cost -= math.log2((p if digit else SCALE - p) / SCALE)
        v = tree.child[v, digit]
        k += 1
    return ~v, cost


@njit(error_model="numpy", fastmath=False, cache=True, forceinline=True)
def _learn_symbol(mixing, y, guess, m, tree):
    """Learn the digits of symbol y: the slots, and the weights too if these have decided."""
    for k in range(tree.depth[y]):
        v = tree.node[y, k]
        digit = tree.digit[y, k]
        expected = expected_digit(tree, guess, v, k)
        if mixing:
            _learn_weights(m, v, k, expected, digit)
        _learn_slots(m, v, expected, digit)
    if m.place[HERE] >= 0:
        m.last[m.place[HERE]] = m.place[T]


@njit(error_model="numpy", fastmath=False, cache=True)
def run(mode, x, chi, m, tree, net, coder, bits, stop):
    """Read symbols and learn from them, digit by digit, and return how many were read.

    Args:
        mode: READ learns the slots alone, SCORE the weights too and the bits, ENCODE writes the
            code, DECODE reads it; with FROZEN added nothing is learned, and the memory keeps but
            what was read.
        x: (T,) symbols; written with DECODE.
        chi: (T,) whether the symbol is to be predicted: where not, the slots alone learn.
        m: the memory, changed; its history has room for T more.
        tree: the decisions.
        net: the network, changed.
        coder: the coder, changed by ENCODE and DECODE; its content has room for 8 bytes a decision.
        bits: (T,) with SCORE what each symbol costs, written; 0 where it is not predicted, and with
            other modes.
        stop: the symbol after which no more are read, or NOWHERE.
    """
    learning = mode < FROZEN
    mode = mode % FROZEN
    for t in range(len(x)):
        guess = _before(m, tree, net)
        mixing = mode != READ and chi[t]
        y = x[t]
        cost = 0.0
        if mixing:
            y, cost = _decide_symbol(mode, y, guess, m, tree, net, coder)
        if mode == DECODE:
            x[t] = y
        # all digits of a symbol are decided before one of them is learned, so that symbols have
        # probabilities
        if learning:
            _learn_symbol(mixing, y, guess, m, tree)
        bits[t] = cost
        m.history[m.place[T]] = y
        m.place[T] += 1
        if len(net.V) > 1:
            walk.read(y, net.tau, net.first, net.sources, net.kind[0], net.kind[1], net.V, net.a)
        if y == stop:
            return t + 1
    return len(x)


@njit(error_model="numpy", fastmath=False, cache=True)
def distribution(m, tree, net, mass, p):
    """Write the probabilities p (A,) of the next symbol; mass (A-1,) and the place of the memory change too."""
    guess = _before(m, tree, net)
    p[0] = 1.0  # of the only symbol, if there is no decision
    for v in range(len(tree.child) - 1, -1, -1):
        if v == len(tree.child) - 1:
            mass[v] = 1.0
        expected = -1
        if guess >= 0:
            for k in range(tree.depth[guess]):
                if tree.node[guess, k] == v:
                    expected = tree.digit[guess, k]
        one = _decide(m, tree.child, v, 0, expected, net) / SCALE
        for digit in range(2):
            behind = tree.child[v, digit]
            q = mass[v] * (one if digit else 1.0 - one)
            if behind < 0:
                p[~behind] = q
            else:
                mass[behind] = q
