"""The linear recurrence of a squared recurrent layer, with its sums over time; see ``network.recurrence``.

A sequence is kept as its first rows; the last of them stands for all later ones. Sequences of values run from the first
step on, those of gradients from the last step back.

Letters: T time, H hidden; W ``[H, H]``, S = W^2, u what enters, h states, delta their gradients.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER, apply_square, apply_square_transposed

_LOOK_EVERY = 4  # steps between two looks at whether the rest of the sequence is known


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def recurrence(W, transposed, u, ends_with_zeros, steps, h, seen):
    """Fill the first rows of h_t = S h_{t-1} + u_t, S = W^2 or its transpose, from a zero start.

    Args:
        W: the recurrent weights.
        transposed: whether S is transposed.
        u: what enters: its first rows.
        ends_with_zeros: whether the last row of u is zero: then a rest of h that is below the rounding of all rows so
            far, summed, is zero, too.
        steps: T.
        h: memory for rows.
        seen: memory for one row.

    Returns:
        (how many rows h has, whether the last is zero); (0, False) if there is no room for them.
    """
    eps = np.finfo(h.dtype).eps
    h[0] = u[0]
    seen[:] = u[0]
    n = 1
    while n < steps:
        if n == len(h):
            return 0, False
        old, new, entering = h[n - 1], h[n], u[min(n, len(u) - 1)]
        new[:] = 0
        if transposed:
            apply_square_transposed(W, old, new)
        else:
            apply_square(W, old, new)
        look = n % _LOOK_EVERY == 0 and n >= len(u)
        growth, change, tail = _bounds(old, new, entering, seen) if look else (np.inf, np.inf, np.inf)
        for i in range(len(new)):
            new[i] += entering[i]
            seen[i] += new[i]
        n += 1
        if n == steps or not look:
            continue
        # S h_{t-1} <= growth h_{t-1}: the later states differ from this one by change growth / (1 - growth) of it
        if (change == 0 and growth < np.inf) or (growth < 1 and change * growth <= eps * (1 - growth)):
            return n, False
        if ends_with_zeros and growth < 1 and tail * growth <= eps * (1 - growth):
            if n == len(h):
                return 0, False
            h[n] = 0
            return n + 1, True
    return n, False


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _bounds(old, passed, entering, seen):
    """Max (S h)_i / h_i, max |h'_i - h_i| / h_i and max h'_i / (sum of all h_i), with h' = S h + u."""
    growth, change, tail = 0.0, 0.0, 0.0
    for i in range(len(old)):
        new = passed[i] + entering[i]
        if old[i] > 0:
            growth = max(growth, passed[i] / old[i])
            change = max(change, abs(new - old[i]) / old[i])
        elif passed[i] != 0:  # nothing but zeros passes from a zero
            growth = np.inf
        if new > 0:
            tail = max(tail, new / (seen[i] + new))
    return growth, change, tail


@njit(error_model="numpy", cache=True)
def pairs_of(delta_rows, delta_ends_with_zeros, h_rows, steps, shift, pairs):
    """Which rows meet in the sum of delta_t h_{t - shift}^T over t, and how often; returns how many pairs."""
    n = 0
    for t in range(shift, steps):
        a, b = min(steps - 1 - t, delta_rows - 1), min(t - shift, h_rows - 1)
        if delta_ends_with_zeros and a == delta_rows - 1:
            continue
        if n > 0 and pairs[n - 1, 0] == a and pairs[n - 1, 1] == b:
            pairs[n - 1, 2] += 1
        else:
            pairs[n, 0], pairs[n, 1], pairs[n, 2] = a, b, 1
            n += 1
    return n


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def sum_of_outer_products(delta, h, pairs, out):
    """Out = sum of count delta_a h_b^T over pairs (a, b, count); four pairs at a time."""
    D = out.shape[1]
    whole = len(pairs) - len(pairs) % 4
    for k in range(len(out)):
        row = out[k]
        row[:] = 0
        for n in range(0, whole, 4):
            p = pairs[n : n + 4]
            c0 = delta[p[0, 0], k] * out.dtype.type(p[0, 2])
            c1 = delta[p[1, 0], k] * out.dtype.type(p[1, 2])
            c2 = delta[p[2, 0], k] * out.dtype.type(p[2, 2])
            c3 = delta[p[3, 0], k] * out.dtype.type(p[3, 2])
            h0, h1, h2, h3 = h[p[0, 1]], h[p[1, 1]], h[p[2, 1]], h[p[3, 1]]
            for d in range(D):
                row[d] += (c0 * h0[d] + c1 * h1[d]) + (c2 * h2[d] + c3 * h3[d])
        for n in range(whole, len(pairs)):
            c0 = delta[pairs[n, 0], k] * out.dtype.type(pairs[n, 2])
            h0 = h[pairs[n, 1]]
            for d in range(D):
                row[d] += c0 * h0[d]
