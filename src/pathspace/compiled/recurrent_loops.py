"""What ``paths.recurrent_shares`` does but for the largest products of matrices, in few compiled calls.

Letters: l layer, from the first one to the readout in all tables; T steps, n examples, m rows of seeds, K units of a
layer, D of what enters it; z_t = W_in x_t + W_rec h_{t-1} + b, h_t = relu(z_t); g = gamma^2; delta gradients of the
seeded values; J^i the gradient of a matrix for example i. What is stored as ``[m, T K]`` has the steps of a row side
by side.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER, apply_square, apply_square_transposed
from pathspace.compiled.memory import matrix_at, vector_at

# columns of the table of layers: K, D and how many steps there are; addresses of parameters; of what enters, and how
# far apart its rows of two steps and of two examples are; of the states ``[T, n, K]``, of W_in and W_rec side by side,
# of g and psi ``[T, K]``, of delta; of rows x_t, h_{t-1} of some steps, and of what joined makes of them; of the paths'
# terms (of the readout the vectors), of the data's, and of rows x_t, h_{t-1} of all steps of the chosen examples
UNITS, WIDTH, STEPS, WEIGHT, RECURRENT, BIAS, OTHER_BIAS = range(7)
BELOW, OF_STEP, OF_EXAMPLE, STATES, JOINED, GAMMA, PSI, DELTA = range(7, 15)
ROWS, VALUES = range(15, 17)
PATH, RECURRENT_PATH, BIAS_PATH, DATA, RECURRENT_DATA, BIAS_DATA, OTHER_BIAS_DATA, RIGHT = range(17, 25)
SIZE = 25


@njit(error_model="numpy", cache=True)
def advance(t, count, first, steps, centred, like):
    """Take the spreads of the values of some steps of a layer, and lay out what makes those of the next ones.

    Args:
        t: row of the table; its g is filled with spreads, mean squares or variances.
        count: the number of examples n.
        first: the first one of the next steps; T at the end.
        steps: how many steps there are at a time.
        centred: whether the spread is the variance.
        like: a vector of the type of all values.
    """
    T, K, D = t[STEPS], t[UNITS], t[WIDTH]
    if first > 0:
        g = matrix_at(t[GAMMA], T, K, like)
        _spreads(t, count, centred, g[first - steps : first] if first < T else g[(T - 1) // steps * steps :])
    if first == 0:
        joined = matrix_at(t[JOINED], K, D + K, like)
        joined[:, :D] = matrix_at(t[WEIGHT], K, D, like)
        joined[:, D:] = matrix_at(t[RECURRENT], K, K, like)
    rows = matrix_at(t[ROWS], steps * count, D + K, like)
    for s in range(first, min(first + steps, T)):
        for i in range(count):
            _lay(t, K, count, s, i, rows[(s - first) * count + i])


@njit(error_model="numpy", cache=True)
def _lay(t, H, count, s, example, out):
    """What W_in and W_rec, of H units, are multiplied with at a step."""
    T, D = t[STEPS], t[WIDTH]
    reach = (T - 1) * t[OF_STEP] + (count - 1) * t[OF_EXAMPLE] + 1
    x = matrix_at(t[BELOW], reach, D, out)[s * t[OF_STEP] + example * t[OF_EXAMPLE]]
    for d in range(D):
        out[d] = x[d]
    if H and s == 0:
        out[D:] = 0
    elif H:
        y = matrix_at(t[STATES], T * count, H, out)[(s - 1) * count + example]
        for k in range(H):
            out[D + k] = y[k]


@njit(error_model="numpy", cache=True)
def _spreads(t, count, centred, out):
    """The mean square or the variance over examples of values and b, of some steps."""
    steps, K = out.shape
    values = matrix_at(t[VALUES], steps * count, K, out)
    share, shift = out.dtype.type(1 / count), np.zeros(K, out.dtype)
    if not centred:
        for address in (t[BIAS], t[OTHER_BIAS]):
            if address != 0:
                shift += vector_at(address, K, out)
    for s in range(steps):
        if centred:
            shift[:] = 0
            for i in range(count):
                _add_mean(shift, values[s * count + i], share)
        row = out[s]
        row[:] = 0
        for i in range(count):
            _add_square(row, values[s * count + i], shift)
        row *= share


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_mean(shift, x, share):
    for k in range(len(shift)):
        shift[k] -= share * x[k]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_square(out, x, shift):
    for k in range(len(out)):
        out[k] += (x[k] + shift[k]) * (x[k] + shift[k])


@njit(error_model="numpy", cache=True)
def paths(layers, alpha, like):
    """G and psi of all layers but the readout, and the terms of the paths; False if psi of a step is zero throughout.

    Args:
        layers: table of layers, with spreads in the place of g; psi of the readout is one, and not written.
        alpha: share of the data.
        like: a vector of the type of all values.
    """
    rest, last = like.dtype.type(1 - alpha), len(layers) - 1
    for i in range(last):
        t = layers[i]
        T, K, D = t[STEPS], t[UNITS], t[WIDTH]
        g = matrix_at(t[GAMMA], T, K, like)
        W = matrix_at(t[WEIGHT], K, D, like)
        W_rec = matrix_at(t[RECURRENT], K, K, like)
        squares = np.zeros(K, like.dtype)
        for address in (t[BIAS], t[OTHER_BIAS]):
            if address != 0:
                b = vector_at(address, K, like)
                for k in range(K):
                    squares[k] += b[k] * b[k]
        if i == 0:
            for k in range(K):
                squares[k] += _squared_norm(W[k])
        own = np.empty(K, like.dtype)
        for s in range(T):
            # g_t = alpha stat[z_t] + (1 - alpha) (W_in^2 x_t + W_rec^2 g_{t-1} + b^2)
            own[:] = squares
            if i > 0:
                apply_square(W, matrix_at(layers[i - 1, GAMMA], T, D, like)[s], own)
            if s > 0:
                apply_square(W_rec, g[s - 1], own)
            for k in range(K):
                g[s, k] = like.dtype.type(alpha) * g[s, k] + rest * own[k]
    whole = True
    for i in range(last - 1, -1, -1):
        whole = _psi(layers[i], layers[i + 1], rest, i + 1 == last, like) and whole
    for i in range(last):
        _terms(layers, i, rest, like)
    t = layers[last]
    g = matrix_at(layers[last - 1, GAMMA], layers[last - 1, STEPS], t[WIDTH], like)
    vector_at(t[PATH], t[UNITS], like)[:] = rest
    vector_at(t[BIAS_PATH], t[UNITS], like)[:] = rest * t[STEPS]
    total = vector_at(t[RECURRENT_PATH], t[WIDTH], like)  # of what enters, at the steps that are read
    total[:] = 0
    for s in range(len(g) - t[STEPS], len(g)):
        for k in range(len(total)):
            total[k] += g[s, k]
    return whole


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _squared_norm(row):
    total = row.dtype.type(0)
    for d in range(len(row)):
        total += row[d] * row[d]
    return total


@njit(error_model="numpy", cache=True)
def _psi(t, above, rest, only_read, like):
    """Psi of a layer from that of the one above: psi_t = (1 - alpha) ((W_rec^2)^T psi_{t+1} + (W_in^2)^T above_t)."""
    T, K = t[STEPS], t[UNITS]
    psi = matrix_at(t[PSI], T, K, like)
    W = matrix_at(above[WEIGHT], above[UNITS], K, like)
    W_rec = matrix_at(t[RECURRENT], K, K, like)
    read = np.zeros(K, like.dtype)
    if only_read:
        apply_square_transposed(W, np.ones(len(W), like.dtype), read)
    whole = True
    for s in range(T - 1, -1, -1):
        row = psi[s]
        row[:] = 0
        if not only_read:
            apply_square_transposed(W, matrix_at(above[PSI], T, len(W), like)[s], row)
        elif s >= T - above[STEPS]:
            row[:] = read
        if s < T - 1:
            apply_square_transposed(W_rec, psi[s + 1], row)
        some = False
        for k in range(K):
            row[k] *= rest
            some = some or row[k] != 0
        whole = whole and some
    return whole


@njit(error_model="numpy", cache=True)
def _terms(layers, i, rest, like):
    """(1 - alpha) times the sum over t of psi_t and of psi_t g_{t-1}^T, and above the first layer psi_t x_t^T."""
    t = layers[i]
    T, K, D = t[STEPS], t[UNITS], t[WIDTH]
    psi, g = matrix_at(t[PSI], T, K, like), matrix_at(t[GAMMA], T, K, like)
    total = vector_at(t[BIAS_PATH], K, like)
    total[:] = 0
    for s in range(T):
        for k in range(K):
            total[k] += rest * psi[s, k]
    factors = np.empty(T, like.dtype)
    recurrent = matrix_at(t[RECURRENT_PATH], K, K, like)
    for k in range(K):
        factors[:] = psi[:, k]
        factors *= rest
        recurrent[k] = 0
        _add_rows(recurrent[k], factors[1:], g, T - 1)
        if i > 0:
            below = matrix_at(layers[i - 1, GAMMA], T, D, like)
            path = matrix_at(t[PATH], K, D, like)
            path[k] = 0
            _add_rows(path[k], factors, below, T)


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_rows(out, factors, rows, count):
    """Out += sum over s of factors[s] rows[s], four rows at a time."""
    whole = count - count % 4
    for s in range(0, whole, 4):
        a, b, c, d = factors[s], factors[s + 1], factors[s + 2], factors[s + 3]
        x, y, z, w = rows[s], rows[s + 1], rows[s + 2], rows[s + 3]
        for k in range(len(out)):
            out[k] += (a * x[k] + b * y[k]) + (c * z[k] + d * w[k])
    for s in range(whole, count):
        a, x = factors[s], rows[s]
        for k in range(len(out)):
            out[k] += a * x[k]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_product(out, g, first, W):
    """Out_r += g_r W, with g_r from a column of its row on; four rows of W at a time."""
    K = len(W)
    whole = K - K % 4
    for k in range(0, whole, 4):
        x, y, z, w = W[k], W[k + 1], W[k + 2], W[k + 3]
        for r in range(len(out)):
            row, f = out[r], first + k
            a, b, c, d = g[r, f], g[r, f + 1], g[r, f + 2], g[r, f + 3]
            for j in range(len(row)):
                row[j] += (a * x[j] + b * y[j]) + (c * z[j] + d * w[j])
    for k in range(whole, K):
        x = W[k]
        for r in range(len(out)):
            row, a = out[r], g[r, first + k]
            for j in range(len(row)):
                row[j] += a * x[j]


@njit(error_model="numpy", cache=True)
def pull_back(layers, chosen, count, pairs, like):
    """Make delta of the seeds, the data's terms of biases, and what delta is multiplied with.

    Args:
        layers: table of layers.
        chosen: the numbers of the examples of the rows of seeds.
        count: the number of examples n.
        pairs: whether a row and the next one are a pair; delta of the second one gets the opposite sign.
        like: a vector of the type of all values.
    """
    _pull(layers, chosen, count, like)
    _square_biases(layers, len(chosen), pairs, like)
    _lay_side_by_side(layers, chosen, count, like)


@njit(error_model="numpy", cache=True)
def _pull(layers, chosen, count, like):
    """Delta_t = s_t + 1[h_t > 0] o (W_rec^T delta_{t+1} + W_above^T above_t), over the seeds s; all layers."""
    m = len(chosen)
    for i in range(len(layers) - 2, -1, -1):
        t, above = layers[i], layers[i + 1]
        T, K, read = t[STEPS], t[UNITS], above[STEPS]
        delta = matrix_at(t[DELTA], m, T * K, like)
        entering = matrix_at(above[DELTA], m, read * above[UNITS], like)
        W, W_rec = matrix_at(above[WEIGHT], above[UNITS], K, like), matrix_at(t[RECURRENT], K, K, like)
        states = matrix_at(t[STATES], T * count, K, like)
        back = np.empty((m, K), like.dtype)
        for s in range(T - 1, -1, -1):
            back[:] = 0
            if s >= T - read:
                _add_product(back, entering, (s - (T - read)) * above[UNITS], W)
            if s < T - 1:
                _add_product(back, delta, (s + 1) * K, W_rec)
            for r in range(m):
                own, gates, x = delta[r, s * K : (s + 1) * K], states[s * count + chosen[r]], back[r]
                for k in range(K):
                    own[k] += x[k] if gates[k] > 0 else 0


@njit(error_model="numpy", cache=True)
def _lay_side_by_side(layers, chosen, count, like):
    """What W_in and W_rec of all layers are multiplied with: rows ``[m T, D + K]``, of a readout ``[m T, D]``."""
    for i in range(len(layers)):
        t = layers[i]
        T, K, D = t[STEPS], t[UNITS], t[WIDTH]
        H = 0 if t[RECURRENT] == 0 else K
        rows = matrix_at(t[RIGHT], len(chosen) * T, D + H, like)
        for r in range(len(chosen)):
            for s in range(T):
                _lay(t, H, count, s, chosen[r], rows[r * T + s])


@njit(error_model="numpy", cache=True)
def _square_biases(layers, m, pairs, like):
    """The sums of (J^i)^2, or of (J^i - J^j)^2 of pairs of rows, for biases; delta^j is made -delta^j."""
    for i in range(len(layers)):
        t = layers[i]
        T, K = t[STEPS], t[UNITS]
        delta, bias = matrix_at(t[DELTA], m, T * K, like), vector_at(t[BIAS_DATA], K, like)
        bias[:] = 0
        J = np.empty(K, like.dtype)
        for r in range(m):
            second = pairs and r % 2 == 1
            if not second:
                J[:] = 0
            for s in range(T):
                _gather(J, delta[r, s * K : (s + 1) * K], second)
            if second or not pairs:
                _add_squares(bias, J)
        if t[OTHER_BIAS] != 0:
            vector_at(t[OTHER_BIAS_DATA], K, like)[:] = bias


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _gather(J, delta, second):
    """Add delta to J, or take it away and turn its sign."""
    if second:
        for k in range(len(J)):
            delta[k] = -delta[k]
            J[k] += delta[k]
    else:
        for k in range(len(J)):
            J[k] += delta[k]


@njit(error_model="numpy", cache=True)
def square(J, t, first):
    """Add the squares of J ``[m, K, D + K]``, or ``[m, K, D]``, to the sums of a layer, which begin with the first."""
    like = J.reshape(J.size)
    m, K, wide = J.shape
    D = t[WIDTH]
    data, recurrent = matrix_at(t[DATA], K, D, like), matrix_at(t[RECURRENT_DATA], wide - D, wide - D, like)
    total = np.empty(wide, like.dtype)
    whole = m - m % 4
    for k in range(K):
        total[:] = 0
        for r in range(0, whole, 4):
            _add_four_squares(total, J[r, k], J[r + 1, k], J[r + 2, k], J[r + 3, k])
        for r in range(whole, m):
            _add_squares(total, J[r, k])
        if first:
            data[k] = total[:D]
            if wide > D:
                recurrent[k] = total[D:]
        else:
            for d in range(D):
                data[k, d] += total[d]
            for d in range(D, wide):
                recurrent[k, d - D] += total[d]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_four_squares(out, x, y, z, w):
    for d in range(len(out)):
        out[d] += (x[d] * x[d] + y[d] * y[d]) + (z[d] * z[d] + w[d] * w[d])


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_squares(out, x):
    for d in range(len(out)):
        out[d] += x[d] * x[d]
