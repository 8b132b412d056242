"""The output layer over all predicted positions: probabilities and the sums over them, by matrix products.

Alphabet of this module: P predicted positions, A symbols, N units, unit 0 always on.

    a[p, i]   activities at the predicted positions      w[i, y]    writing weights
    x[p]      symbols to be predicted                    pi[p, y]   predicted probabilities
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels.elementary import exponential
from pathspace.sequences.kernels.machine_code import njit

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def _block(A: int) -> int:
    """Return how many positions to take at a time: small products of matrices have a faster way of their own."""
    return max(128, 12288 // A)


@njit(error_model="numpy", fastmath=False, cache=True)
def _largest(row):
    """Return the largest entry, found in four interleaved chains; a NaN is passed over."""
    t0 = t1 = t2 = t3 = row[0]
    whole = len(row) // 4 * 4
    for y in range(0, whole, 4):
        t0 = row[y] if row[y] > t0 else t0
        t1 = row[y + 1] if row[y + 1] > t1 else t1
        t2 = row[y + 2] if row[y + 2] > t2 else t2
        t3 = row[y + 3] if row[y + 3] > t3 else t3
    for y in range(whole, len(row)):
        t0 = row[y] if row[y] > t0 else t0
    return max(max(t0, t1), max(t2, t3))


@njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, cache=True)
def _normalise(scores, x, log_seen):
    """Replace each row of scores by its softmax and write the log-probability of the symbol x[p]."""
    for p in range(scores.shape[0]):
        row = scores[p]
        top = _largest(row)
        seen = row[x[p]] - top
        for y in range(len(row)):
            row[y] = exponential(row[y] - top)
        total = 0.0
        for y in range(len(row)):
            total += row[y]
        scale = 1.0 / total
        for y in range(len(row)):
            row[y] *= scale
        log_seen[p] = seen - math.log(total)


def predictions(a: Array, w: Array, x: Integers, pi: Array) -> Array:
    """Fill pi and return log pi_t(x_t) (P,) in nats; NaN where the scores are not finite.

    Args:
        a: (P, N+1) activities at the predicted positions.
        w: (N+1, A) writing weights.
        x: (P,) symbols to be predicted.
        pi: (P, A), written.
    """
    log_seen = np.empty(len(a))
    size = _block(pi.shape[1])
    for begin in range(0, len(a), size):
        part = slice(begin, begin + size)
        # pi_t(y) = softmax_y( sum_i a_i^t w[i,y] )
        np.matmul(a[part], w, out=pi[part])
        _normalise(pi[part], x[part], log_seen[part])
    return log_seen


@njit(error_model="numpy", cache=True)
def _add_seen(a, x, W):
    """Add a[p] to the row x[p] of W, (A, N+1)."""
    for p in range(len(x)):
        row = W[x[p]]
        active = a[p]
        for i in range(len(active)):
            row[i] += active[i]


def log_seen(a: Array, w: Array, x: Integers) -> Array:
    """Return log pi_t(x_t) (P,) as `predictions` does, with one block of pi at a time in memory."""
    size = _block(w.shape[1])
    found = np.empty(len(a))
    pi = np.empty((size, w.shape[1]))
    for begin in range(0, len(a), size):
        part = slice(begin, begin + size)
        found[part] = predictions(a[part], w, x[part], pi[: len(a[part])])
    return found


def writing_gradient(a: Array, pi: Array, x: Integers) -> Array:
    """Return W[i, y] = sum over the predicted t of a_i^t ([x_t = y] - pi_t(y)), (N+1, A)."""
    W = np.zeros((pi.shape[1], a.shape[1]))
    size = _block(pi.shape[1])
    for begin in range(0, len(a), size):
        part = slice(begin, begin + size)
        # block by block, so that what is seen and what is expected cancel before they grow large
        _add_seen(a[part], x[part], W)
        W -= pi[part].T @ a[part]
    return np.ascontiguousarray(W.T)


def writing_metric(a: Array, pi: Array) -> tuple[Array, Array]:
    """Return h_ii[i, y] and h_0i[i, y] without damping, both (N+1, A)."""
    diagonal, cross = np.zeros((2, a.shape[1], pi.shape[1]))
    size = _block(pi.shape[1])
    buffer = np.empty((size, pi.shape[1]))
    for begin in range(0, len(a), size):
        active = a[begin : begin + size]
        p = pi[begin : begin + size]
        spread = np.subtract(1, p, out=buffer[: len(p)])
        spread *= p
        # h_ii^y = sum_t (a_i^t)^2 pi_t(y) (1 - pi_t(y)),  h_0i^y = sum_t a_i^t pi_t(y) (1 - pi_t(y))
        diagonal += (active**2).T @ spread
        cross += active.T @ spread
    return diagonal, cross


def writing_fisher(a: Array, pi: Array) -> Array:
    """Return the Fisher matrix of all writing weights without damping, ((N+1) A, (N+1) A), rows as in w.ravel()."""
    units = a.shape[1]
    A = pi.shape[1]
    matrix = np.zeros((units * A, units * A))
    own = np.zeros((A, units, units))
    size = _block(A)
    for begin in range(0, len(a), size):
        active = a[begin : begin + size]
        p = pi[begin : begin + size]
        # I[i,y; k,z] = sum_t chi_t a_i^t a_k^t pi_t(y) ([y = z] - pi_t(z))    (63)
        expected = (active[:, :, None] * p[:, None, :]).reshape(len(p), -1)
        matrix -= expected.T @ expected
        for y in range(A):
            # apart, as a difference of sums would lose a pi_t(y) near 1
            own[y] += (active * (p[:, y] * (1 - p[:, y]))[:, None]).T @ active
    by_symbol = matrix.reshape(units, A, units, A)
    for y in range(A):
        by_symbol[:, y, :, y] = own[y]
    return matrix


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _centre(mean, square, columns, x):
    """Turn E w into w[i, x_t] - E w, and E w^2 into the variance, row by row."""
    for p in range(len(x)):
        seen = columns[x[p]]
        for i in range(len(seen)):
            # rounding may leave a variance of -1e-17
            square[p, i] = max(square[p, i] - mean[p, i] * mean[p, i], 0.0)
            mean[p, i] = seen[i] - mean[p, i]


def activity_gradient(w: Array, pi: Array, x: Integers, *, variance: bool) -> tuple[Array, Array]:
    """Return u[p, i] = w[i, x_t] - E w[i, y] and Var w[i, y], y drawn from pi_t, both (P, N+1).

    Without ``variance`` the second one is (0, N+1).
    """
    columns = np.ascontiguousarray(w.T)
    u = pi @ columns
    if not variance:
        return np.subtract(columns[x], u, out=u), np.zeros((0, u.shape[1]))
    squares = pi @ columns**2
    _centre(u, squares, columns, x)
    return u, squares
