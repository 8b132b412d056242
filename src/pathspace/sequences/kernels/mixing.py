"""Mixing a network with contexts, one binary decision at a time, compiled; ``mixing_reference`` is the definition.

A decision is a node v of the tree of `decisions`; its digit is 0 or 1.  st(p) = log p/(1-p).

    K contexts s_k    those of `contexts`: the last 0..6 symbols, words, and the place in the line
    cell (s_k, v)     p_k  share of ones, a running mean over the last 63;  n_k  visits, up to 63;
                      h_k  the last digits, at most 7, behind a leading 1
    maps[k, h]        how often a one follows these last digits in contexts of this kind
    match_map[state]  how often the guess is right, by the length of the match and its last misses
    inputs x          st(p_k) (0 if n_k = 0), st(maps[k, h_k]) for each k;  +-st(match_map);  st(network);  0.3;  0
    four mixers       s_j = w_j . x,  with weights chosen by the state of the match, by v, by how many n_k > 0, and by
                      the last symbol
    mixture           f = sum_j c_j s_j,  q = sigma(f),  with weights c chosen by how many n_k > 0
    correction        r = what q has come to at v: between 33 steps of f from -8 to 8, for each v
    result            p = (q + r) / 2
    learning          w_j += rate (digit - sigma(s_j)) x,  c_j += (rate/5) (digit - q) s_j,  both steps next to f move
                      to the digit by 0.02 times how near they are

Seven cells of a context lie together in a line of 32 bytes: those of three decisions one after the
other. The lines of all contexts lie in one hash table; when four neighbouring places are taken, the
least visited gives way.

`run` codes what it reads by p, with the coder of `coding`.

Alphabet of this module: K contexts, J inputs, M mixers, L most decisions of a symbol, A symbols, N
units, t symbols read so far.

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
    BEGIN,
    CONTEXTS,
    HERE,
    LENGTH,
    MISSES,
    STATE,
    STATES,
    T,
    basic_contexts,
    combine,
    expected_digit,
    follow_line,
    line_contexts,
    match,
    state_of_match,
)
from pathspace.sequences.kernels.elementary import add_row_of, dot_of, logistic, prefetch
from pathspace.sequences.kernels.machine_code import njit

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_USED = 2 * CONTEXTS + 3
INPUTS = -(-_USED // 4) * 4
"""J, a multiple of 4: the last ones are 0."""
MIXERS = 4
_ROWS = 1 << 8
"""Last symbols that have weights of their own."""
_CORRECTED = 1 << 10
"""Nodes that have corrections of their own."""
_STEPS = 33
_NEAREST = 16
_PER_UNIT = 2.0
"""Steps of f: their number, the one for 0, and how many there are from one whole number to the next."""

LINE = 8
"""Numbers of a line: one that tells its context from others, and seven cells."""
GROUP = 3
"""Decisions that a line is for."""
_HALF, _ONES = 1 << 17, (1 << 18) - 1  # p_k has 18 bits, above 6 of n_k and 8 of h_k
_EMPTY = _HALF << 14 | 1
_LIMIT = 63
_RATE = 0.002
_MORE_RATE = 0.02
_UNTIL = 20000.0
_MAP_RATE = 0.01
_MATCH_RATE = 0.005
_CORRECTION_RATE = 0.02
_BIAS = 0.3
_CELLS = 4096

_STRETCH = np.log((np.arange(_CELLS) + 0.5) / (_CELLS - 0.5 - np.arange(_CELLS)))
_dot = dot_of(INPUTS)
_add_row = add_row_of(INPUTS)
_SHARE = (65536 / (np.arange(_LIMIT + 1) + 1.5)).astype(np.int64)

WEIGHTS = ("by_match", "by_node", "by_seen", "by_last", "final", "corrections")
"""What reading without deciding does not bring back."""
OWN = ("place", "history", "keys", "lines", "x", "s", "f", "p", "seen")
"""What two readers that share the tables have each for itself."""


class Memory(NamedTuple):
    """All that reading changes.

    Args:
        history: (capacity,) symbols read so far.
        place: (PLACES,) numbers named in `contexts`.
        cells: (2^b,) lines of 8 numbers.
        last: (2^c,) where the last symbols were last seen, by hash.
        maps: (K, 256).
        match_map: (STATES,).
        by_match: (STATES, J) weights.
        by_node: (A-1 or 1, J) weights.
        by_seen: (K+1, J) weights.
        by_last: (A+1 or 256, J) weights.
        final: (K+1, M) weights.
        corrections: (A-1, 1 or 1024; 33).
        keys: (K,) hashes of the contexts; from here on, nothing is kept from one symbol to the
            next.
        lines: (K,) where the line of each context begins, -1 for nowhere.
        x: (L, J) inputs at each decision on the way to the symbol.
        s: (L, M) sums of the mixers.
        f: (L,) their mixture.
        p: (L,) probabilities q of digit 1 by the mixture.
        seen: (L,) how many n_k > 0.
    """

    history: NDArray[np.int32]
    place: Integers
    cells: NDArray[np.uint32]
    last: Integers
    maps: Array
    match_map: Array
    by_match: Array
    by_node: Array
    by_seen: Array
    by_last: Array
    final: Array
    corrections: Array
    keys: Integers
    lines: Integers
    x: Array
    s: Array
    f: Array
    p: Array
    seen: Integers


def shapes(A: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights by name, for A symbols."""
    nodes = max(A - 1, 1)
    return {
        "by_match": (STATES, INPUTS),
        "by_node": (nodes, INPUTS),
        "by_seen": (CONTEXTS + 1, INPUTS),
        "by_last": (min(A + 1, _ROWS), INPUTS),
        "final": (CONTEXTS + 1, MIXERS),
        "corrections": (min(nodes, _CORRECTED), _STEPS),
    }


def no_corrections(rows: int) -> Array:
    """Return corrections (rows, 33) that leave probabilities as they are."""
    f = (np.arange(_STEPS) - _NEAREST) / _PER_UNIT
    return np.tile(1 / (1 + np.exp(-f)), (rows, 1))


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _check(key):
    return ((key >> 32) & 0x7FFFFFFF) | 0x80000000


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _first_place(cells, key):
    """Return the first of the four places that the line of a key may take."""
    return ((key >> 8) & (len(cells) // LINE - 1)) * LINE


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _line_of(cells, key):
    """Return where the line of a key begins, -1 if there is none."""
    begin = _first_place(cells, key)
    check = _check(key)
    for j in range(4):
        line = begin ^ (j * LINE)
        if np.int64(cells[line]) == check:
            return line
    return -1


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _find(cells, key):
    """Return where the line of a key begins, or, if there is none, the place of four that it should take."""
    begin = _first_place(cells, key)
    check = _check(key)
    free = begin
    fewest = 1 << 20
    for j in range(4):
        line = begin ^ (j * LINE)
        found = np.int64(cells[line])
        if found == check:
            return line
        # visits of its first decision, which are the most
        n = (np.int64(cells[line + 1]) >> 8) & _LIMIT if found else -1
        if n < fewest:
            free = line
            fewest = n
    return free


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _look_up(m, root):
    """Write where the lines of all contexts for three decisions from node root on begin, -1 for those that are new."""
    # memory answers late, but many questions at once: all places are asked for before one is read
    for c in range(CONTEXTS):
        key = combine(m.keys[c], root + 1)
        prefetch(m.cells, _first_place(m.cells, key))  # pyright: ignore[reportCallIssue]
        m.lines[c] = key
    for c in range(CONTEXTS):
        m.lines[c] = _line_of(m.cells, m.lines[c])


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _claim(m, root):
    """Write where these lines begin, and make those that are new."""
    for c in range(CONTEXTS):
        key = combine(m.keys[c], root + 1)
        line = _find(m.cells, key)
        if m.cells[line] != _check(key):
            m.cells[line] = _check(key)
            for i in range(1, LINE):
                m.cells[line + i] = 0
        m.lines[c] = line


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _mixer(weights, row, x, k):
    s = _dot(weights, row, x, k)  # pyright: ignore[reportCallIssue]
    return min(max(s, -FARTHEST), FARTHEST)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _learn_mixer(weights, row, x, k, step):
    _add_row(weights, row, x, k, step)  # pyright: ignore[reportCallIssue]


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _rate(m):
    """Return how far the weights move at this place of the text."""
    return _RATE + _MORE_RATE / (1.0 + m.place[T] / _UNTIL)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _row_of_last(m):
    """Return which weights belong to the last symbol."""
    if m.place[T] == m.place[BEGIN]:
        return 0
    return (m.history[m.place[T] - 1] + 1) % len(m.by_last)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def _step_of(f):
    """Return which step f has come to, and how far it is on the way to the next."""
    at = min(max(f * _PER_UNIT + _NEAREST, 0.0), _STEPS - 1.001)
    step = int(at)
    return step, at - step


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _inputs(m, cell, k, expected):
    """Write the inputs of the contexts and of the match, and return how many contexts have been seen."""
    seen = 0
    x = m.x
    for c in range(CONTEXTS):
        content = np.int64(m.cells[m.lines[c] + cell]) if m.lines[c] >= 0 else 0
        if content == 0:
            x[k, 2 * c] = 0.0
            x[k, 2 * c + 1] = _STRETCH[int(m.maps[c, 1] * _CELLS)]
        else:
            seen += 1
            x[k, 2 * c] = _STRETCH[content >> 20]
            x[k, 2 * c + 1] = _STRETCH[int(m.maps[c, content & 255] * _CELLS)]
    x[k, 2 * CONTEXTS] = 0.0
    if expected >= 0:
        sure = _STRETCH[int(m.match_map[m.place[STATE]] * _CELLS)]
        x[k, 2 * CONTEXTS] = sure if expected == 1 else -sure
    return seen


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _decide(m, tree, v, k, expected, last, net):
    """Return the probability of digit 1 at node v, of 2^30, and keep in row k what is needed to learn from the digit.

    The digit that the match lets expect may be -1, for none; ``last`` is the row of the last symbol's weights.
    """
    seen = _inputs(m, tree.cell[v], k, expected)
    m.x[k, 2 * CONTEXTS + 1] = network_log_odds(tree.child, v, net) if len(net.V) > 1 else 0.0
    m.x[k, 2 * CONTEXTS + 2] = _BIAS
    s = m.s
    s[k, 0] = _mixer(m.by_match, 0 if expected < 0 else m.place[STATE], m.x, k)
    s[k, 1] = _mixer(m.by_node, v, m.x, k)
    s[k, 2] = _mixer(m.by_seen, seen, m.x, k)
    s[k, 3] = _mixer(m.by_last, last, m.x, k)
    f = 0.0
    for j in range(MIXERS):
        f += m.final[seen, j] * s[k, j]
    f = min(max(f, -FARTHEST), FARTHEST)
    q = logistic(f)
    m.f[k] = f
    m.p[k] = q
    m.seen[k] = seen
    step, way = _step_of(f)
    row = v % len(m.corrections)
    r = (1.0 - way) * m.corrections[row, step] + way * m.corrections[row, step + 1]
    return min(max(int(0.5 * (q + r) * SCALE), LEAST), SCALE - LEAST)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _learn_weights(m, v, k, expected, last, digit, rate):
    """Move the weights that have decided at node v, as row k tells."""
    seen = m.seen[k]
    state = 0 if expected < 0 else m.place[STATE]
    _learn_mixer(m.by_match, state, m.x, k, rate * (digit - logistic(m.s[k, 0])))
    _learn_mixer(m.by_node, v, m.x, k, rate * (digit - logistic(m.s[k, 1])))
    _learn_mixer(m.by_seen, seen, m.x, k, rate * (digit - logistic(m.s[k, 2])))
    _learn_mixer(m.by_last, last, m.x, k, rate * (digit - logistic(m.s[k, 3])))
    move = 0.2 * rate * (digit - m.p[k])
    for j in range(MIXERS):
        m.final[seen, j] += move * m.s[k, j]
    step, way = _step_of(m.f[k])
    row = v % len(m.corrections)
    m.corrections[row, step] += _CORRECTION_RATE * (1.0 - way) * (digit - m.corrections[row, step])
    m.corrections[row, step + 1] += _CORRECTION_RATE * way * (digit - m.corrections[row, step + 1])


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _learn_cells(m, cell, expected, digit):
    """Count the digit in all contexts."""
    for c in range(CONTEXTS):
        at = m.lines[c] + cell
        content = np.int64(m.cells[at])
        if content == 0:
            content = _EMPTY
        p = content >> 14
        n = (content >> 8) & _LIMIT
        h = content & 255
        m.maps[c, h] += _MAP_RATE * (digit - m.maps[c, h])
        p += ((_ONES if digit else 0) - p) * _SHARE[n] >> 16
        n = min(n + 1, _LIMIT)
        h = h << 1 | digit
        if h > 255:
            h = h & 127 | 128
        m.cells[at] = p << 14 | n << 8 | h
    if expected >= 0:
        state = m.place[STATE]
        m.match_map[state] += _MATCH_RATE * ((expected == digit) - m.match_map[state])


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _before(m, tree, net):
    """Look at what has been read before the next symbol is predicted; return the guess of the match, or -1."""
    basic_contexts(m, tree.role)
    follow_line(m, tree.role)
    line_contexts(m)
    guess = match(m)
    m.place[STATE] = state_of_match(m.place[LENGTH], m.place[MISSES])
    if len(net.V) > 1:
        walk.predict(net.a, net.w, net.pi)
        masses(tree.child, net)
    return guess


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _decide_symbol(mode, y, guess, m, tree, net, coder):
    """Decide the digits of symbol y one after the other, or decode them; return the symbol and its bits.

    The bits are 0 unless the mode is SCORE.
    """
    last = _row_of_last(m)
    cost = 0.0
    v = len(tree.child) - 1
    k = 0
    while v >= 0:
        if k % GROUP == 0:
            _look_up(m, v)
        expected = expected_digit(tree, guess, v, k)
        p = _decide(m, tree, v, k, expected, last, net)
        digit = decode(coder, p) if mode == DECODE else tree.digit[y, k]
        if mode == ENCODE:
            encode(coder, digit, p)
        if mode == SCORE:
            cost -= math.log2((p if digit else SCALE - p) / SCALE)
        v = tree.child[v, digit]
        k += 1
    return ~v, cost


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def _learn_symbol(mixing, y, guess, m, tree):
    """Learn the digits of symbol y: the cells, and the weights too if these have decided."""
    last = _row_of_last(m)
    rate = _rate(m)
    for k in range(tree.depth[y]):
        v = tree.node[y, k]
        digit = tree.digit[y, k]
        expected = expected_digit(tree, guess, v, k)
        if k % GROUP == 0:
            _claim(m, v)
        if mixing:
            _learn_weights(m, v, k, expected, last, digit, rate)
        _learn_cells(m, tree.cell[v], expected, digit)
    if m.place[HERE] >= 0:
        m.last[m.place[HERE]] = m.place[T]


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def run(mode, x, chi, m, tree, net, coder, bits, stop):
    """Read symbols and learn from them, digit by digit, and return how many were read.

    Args:
        mode: READ learns the cells alone, SCORE the weights too and the bits, ENCODE writes the
            code, DECODE reads it; with FROZEN added nothing is learned, and the memory keeps but
            what was read.
        x: (T,) symbols; written with DECODE.
        chi: (T,) whether the symbol is to be predicted: where not, the cells alone learn.
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


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def distribution(m, tree, net, mass, p):
    """Write the probabilities p (A,) of the next symbol; mass (A-1,) and the place of the memory change too."""
    guess = _before(m, tree, net)
    last = _row_of_last(m)
    p[0] = 1.0  # of the only symbol, if there is no decision
    for v in range(len(tree.child) - 1, -1, -1):
        if v == len(tree.child) - 1:
            mass[v] = 1.0
        expected = -1
        if guess >= 0:
            for k in range(tree.depth[guess]):
                if tree.node[guess, k] == v:
                    expected = tree.digit[guess, k]
        _look_up(m, tree.root[v])
        one = _decide(m, tree, v, 0, expected, last, net) / SCALE
        for digit in range(2):
            behind = tree.child[v, digit]
            q = mass[v] * (one if digit else 1.0 - one)
            if behind < 0:
                p[~behind] = q
            else:
                mass[behind] = q
