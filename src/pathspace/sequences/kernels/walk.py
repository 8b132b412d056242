"""One symbol at a time: what sampling, prediction and the arithmetic coder need.

Encoder and decoder call the very same compiled functions, so that both see the same probabilities
bit by bit.

Alphabet of this module: A symbols, N units, unit 0 always on, E edges sorted by target.
"""

from __future__ import annotations

import math

from pathspace.sequences.kernels.elementary import exponential, squash
from pathspace.sequences.kernels.machine_code import njit


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def read(y, tau, first, sources, persistent, logistic, V, a):
    """Read symbol y: replace the potentials V and the activities a, both (N+1,)."""
    for j in range(1, len(V)):
        # V_j^{t+1} = [PCNN] V_j^t + sum_i tau[i,j,x_t] a_i^t
        total = V[j] if persistent else 0.0
        for e in range(first[j], first[j + 1]):
            total += tau[y, e] * a[sources[e]]
        V[j] = total
    squash(V, logistic, a)


@njit(error_model="numpy", fastmath=False, cache=True, owns_arrays=False)
def predict(a, w, pi):
    """Write pi (A,), the softmax over y of sum_i a_i w[i, y]."""
    for y in range(len(pi)):
        pi[y] = 0.0
    for i in range(len(a)):
        for y in range(len(pi)):
            pi[y] += a[i] * w[i, y]
    top = -math.inf
    for y in range(len(pi)):
        top = max(top, pi[y])
    total = 0.0
    for y in range(len(pi)):
        pi[y] = exponential(pi[y] - top)
        total += pi[y]
    for y in range(len(pi)):
        pi[y] /= total
