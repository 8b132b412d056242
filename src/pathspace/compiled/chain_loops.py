"""What ``paths.chain_shares`` does between products of matrices, in few compiled calls.

Letters: l layer, from the last one to the first in all tables; n examples, m rows of seeds, D units side by side;
z = W h + b the values of a layer, h what enters it; g = gamma^2; delta gradients of the seeded values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER, apply_square, apply_square_transposed
from pathspace.compiled.memory import matrix_at, vector_at

# columns of the table of layers: sizes, where its units lie among all, and addresses; ``SPREAD`` is that of the layer
# that makes what enters this one, as is ``GAMMA``, and both are zero for the first layer
UNITS, WIDTH, PLACE, WEIGHT, BIAS, SPREAD, ENTERING, GAMMA, DELTA, LEFT, RIGHT = range(11)
SIZE = 11


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def paths(layers, alpha, psi, leaving):
    """G of what enters every layer, psi of all units, and (1 - alpha) psi; the last layer's psi is one."""
    like, rest = psi, psi.dtype.type(1 - alpha)
    last = len(layers) - 1
    for i in range(last, 0, -1):  # from the first layer on: g of its units enters the layer above
        t, above = layers[i], layers[i - 1]
        W = matrix_at(t[WEIGHT], t[UNITS], t[WIDTH], like)
        g, spread = vector_at(above[GAMMA], t[UNITS], like), vector_at(above[SPREAD], t[UNITS], like)
        if i == last:
            for k in range(len(W)):
                total = like.dtype.type(0)
                for d in range(W.shape[1]):
                    total += W[k, d] * W[k, d]
                g[k] = total
        else:
            g[:] = 0
            apply_square(W, vector_at(t[GAMMA], t[WIDTH], like), g)
        if t[BIAS] != 0:
            b = vector_at(t[BIAS], t[UNITS], like)
            for k in range(len(g)):
                g[k] += b[k] * b[k]
        for k in range(len(g)):
            g[k] = rest * g[k] + like.dtype.type(alpha) * spread[k]
    psi[: layers[0, UNITS]] = 1
    for i in range(last):
        t = layers[i]
        below = psi[t[PLACE] + t[UNITS] : t[PLACE] + t[UNITS] + t[WIDTH]]
        below[:] = 0
        W = matrix_at(t[WEIGHT], t[UNITS], t[WIDTH], like)
        apply_square_transposed(W, psi[t[PLACE] : t[PLACE] + t[UNITS]], below)
        for k in range(len(below)):
            below[k] *= rest
    for k in range(len(psi)):
        leaving[k] = rest * psi[k]


@njit(error_model="numpy", cache=True)
def seed(layers, psi, weight, drawn, wide, order, pairs, chosen, signs):
    """Fill delta with seeds: rows of uncorrelated signs times the root of weight psi, as ``paths.signs`` makes them.

    Args:
        layers: table of layers.
        psi: of the units that have seeds.
        weight: factor of the sums of squares.
        drawn: random bytes, eight signs each.
        wide: how many second factors there are.
        order: the examples in the order in which they are taken.
        pairs: whether the first half of what is taken is paired with the second.
        chosen: the examples of the rows of seeds, to be filled; those of a pair are next to each other.
        signs: memory ``[tall + wide, D]``.
    """
    m, tall = len(chosen), len(signs) - wide
    for r in range(m):
        chosen[r] = order[r % 2 * (m // 2) + r // 2] if pairs else order[r]
    D = len(psi)
    one = signs.dtype.type(1)
    flat = signs.reshape(signs.size)
    whole = len(flat) // 8
    for i in range(whole):
        for j in range(8):
            flat[8 * i + j] = 2 * (drawn[i] >> j & 1) - 1
    for i in range(8 * whole, len(flat)):
        flat[i] = one if drawn[i >> 3] >> (i & 7) & 1 else -one
    for c in range(D):
        size = np.sqrt(psi[c] * signs.dtype.type(weight))
        for r in range(tall):
            signs[r, c] *= size
    for i in range(len(layers)):
        t = layers[i]
        if t[PLACE] >= D:
            return
        delta = matrix_at(t[DELTA], m, t[UNITS], signs)
        for r in range(m):
            row = r // 2 if pairs else chosen[r]
            a = signs[row // wide, t[PLACE] : t[PLACE] + t[UNITS]]
            b = signs[tall + row % wide, t[PLACE] : t[PLACE] + t[UNITS]]
            own = delta[r]
            for k in range(len(own)):
                own[k] = a[k] * b[k]


@njit(error_model="numpy", cache=True)
def gate(layers, i, back, chosen, count, seeded):
    """Delta of layer i: its seeds, if it has some, and what comes back through the units that are open."""
    t, above = layers[i], layers[i - 1]
    delta = matrix_at(t[DELTA], len(back), t[UNITS], back)
    h = matrix_at(above[ENTERING], count, t[UNITS], back)
    for r in range(len(back)):
        own, gates, x = delta[r], h[chosen[r]], back[r]
        if seeded:
            for k in range(len(own)):
                own[k] += x[k] if gates[k] > 0 else 0
        else:
            for k in range(len(own)):
                own[k] = x[k] if gates[k] > 0 else 0


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def square(layers, chosen, count, address, like):
    """The factors of sum over i of (delta^i)^2 (h^i)^2, and those sums for biases; delta is overwritten."""
    biases = vector_at(address, len(like), like)
    biases[:] = 0
    for i in range(len(layers)):
        t = layers[i]
        delta = matrix_at(t[DELTA], len(chosen), t[UNITS], biases)
        h = matrix_at(t[ENTERING], count, t[WIDTH], biases)
        right = matrix_at(t[RIGHT], len(chosen), t[WIDTH], biases)
        own = biases[t[PLACE] : t[PLACE] + t[UNITS]]
        for r in range(len(chosen)):
            d, x, y = delta[r], h[chosen[r]], right[r]
            for k in range(len(d)):
                d[k] *= d[k]
                own[k] += d[k]
            for k in range(len(x)):
                y[k] = x[k] * x[k]


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def square_pairs(layers, chosen, count, address, like):
    """The factors of the sum over pairs of (s v + t u)^2 / 4 = (s^2 v^2 + t^2 u^2 + 2 (s t) (u v)) / 4.

    s and u are sums of delta and h in a pair, which are two rows, and t and v differences.
    """
    biases = vector_at(address, len(like), like)
    biases[:] = 0
    half = len(chosen) // 2
    quarter = biases.dtype.type(0.25)
    for i in range(len(layers)):
        t = layers[i]
        delta = matrix_at(t[DELTA], len(chosen), t[UNITS], biases)
        h = matrix_at(t[ENTERING], count, t[WIDTH], biases)
        left = matrix_at(t[LEFT], 3 * half, t[UNITS], biases)
        right = matrix_at(t[RIGHT], 3 * half, t[WIDTH], biases)
        own = biases[t[PLACE] : t[PLACE] + t[UNITS]]
        for r in range(half):
            a, b = delta[2 * r], delta[2 * r + 1]
            first, second, third = left[r], left[half + r], left[2 * half + r]
            for k in range(len(a)):
                s, d = a[k] + b[k], a[k] - b[k]
                own[k] += d * d
                first[k], second[k], third[k] = quarter * s * s, quarter * d * d, 2 * quarter * s * d
            x, y = h[chosen[2 * r]], h[chosen[2 * r + 1]]
            first, second, third = right[r], right[half + r], right[2 * half + r]
            for k in range(len(x)):
                u, v = x[k] + y[k], x[k] - y[k]
                first[k], second[k], third[k] = v * v, u * u, u * v


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def spread(address, count, centred, out):
    """The mean square or the variance of every column of a matrix ``[n, units]`` that lies at an address."""
    z, mean = matrix_at(address, count, len(out), out), np.zeros_like(out)
    share = z.dtype.type(1 / len(z))
    out[:] = 0
    if centred:
        for r in range(len(z)):
            for k in range(len(out)):
                mean[k] += share * z[r, k]
    for r in range(len(z)):
        for k in range(len(out)):
            out[k] += share * (z[r, k] - mean[k]) * (z[r, k] - mean[k])
