"""The passes over a text, compiled: states, backpropagation and the sums the steps are made of.

Alphabet of this module: T symbols, A in the alphabet, S sequences, N units, unit 0 always on, E
edges sorted by target, R = T + S rows of states (a sequence of length T_s has T_s + 1 states), P
predicted positions.

    x[t]         symbols of all sequences, one after the other       bounds[s]    first t of sequence s
    a[r, i]      activities, row r = t + s before x[t] is read       B, m[r, i]   gradient and modulus
    bias[y, j]   weight of the edge from unit 0 when y is read       V0[j]        start values

Dense graphs use a matrix per symbol, padded with zeros to a multiple of 8 columns. Sparse graphs
use D slots per unit, D being the largest number of edges that leave a unit: slot k of unit i holds
the target[k, i] and the weight[y, k, i] of its k-th edge, or target 0 and weight 0. Nothing is ever
stored per pair of units and time: the memory is a multiple of R (N + 1) and of A times the edges.
"""

from __future__ import annotations

import numpy as np

from pathspace.sequences.kernels.elementary import squash
from pathspace.sequences.kernels.machine_code import njit

# sums may be reordered and fused; NaN and infinity keep their meaning, so that a failed step shows
_SUMS = {"reassoc", "contract", "nsz"}
_BLOCK = 256


@njit(inline="always", error_model="numpy", fastmath=_SUMS)
def _add_product(v, rows, M, out):
    """Add sum_i v[i] M[i, :] to out, eight columns at a time in registers."""
    for j in range(0, len(out), 8):
        s0 = out[j]
        s1 = out[j + 1]
        s2 = out[j + 2]
        s3 = out[j + 3]
        s4 = out[j + 4]
        s5 = out[j + 5]
        s6 = out[j + 6]
        s7 = out[j + 7]
        for i in range(rows):
            vi = v[i]
            s0 += vi * M[i, j]
            s1 += vi * M[i, j + 1]
            s2 += vi * M[i, j + 2]
            s3 += vi * M[i, j + 3]
            s4 += vi * M[i, j + 4]
            s5 += vi * M[i, j + 5]
            s6 += vi * M[i, j + 6]
            s7 += vi * M[i, j + 7]
        out[j] = s0
        out[j + 1] = s1
        out[j + 2] = s2
        out[j + 3] = s3
        out[j + 4] = s4
        out[j + 5] = s5
        out[j + 6] = s6
        out[j + 7] = s7


@njit(inline="always")
def _copy_into(target, source):
    """Copy the values of `source` to the beginning of `target`.

    A loop, since ``target[:n] = source`` takes Numba 4 seconds to compile: its error for wrong
    shapes prints them.
    """
    for i in range(len(source)):
        target[i] = source[i]


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def states_dense(x, bounds, tau, V0, persistent, logistic, a):
    """Fill the activities a[r, i] of a dense graph.

    Args:
        x: (T,) symbols.
        bounds: (S+1,) where each sequence begins, and T.
        tau: (A, N+1, 8k) weights, column j-1 for target j, zero beyond N.
        V0: (N+1,) start values.
        persistent: whether the potential is kept (PCNN) or made anew (CNN, RNN).
        logistic: whether the squash is logistic, not tanh.
        a: (R, N+1), written.
    """
    N = len(V0) - 1
    V = np.zeros(tau.shape[2] + 1)
    for s in range(len(bounds) - 1):
        r = bounds[s] + s
        _copy_into(V, V0)
        squash(V, logistic, a[r])
        for t in range(bounds[s], bounds[s + 1]):
            # V_j^{t+1} = [PCNN] V_j^t + sum_i tau[i,j,x_t] a_i^t
            if not persistent:
                V[:] = 0.0
            _add_product(a[r], N + 1, tau[x[t]], V[1:])
            r += 1
            squash(V, logistic, a[r])


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def states_sparse(x, bounds, bias, weight, target, V0, persistent, logistic, a):
    """Fill the activities a[r, i] of a sparse graph.

    Args:
        x: (T,) symbols.
        bounds: (S+1,) where each sequence begins, and T.
        bias: (A, N+1) weights from unit 0, entry 0 zero.
        weight: (A, D, N+1) weights of the slots.
        target: (D, N+1) targets of the slots.
        V0: (N+1,) start values.
        persistent: as in `states_dense`.
        logistic: as in `states_dense`.
        a: (R, N+1), written.
    """
    N = len(V0) - 1
    V = np.zeros(N + 1)
    for s in range(len(bounds) - 1):
        r = bounds[s] + s
        _copy_into(V, V0)
        squash(V, logistic, a[r])
        for t in range(bounds[s], bounds[s + 1]):
            y = x[t]
            now = a[r]
            kept = 1.0 if persistent else 0.0
            # V_j^{t+1} = [PCNN] V_j^t + sum_i tau[i,j,x_t] a_i^t
            for j in range(N + 1):
                V[j] = kept * V[j] + bias[y, j]
            for k in range(weight.shape[1]):
                for i in range(1, N + 1):
                    V[target[k, i]] += weight[y, k, i] * now[i]
            r += 1
            squash(V, logistic, a[r])


@njit(inline="always", error_model="numpy", fastmath=_SUMS)
def _receive(logistic, persistent, a, loop, sum_B, sum_m, shift, B, m):
    """Write B^t and m^t over B^{t+1} and m^{t+1}, given all that comes through the squash."""
    kept = 1.0 if persistent else 0.0
    for i in range(1, len(a)):
        slope = a[i] * (1.0 - a[i]) if logistic else 1.0 - a[i] * a[i]
        # J_ii = [PCNN] + tau[i,i,x_t] s'_i
        J = kept + loop[i] * slope
        # B_i^t = [PCNN] B_i^{t+1} + s'_i ( chi_t (w[i,x_t] - sum_y pi_t(y) w[i,y])
        #                                   + sum_j tau[i,j,x_t] B_j^{t+1} )
        B[i] = kept * B[i] + slope * sum_B[i - shift]
        # m_i^t = s'_i^2 ( chi_t Var_{y ~ pi_t}(w[i,y]) + sum_{j != i} tau[i,j,x_t]^2 m_j^{t+1} )
        #         + J_ii^2 m_i^{t+1}
        m[i] = slope * slope * sum_m[i - shift] + J * J * m[i]


@njit(inline="always", error_model="numpy")
def _begin(u, variance, p, due, shift, modulus, sum_B, sum_m):
    """Start the sums with what the output layer sends back, if the symbol was predicted."""
    if due:
        for i in range(shift, u.shape[1]):
            sum_B[i - shift] = u[p, i]
        if modulus:
            for i in range(shift, u.shape[1]):
                sum_m[i - shift] = variance[p, i]
    else:
        sum_B[:] = 0.0
        sum_m[:] = 0.0


@njit(inline="always", error_model="numpy")
def _write(modulus, now, B, m):
    """Write B^t and m^t into their rows."""
    for i in range(len(B)):
        B[i] = now[0, i]
    if modulus:
        for i in range(len(m)):
            m[i] = now[1, i]


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def backpropagate_dense(
    x,
    bounds,
    begin,
    end,
    chi,
    tau,
    squared,
    loop,
    a,
    u,
    variance,
    persistent,
    logistic,
    modulus,
    now,
    B,
    m,
):
    """Fill the gradients B[r, i] and the RBP moduli m[r, i] of a dense graph for t = end-1 down to begin.

    Args:
        x: (T,) symbols.
        bounds: (S+1,) where each sequence begins, and T.
        begin: first t of this part; the part that follows it in the text has been done before.
        end: last t of this part plus one.
        chi: (T,) whether the symbol is predicted.
        tau: (A, N, 8k) weights, row j-1 for target j and column i-1 for source i.
        squared: the same, squared, without the edges from a unit to itself.
        loop: (A, N+1) weight of the edge from each unit to itself, or zero.
        a: (R, N+1) activities.
        u: derivative of log pi_t(x_t) by the activities, a row for each predicted t of the part.
        variance: variance of w[i, y] under pi_t, likewise.
        persistent: as in `states_dense`.
        logistic: as in `states_dense`.
        modulus: whether m is to be filled; if not, squared and variance are not read.
        now: (2, N+1) B and m at the end of the part; on return at its beginning.
        B: (R, N+1), written.
        m: (R, N+1), written if ``modulus``.
    """
    N = a.shape[1] - 1
    sum_B = np.zeros(tau.shape[2])
    sum_m = np.zeros(tau.shape[2])
    s = np.searchsorted(bounds, end, side="left") - 1
    p = len(u)
    for t in range(end - 1, begin - 1, -1):
        if t < bounds[s]:
            s -= 1
        r = t + s
        if t + 1 == bounds[s + 1]:
            now[:] = 0.0
            B[r + 1] = 0.0
            m[r + 1] = 0.0
        p -= chi[t]
        _begin(u, variance, p, chi[t], 1, modulus, sum_B[:N], sum_m[:N])
        _add_product(now[0, 1:], N, tau[x[t]], sum_B)
        if modulus:
            _add_product(now[1, 1:], N, squared[x[t]], sum_m)
        _receive(logistic, persistent, a[r], loop[x[t]], sum_B, sum_m, 1, now[0], now[1])
        _write(modulus, now, B[r], m[r])


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def backpropagate_sparse(
    x, bounds, begin, end, chi, weight, squared, target, loop, a, u, variance, persistent, logistic, modulus,
    now, B, m,
):  # fmt: skip
    """Fill B and m as `backpropagate_dense` does; weight, squared (A, D, N+1) and target (D, N+1) are slots."""
    N = a.shape[1] - 1
    sum_B = np.zeros(N + 1)
    sum_m = np.zeros(N + 1)
    s = np.searchsorted(bounds, end, side="left") - 1
    p = len(u)
    for t in range(end - 1, begin - 1, -1):
        if t < bounds[s]:
            s -= 1
        r = t + s
        if t + 1 == bounds[s + 1]:
            now[:] = 0.0
            B[r + 1] = 0.0
            m[r + 1] = 0.0
        p -= chi[t]
        _begin(u, variance, p, chi[t], 0, modulus, sum_B, sum_m)
        now_B = now[0]
        now_m = now[1]
        y = x[t]
        if modulus:
            for k in range(weight.shape[1]):
                for i in range(N + 1):
                    sum_B[i] += weight[y, k, i] * now_B[target[k, i]]
                    sum_m[i] += squared[y, k, i] * now_m[target[k, i]]
        else:
            for k in range(weight.shape[1]):
                for i in range(N + 1):
                    sum_B[i] += weight[y, k, i] * now_B[target[k, i]]
        _receive(logistic, persistent, a[r], loop[y], sum_B, sum_m, 0, now_B, now_m)
        _write(modulus, now, B[r], m[r])


@njit(inline="always", error_model="numpy")
def _gather(rows, shift, table, out, padded):
    """Write table[rows[k] + shift, i] to out[i, k], zero for k from len(rows) up to padded."""
    for k in range(len(rows)):
        line = table[rows[k] + shift]
        for i in range(len(line)):
            out[i, k] = line[i]
    for i in range(table.shape[1]):
        for k in range(len(rows), padded):
            out[i, k] = 0.0


@njit(inline="always", error_model="numpy", fastmath=_SUMS)
def _add_dots(weighted, n, block, rows, out):
    """Add sum_k weighted[k] block[rows[f], k] to out[f], four at a time."""
    f = 0
    while f + 4 <= len(rows):
        b0 = block[rows[f]]
        b1 = block[rows[f + 1]]
        b2 = block[rows[f + 2]]
        b3 = block[rows[f + 3]]
        s0 = 0.0
        s1 = 0.0
        s2 = 0.0
        s3 = 0.0
        for k in range(n):
            s0 += weighted[k] * b0[k]
            s1 += weighted[k] * b1[k]
            s2 += weighted[k] * b2[k]
            s3 += weighted[k] * b3[k]
        out[f] += s0
        out[f + 1] += s1
        out[f + 2] += s2
        out[f + 3] += s3
        f += 4
    while f < len(rows):
        b0 = block[rows[f]]
        s0 = 0.0
        for k in range(n):
            s0 += weighted[k] * b0[k]
        out[f] += s0
        f += 1


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def moments(detail, order, offsets, a, B, m, first, sources, triangle, G, diagonal, cross, M):
    """Add up the gradient of every edge and the metric over the edges into every unit.

    Positions are taken symbol by symbol, in blocks laid out with time contiguous.

    Args:
        detail: 0 for the gradient, 1 for the diagonal and row 0 of the metric too, 2 for all of the
            metric.
        order: (T,) rows r of all positions, those with symbol 0 first.
        offsets: (A+1,) where each symbol begins in ``order``.
        a: (R, N+1) activities.
        B: (R, N+1) gradients.
        m: (R, N+1) moduli.
        first: (N+2,) of the graph.
        sources: (E,) of the graph.
        triangle: (N+2,) of the graph.
        G: (A, E), added to: sum_t [x_t = y] a_i^t B_j^{t+1}.
        diagonal: (A, E), added to with detail 1: sum_t [x_t = y] (a_i^t)^2 m_j^{t+1}.
        cross: (A, E), added to with detail 1: sum_t [x_t = y] a_i^t m_j^{t+1}.
        M: (A, packed triangles), added to with detail 2: sum_t [x_t = y] a_i^t a_k^t m_j^{t+1}.
    """
    N = a.shape[1] - 1
    # a stride that is no multiple of a page, else all rows compete for the same lines of the cache
    block_a = np.zeros((N + 1, _BLOCK + 8))
    block_B = np.zeros_like(block_a)
    block_m = np.zeros_like(block_a)
    weighted = np.zeros(_BLOCK)
    for y in range(len(offsets) - 1):
        for begin in range(offsets[y], offsets[y + 1], _BLOCK):
            rows = order[begin : min(begin + _BLOCK, offsets[y + 1])]
            n = (len(rows) + 7) // 8 * 8
            _gather(rows, 0, a, block_a, n)
            _gather(rows, 1, B, block_B, n)
            if detail > 0:
                _gather(rows, 1, m, block_m, n)
            for j in range(1, N + 1):
                gradient = block_B[j]
                modulus = block_m[j]
                into = sources[first[j] : first[j + 1]]
                _add_dots(gradient, n, block_a, into, G[y, first[j] : first[j + 1]])
                if detail == 0:
                    continue
                if detail == 1:
                    _add_dots(modulus, n, block_a, into, cross[y, first[j] : first[j + 1]])
                entry = triangle[j]
                for f in range(len(into)):
                    active = block_a[into[f]]
                    for k in range(n):
                        weighted[k] = active[k] * modulus[k]
                    if detail == 1:
                        _add_dots(
                            weighted, n, block_a, into[f : f + 1], diagonal[y, first[j] + f :]
                        )
                    else:
                        _add_dots(weighted, n, block_a, into[: f + 1], M[y, entry : entry + f + 1])
                    entry += f + 1
