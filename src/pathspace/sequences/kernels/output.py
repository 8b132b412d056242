"""The output layer over all predicted positions: probabilities and the sums over them, by matrix products.

Alphabet of this module: P predicted positions, A symbols, N units, unit 0 always on.

    a[p, i]   activities at the predicted positions      w[i, y]    writing weights
    x[p]      symbols to be predicted                    pi[p, y]   predicted probabilities
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .elementary import exponential

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_BLOCK = 1024


@njit(error_model="numpy", cache=True)
def _normalise(scores, x, log_seen):
    """Replace each row of scores by its softmax and write the log-probability of the symbol x[p]."""
    for p in range(scores.shape[0]):
        row = scores[p]
        top = row[0]
        for y in range(1, len(row)):
            top = max(top, row[y])
        seen = row[x[p]] - top
        for y in range(len(row)):
            row[y] = exponential(row[y] - top)
        total = 0.0
        for y in range(len(row)):
            total += row[y]
        for y in range(len(row)):
            row[y] /= total
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
    for begin in range(0, len(a), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        # pi_t(y) = softmax_y( sum_i a_i^t w[i,y] )
        np.matmul(a[part], w, out=pi[part])
        _normalise(pi[part], x[part], log_seen[part])
    return log_seen


def writing_gradient(a: Array, pi: Array, x: Integers) -> Array:
    """Return W[i, y] = sum over the predicted t of a_i^t ([x_t = y] - pi_t(y)), (N+1, A)."""
    W = np.zeros((a.shape[1], pi.shape[1]))
    for begin in range(0, len(a), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        surprise = -pi[part]
        surprise[np.arange(len(surprise)), x[part]] += 1
        W += a[part].T @ surprise
    return W


def writing_metric(a: Array, pi: Array) -> tuple[Array, Array]:
    """Return h_ii[i, y] and h_0i[i, y] without damping, both (N+1, A)."""
    diagonal, cross = np.zeros((2, a.shape[1], pi.shape[1]))
    for begin in range(0, len(a), _BLOCK):
        active, p = a[begin : begin + _BLOCK], pi[begin : begin + _BLOCK]
        spread = p * (1 - p)
        # h_ii^y = sum_t (a_i^t)^2 pi_t(y) (1 - pi_t(y)),  h_0i^y = sum_t a_i^t pi_t(y) (1 - pi_t(y))
        diagonal += (active**2).T @ spread
        cross += active.T @ spread
    return diagonal, cross


def activity_gradient(w: Array, pi: Array, x: Integers) -> tuple[Array, Array]:
    """Return u[p, i] = w[i, x_t] - E w[i, y] and Var w[i, y], y drawn from pi_t, both (P, N+1)."""
    u, variance = np.empty((2, len(pi), len(w)))
    columns, squares = np.ascontiguousarray(w.T), np.ascontiguousarray(w.T**2)
    for begin in range(0, len(pi), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        mean = pi[part] @ columns
        np.subtract(columns[x[part]], mean, out=u[part])
        np.matmul(pi[part], squares, out=variance[part])
        variance[part] -= mean**2
    # rounding may leave a variance of -1e-17
    return u, np.maximum(variance, 0.0, out=variance)
