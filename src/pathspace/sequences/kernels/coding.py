"""The arithmetic coder, compiled, and what codes by a network alone; `mixing` codes by contexts too.

A symbol is coded decision by decision: at a node of the tree of `decisions` its digit is 0 or 1.
The coder keeps an interval [low, high] of 56 bits, splits it in the proportion of p, the
probability of digit 1, and puts out the leading bytes that are settled. Encoder and decoder run the
very same code, which differs only in where the digit comes from.

Alphabet of this module: A symbols, N units, t symbols read so far.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels import walk
from pathspace.sequences.kernels.machine_code import njit

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

READ, SCORE, ENCODE, DECODE = range(4)
FROZEN = 4
"""Added to a mode: nothing is learned."""
NOWHERE = -1
"""The symbol after which a kernel stops, if there is none."""

SCALE = 1 << 30
"""p is a whole number of so many parts."""
LEAST = 1 << 8
"""Of SCALE: a digit costs 22 bits at most."""
FARTHEST = 12.0
"""Log-odds lie between this and its negative."""
_BYTE = 48
_INTERVAL = (1 << 56) - 1


class Network(NamedTuple):
    """A network at some place of a text; without units there is none.

    Args:
        tau: (A, E) transition weights.
        w: (N+1, A) writing weights.
        first: (N+2,) of the graph.
        sources: (E,) of the graph.
        kind: (2,) whether it is persistent; whether it is logistic.
        V: (N+1,) potentials, changed.
        a: (N+1,) activities, changed.
        pi: (A,) probabilities of the next symbol, changed.
        mass: (A-1,) probability to get to each node, changed.
    """

    tau: Array
    w: Array
    first: Integers
    sources: Integers
    kind: NDArray[np.bool_]
    V: Array
    a: Array
    pi: Array
    mass: Array


class Coder(NamedTuple):
    """The arithmetic coder.

    Args:
        interval: (3,) low, high, and the part of the code that the decoder has in hand.
        at: (1,) bytes of the content that have been written or read.
        content: the code; zeros follow it.
    """

    interval: Integers
    at: Integers
    content: NDArray[np.uint8]


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def chances(child, v, net):
    """Return the probability that the network gives to each of the two sides of node v."""
    left = child[v, 0]
    right = child[v, 1]
    zero = net.pi[~left] if left < 0 else net.mass[left]
    return zero, net.pi[~right] if right < 0 else net.mass[right]


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def network_log_odds(child, v, net):
    """Return log of the odds that the network gives to digit 1 at node v."""
    zero, one = chances(child, v, net)
    return min(max(math.log((one + 1e-300) / (zero + 1e-300)), -FARTHEST), FARTHEST)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def masses(child, net):
    """Write the probability that the network gives to each node: that of the symbols behind it."""
    for v in range(len(child)):
        zero, one = chances(child, v, net)
        net.mass[v] = zero + one


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def encode(coder, digit, p):
    """Narrow the interval to the side of the digit, and put out the bytes that are settled."""
    low = coder.interval[0]
    high = coder.interval[1]
    middle = low + ((high - low) >> 30) * p + (((high - low) & (SCALE - 1)) * p >> 30)
    if digit:
        high = middle
    else:
        low = middle + 1
    while low >> _BYTE == high >> _BYTE:
        coder.content[coder.at[0]] = low >> _BYTE
        coder.at[0] += 1
        low = low << 8 & _INTERVAL
        high = high << 8 & _INTERVAL | 255
    coder.interval[0] = low
    coder.interval[1] = high


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False, forceinline=True)
def decode(coder, p):
    """Return the digit in whose side the code lies, and narrow the interval as the encoder did."""
    low = coder.interval[0]
    high = coder.interval[1]
    code = coder.interval[2]
    middle = low + ((high - low) >> 30) * p + (((high - low) & (SCALE - 1)) * p >> 30)
    digit = 1 if code <= middle else 0
    if digit:
        high = middle
    else:
        low = middle + 1
    while low >> _BYTE == high >> _BYTE:
        more = int(coder.content[coder.at[0]]) if coder.at[0] < len(coder.content) else 0
        coder.at[0] += 1
        low = low << 8 & _INTERVAL
        high = high << 8 & _INTERVAL | 255
        code = code << 8 & _INTERVAL | more
    coder.interval[0] = low
    coder.interval[1] = high
    coder.interval[2] = code
    return digit


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def run(mode, x, t, tree, net, coder, stop):
    """Read symbols that the network predicts, mixed with the uniform distribution, and return how many were read.

    Args:
        mode: ENCODE writes the code, DECODE reads it.
        x: (T,) symbols; written with DECODE.
        t: symbols of the text before these.
        tree: the decisions.
        net: the network, changed.
        coder: the coder, changed; its content has room for 8 bytes a decision.
        stop: the symbol after which no more are read, or NOWHERE.
    """
    A = len(net.pi)
    for at in range(len(x)):
        walk.predict(net.a, net.w, net.pi)
        # (1 - 1/(t+2)) pi_t(y) + 1/((t+2) A)
        share = 1.0 / (t + at + 2)
        for y in range(A):
            net.pi[y] = (1.0 - share) * net.pi[y] + share / A
        masses(tree.child, net)
        v = len(tree.child) - 1
        k = 0
        while v >= 0:
            zero, one = chances(tree.child, v, net)
            p = min(max(int(one / (zero + one) * SCALE), LEAST), SCALE - LEAST)
            digit = decode(coder, p) if mode == DECODE else tree.digit[x[at], k]
            if mode == ENCODE:
                encode(coder, digit, p)
            v = tree.child[v, digit]
            k += 1
        if mode == DECODE:
            x[at] = ~v
        walk.read(x[at], net.tau, net.first, net.sources, net.kind[0], net.kind[1], net.V, net.a)
        if x[at] == stop:
            return at + 1
    return len(x)
