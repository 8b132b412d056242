"""Linear maps of the squared network, on rows; W is squared on the way.

Letters: W ``[K, D]``, x ``[R, D]`` rows that enter, y and g ``[R, K]`` rows that leave and their gradients.
Sums may be taken in any order (``reassoc``): powers of two change no bit of them in any.
"""

from __future__ import annotations

from numba import njit

REORDER = {"reassoc", "contract", "nsz", "arcp"}


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def apply_square(W, x, y):
    """Y += W^2 x, for one row."""
    for k in range(W.shape[0]):
        total = x.dtype.type(0)
        for d in range(W.shape[1]):
            total += W[k, d] * W[k, d] * x[d]
        y[k] += total


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def apply_square_transposed(W, g, x):
    """X += (W^2)^T g, for one row; four rows of W at a time."""
    K, D = W.shape
    whole = K - K % 4
    for k in range(0, whole, 4):
        g0, g1, g2, g3 = g[k], g[k + 1], g[k + 2], g[k + 3]
        for d in range(D):
            x[d] += (W[k, d] * W[k, d] * g0 + W[k + 1, d] * W[k + 1, d] * g1) + (
                W[k + 2, d] * W[k + 2, d] * g2 + W[k + 3, d] * W[k + 3, d] * g3
            )
    for k in range(whole, K):
        for d in range(D):
            x[d] += W[k, d] * W[k, d] * g[k]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def apply_square_to_rows(W, x, y, s):
    """y_r += W^2 x_r; ``s [4, D]`` is memory for squared rows."""
    R, D = x.shape
    if R == 1:
        apply_square(W, x[0], y[0])
        return
    whole = R - R % 4
    for k in range(W.shape[0]):
        square = s[0]
        for d in range(D):
            square[d] = W[k, d] * W[k, d]
        for r in range(0, whole, 4):
            zero = x.dtype.type(0)
            t0, t1, t2, t3 = zero, zero, zero, zero
            for d in range(D):
                t0 += square[d] * x[r, d]
                t1 += square[d] * x[r + 1, d]
                t2 += square[d] * x[r + 2, d]
                t3 += square[d] * x[r + 3, d]
            y[r, k] += t0
            y[r + 1, k] += t1
            y[r + 2, k] += t2
            y[r + 3, k] += t3
        for r in range(whole, R):
            t0 = x.dtype.type(0)
            for d in range(D):
                t0 += square[d] * x[r, d]
            y[r, k] += t0


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def apply_square_transposed_to_rows(W, g, x, s):
    """x_r += (W^2)^T g_r; ``s [4, D]`` is memory for squared rows."""
    R, D = x.shape
    K = W.shape[0]
    if R == 1:
        apply_square_transposed(W, g[0], x[0])
        return
    whole = K - K % 4
    for k in range(0, whole, 4):
        for i in range(4):
            for d in range(D):
                s[i, d] = W[k + i, d] * W[k + i, d]
        for r in range(R):
            g0, g1, g2, g3 = g[r, k], g[r, k + 1], g[r, k + 2], g[r, k + 3]
            row = x[r]
            for d in range(D):
                row[d] += (s[0, d] * g0 + s[1, d] * g1) + (s[2, d] * g2 + s[3, d] * g3)
    for k in range(whole, K):
        for r in range(R):
            for d in range(D):
                x[r, d] += W[k, d] * W[k, d] * g[r, k]
