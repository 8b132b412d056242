"""Context tree weighting over any alphabet, by binary decomposition.

Alphabet of this module: A symbols, D depth of the contexts, b binary digits of a symbol.

A symbol is coded digit by digit, the highest first. Each node of the binary tree of digits has a
context tree of its own, whose contexts are the last 0..D symbols; so every decision is weighted
over all context lengths:

    P_w(s) = P_e(s)                                   if the context s has length D
           = 1/2 P_e(s) + 1/2 prod_y P_w(y s)         otherwise
    P_e(a zeros, b ones) = Krichevsky-Trofimov: the next digit is 1 with probability
                           (b + 1/2) / (a + b + 1)

Source: Willems, Shtarkov, Tjalkens, *The context-tree weighting method: basic properties*, 1995. A
sequence begins in a context of a symbol that is not in the alphabet.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels.machine_code import njit

IntArray = NDArray[np.int64]


@njit(cache=True)
def _place(keys, key):
    """Return where a key is, or where it would be, in an open hash table; 0 marks an empty place."""
    mask = len(keys) - 1
    # a multiplication spreads neighbouring keys, as Knuth proposes
    place = ((key * -7046029254386353131) >> 20) & mask
    while keys[place] != 0 and keys[place] != key:
        place = (place + 1) & mask
    return place


@njit(cache=True)
def _grow(keys, zeros, ones, beta):
    larger = np.zeros(2 * len(keys), np.int64)
    zeros2 = np.zeros(len(larger))
    ones2 = np.zeros(len(larger))
    beta2 = np.zeros(len(larger))
    for k in range(len(keys)):
        if keys[k] != 0:
            place = _place(larger, keys[k])
            larger[place] = keys[k]
            zeros2[place] = zeros[k]
            ones2[place] = ones[k]
            beta2[place] = beta[k]
    return larger, zeros2, ones2, beta2


@njit(cache=True)
def _key(context, node, d):
    """Return the key of a context of length d in the tree of a node; 0 is the mark of an empty place."""
    key = (context ^ (node * 3202034522624059733)) * 2685821657736338717 + d
    return key if key != 0 else 1


@njit(cache=True)
def _learn(digit, path, zeros, ones, beta):
    """Return the probability P_w that a digit had, and count it along a path of the tree."""
    depth = len(path) - 1
    p_child = 0.0
    for d in range(depth, -1, -1):
        place = path[d]
        total = zeros[place] + ones[place]
        p = ((ones[place] if digit else zeros[place]) + 0.5) / (total + 1.0)
        if d == depth:
            p_child = p
        else:
            # P_w(digit) = (beta P_e(digit) + P_w,child(digit)) / (beta + 1)
            share = 1.0 / (1.0 + math.exp(-beta[place]))
            weighted = share * p + (1.0 - share) * p_child
            beta[place] = min(max(beta[place] + math.log(p / p_child), -500.0), 500.0)
            p_child = weighted
        if digit:
            ones[place] += 1.0
        else:
            zeros[place] += 1.0
    return p_child


@njit(cache=True)
def _run(x, digits, depth, first, A):
    """Return minus the log2-probability of x[first:], the tree growing along all of x."""
    keys = np.zeros(1 << 12, np.int64)
    # log of P_e over the product of the P_w of the children
    zeros = np.zeros(len(keys))
    ones = np.zeros(len(keys))
    beta = np.zeros(len(keys))
    used = 0
    bits = 0.0
    path = np.zeros(depth + 1, np.int64)
    contexts = np.zeros(depth + 1, np.int64)
    for t in range(len(x)):
        context = 1
        for d in range(depth + 1):
            contexts[d] = context
            before = x[t - 1 - d] if t - 1 - d >= 0 else A
            context = context * 6364136223846793005 + (before + 1) * 1442695040888963407 + 1
        node = 1
        for k in range(digits - 1, -1, -1):
            digit = (x[t] >> k) & 1
            for d in range(depth + 1):
                key = _key(contexts[d], node, d)
                place = _place(keys, key)
                if keys[place] == 0:
                    if 2 * (used + 1) > len(keys):
                        keys, zeros, ones, beta = _grow(keys, zeros, ones, beta)
                        for e in range(d):
                            path[e] = _place(keys, _key(contexts[e], node, e))
                        place = _place(keys, key)
                    keys[place] = key
                    used += 1
                path[d] = place
            p = _learn(digit, path, zeros, ones, beta)
            if t >= first:
                bits -= math.log2(p)
            node = 2 * node + digit
    return bits


def context_tree_bits(x: IntArray, A: int, depth: int = 8, seen: IntArray | None = None) -> float:
    """Return the bits a sequence takes, coded by context tree weighting that goes on learning.

    Args:
        x: symbols 0..A-1.
        A: number of symbols.
        depth: D, the longest context.
        seen: symbols learned from before, or None.

    Raises:
        ValueError: if the depth is negative or a symbol is not below A.

    Example:
        >>> round(context_tree_bits(np.array([0, 1]), 2, depth=0), 9)  # Krichevsky-Trofimov: 1/2 * 1/4
        3.0
    """
    if depth < 0:
        raise ValueError(f"the depth must be at least 0, got {depth}")
    seen = np.zeros(0, np.int64) if seen is None else seen
    whole = np.concatenate([seen, x]).astype(np.int64)
    if len(whole) and not 0 <= whole.min() <= whole.max() < A:
        raise ValueError(f"symbols must lie in 0..{A - 1}")
    return float(_run(whole, max(A - 1, 0).bit_length(), depth, len(seen), A))
