"""Small positive-definite systems, one per unit and symbol, in packed triangles.

Alphabet of this module: A symbols, N units, E edges sorted by target.
"""

from __future__ import annotations

import math

import numpy as np

from pathspace.sequences.kernels.machine_code import njit


@njit(error_model="numpy", cache=True)
def solve_packed(G, M, first, triangle, damping, step):
    """Write (M + diag(damping))^-1 G for every unit and symbol, by Cholesky; NaN where it is not positive.

    Args:
        G: (A, E) gradients.
        M: (A, packed lower triangles) metrics over the edges into each unit.
        first: (N+2,) edges into each unit.
        triangle: (N+2,) offsets of the triangles.
        damping: (A, E) added to the diagonal.
        step: (A, E), written.
    """
    widest = 0
    for j in range(1, len(first) - 1):
        widest = max(widest, first[j + 1] - first[j])
    L = np.zeros((widest, widest))
    z = np.zeros(widest)
    for y in range(G.shape[0]):
        for j in range(1, len(first) - 1):
            size = first[j + 1] - first[j]
            edge = first[j]
            entry = triangle[j]
            for p in range(size):
                total_z = G[y, edge + p]
                for q in range(p + 1):
                    total = M[y, entry]
                    entry += 1
                    for k in range(q):
                        total -= L[p, k] * L[q, k]
                    if q < p:
                        L[p, q] = total / L[q, q]
                    else:
                        total += damping[y, edge + p]
                        L[p, p] = math.sqrt(total) if total > 0.0 else math.nan
                for k in range(p):
                    total_z -= L[p, k] * z[k]
                z[p] = total_z / L[p, p]
            for p in range(size - 1, -1, -1):
                total = z[p]
                for k in range(p + 1, size):
                    total -= L[k, p] * step[y, edge + k]
                step[y, edge + p] = total / L[p, p]
