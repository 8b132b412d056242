"""A ReLU recurrent layer over all its steps, forward and backward.

Letters: T steps, B sequences, D inputs, H units; a row is a sequence at a step, its numbers are
adjacent.

    h_t = relu(W_in x_t + b + W_rec h_{t-1})
    d_t = (dL/dh_t + W_rec^T d_{t+1}) [h_t > 0]
    dL/dW_rec = sum_t d_t h_{t-1}^T     dL/dW_in = sum_t d_t x_t^T     dL/db = sum_t d_t     dL/dx_t = W_in^T d_t

Sequences may end early: step t has the first rows[t] of them. All matrices are addresses and
strides in bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import njit
from numba.core.registry import cpu_target

from pathspace.kept_code import recompile_if_damaged
from pathspace.nn.kernels.tile import HEAD, PRODUCT, move, on_its_own, tile, vector_bytes

WIDTH = vector_bytes(cpu_target.target_context.codegen().magic_tuple()[2])  # type: ignore[attr-defined]
"""Bytes of a vector on this processor; 0 if it has none that the kernel can use."""

# Blocks of 8 x 3 vectors fit the 32 registers of AVX-512, of 4 x 3 the 16 of AVX2.
_WIDTH = WIDTH or 32
_ROWS, _FEWER, _VECTORS = (8, 4, 3) if _WIDTH == 64 else (4, 2, 3)


def _panel(vectors):
    """Make a function that does a job for some rows, and so many vectors of each."""

    def panel(unit, job, rows, column, last):
        on_its_own()  # type: ignore[call-arg]
        row = 0
        while row + _ROWS <= rows:
            tile(_ROWS, vectors, _WIDTH, unit, job, row, column, last)
            row += _ROWS
        while row + _FEWER <= rows:
            tile(_FEWER, vectors, _WIDTH, unit, job, row, column, last)
            row += _FEWER
        while row < rows:
            tile(1, vectors, _WIDTH, unit, job, row, column, last)
            row += 1

    # what was kept on disk by several processes is joined by names, and the number that Numba adds
    # begins in each anew
    panel.__qualname__ = f"_panel{vectors}"
    return njit(error_model="numpy")(panel)


_PANELS = -1
"""In place of the stride of a matrix that :func:`_pack` has copied."""
_panel1 = _panel(1)
_panel2 = _panel(2)
_panel3 = _panel(_VECTORS)


@njit(error_model="numpy")
def _wide(vectors):
    """Return the number of vectors of the next panel; all panels have nearly one size."""
    panels = (vectors + _VECTORS - 1) // _VECTORS
    return (vectors + panels - 1) // panels


@njit(error_model="numpy")
def _do(unit, size, job, rows, columns):
    """Do a job for a whole matrix, a few columns at a time."""
    on_its_own()  # type: ignore[call-arg]
    if rows <= 0:
        return
    lanes = _WIDTH // size
    vectors = (columns + lanes - 1) // lanes
    address = job.ctypes.data
    begin = 0
    while begin < vectors:
        n = _wide(vectors - begin)
        column = begin * _WIDTH
        last = min(lanes, columns - (begin + n - 1) * lanes)
        for p in range(job[9]):
            i = HEAD + PRODUCT * p
            if job[i + 6]:  # the panels before this one come before it, and `tile` adds `column`
                job[i + 3] = job[i + 6] + column * (job[i + 5] - 1)
                job[i + 4] = n * _WIDTH
        if n == 1:
            _panel1(unit, address, rows, column, last)
        elif n == 2:
            _panel2(unit, address, rows, column, last)
        else:
            _panel3(unit, address, rows, column, last)
        begin += n


@njit(error_model="numpy")
def _copy(unit, begin, begin_row, begin_column, rows, columns, to, to_row, to_column):
    """Copy a matrix."""
    for r in range(rows):
        for c in range(columns):
            move(unit, to + r * to_row + c * to_column, begin + r * begin_row + c * begin_column)  # type: ignore[call-arg]


@njit(error_model="numpy")
def _pack(unit, size, m, m_term, m_column, terms, columns, to):
    """Copy M (K, columns) in panels, whose rows are adjacent whole vectors, and return where the copy ends."""
    lanes = _WIDTH // size
    vectors = (columns + lanes - 1) // lanes
    begin = 0
    while begin < vectors:
        n = _wide(vectors - begin)
        width = min(n * lanes, columns - begin * lanes)
        _copy(
            unit, m + begin * lanes * m_column, m_term, m_column, terms, width, to, n * _WIDTH, size
        )
        to += terms * n * _WIDTH
        begin += n
    return to


@njit(error_model="numpy")
def _pitch(size, columns):
    """Bytes from a row to the next that begin in different sets of the cache: an odd number of its lines."""
    return ((size * columns + 63) // 64 | 1) * 64


@njit(error_model="numpy")
def _aligned(room):
    """Return the first address in an array at which a cache line begins; the array has 64 bytes to spare."""
    return (np.int64(room.ctypes.data) + 63) // 64 * 64


@njit(error_model="numpy")
def _begin(job, out, out_row, start, start_row):
    job[:HEAD] = 0
    job[0] = out
    job[1] = out_row
    job[2] = start
    job[3] = start_row


@njit(error_model="numpy")
def _add(job, a, a_row, a_term, m, m_term, terms):
    """Add a product to a job."""
    if terms > 0:
        i = HEAD + PRODUCT * job[9]
        job[i] = a
        job[i + 1] = a_row
        job[i + 2] = a_term
        job[i + 3] = m
        job[i + 4] = m_term
        job[i + 5] = terms
        job[i + 6] = m if m_term == _PANELS else 0
        job[9] += 1


@njit(error_model="numpy")
def _rows(rows, t, low, high):
    """Return how many of the sequences low to high have step t."""
    return max(0, min(rows[t], high) - low) if 0 <= t < len(rows) else 0


@njit(error_model="numpy")
def _order(s, T, reverse):
    """Return the step that comes as number s, the one before it, and the one after it."""
    if reverse:
        t = T - 1 - s
        return t, t + 1, t - 1
    return s, s - 1, s + 1


@njit(error_model="numpy")
def _forward(call, b_in, b_rec, out, last, low, high):
    """Write the states h_t of the sequences low to high, and their last ones.

    Args:
        call: A tuple of

            unit: the number 1, of the type of all.
            sizes: bytes of a number, D and H.
            rows: (T,) how many sequences a step has.
            first: (T,) the row of the states where a step begins.
            reverse: 1 to go from the last step to the first.
            x: address, and from a step, a row of the states, a sequence and an input to the next.
            w_in: W_in (H, D): address, and from a row and from a column to the next.
            w_rec: W_rec (H, H), the same.
            h0: address of the first states, and from a sequence to the next.
        b_in: The first part of b, (H,), or 0.
        b_rec: The second, or 0.
        out: Address of the states, written.
        last: (B, H) address of the last states, written.
        low: The first sequence.
        high: The one after the last.
    """
    unit, (size, D, H), rows, first, reverse, at_x, w_in, w_rec, (h0, h0_row) = call
    x, x_step, x_first, x_row, x_input = at_x
    row = size * H
    pitch = _pitch(size, H)
    job = np.empty(HEAD + 2 * PRODUCT, np.int64)
    room = np.empty((D + H) * pitch + 64, np.uint8)
    from_in = _aligned(room)  # W_in^T and W_rec^T as they are read fastest
    from_rec = _pack(unit, size, w_in[0], w_in[2], w_in[1], D, H, from_in)
    _pack(unit, size, w_rec[0], w_rec[2], w_rec[1], H, H, from_rec)
    T = len(rows)
    for s in range(T):
        t, before, after = _order(s, T, reverse)
        n = _rows(rows, t, low, high)
        m = min(n, _rows(rows, before, low, high))
        here = out + (first[t] + low) * row
        inputs = x + t * x_step + first[t] * x_first + low * x_row
        at = out + (first[before] + low) * row if m else 0
        # those that come from the step before, and those that begin here
        for i, some, states, states_row in (
            (0, m, at, row),
            (m, n - m, h0 + (low + m) * h0_row, h0_row),
        ):
            _begin(job, here + i * row, row, b_in, 0)
            job[4] = b_rec
            job[8] = 1
            _add(job, inputs + i * x_row, x_row, x_input, from_in, _PANELS, D)
            _add(job, states, states_row, size, from_rec, _PANELS, H)
            _do(unit, size, job, some, H)
        m = min(n, _rows(rows, after, low, high))
        if m < n:  # these end here
            _copy(unit, here + m * row, row, size, n - m, H, last + (low + m) * row, row, size)
    room[0] = 0  # Numba frees an array after its last use


@njit(error_model="numpy")
def _row(matrix, r):
    """Return the address of row r of a matrix, which is its address and the bytes to the next row; 0 if it has none."""
    address, stride = matrix
    return address + r * stride if address else 0


@njit(error_model="numpy")
def _states_gradient(form, job, d, d_after, to_next, given, states, counts):
    """Write d_t of a step.

    Args:
        form: The number 1, of the type of all; bytes of a number; H.
        job: Room for a job with one product.
        d: d_t, written: address, and from a row to the next, as of the matrices below.
        d_after: d_{t+1}.
        to_next: Address of W_rec in panels.
        given: dL/dh_t by the states themselves and by the last states, each with address 0 for none.
        states: h_t.
        counts: How many sequences go on after this step, and how many it has.
    """
    unit, size, H = form
    from_states, from_last = given
    m, n = counts
    # d_t = (dL/dh_t + W_rec^T d_{t+1}) [h_t > 0]
    if m:
        _begin(job, d[0], d[1], from_states[0], from_states[1])
        job[6] = states[0]
        job[7] = states[1]
        _add(job, d_after[0], d_after[1], size, to_next, _PANELS, H)
        _do(unit, size, job, m, H)
    if m < n:  # these end here
        _begin(job, _row(d, m), d[1], _row(from_states, m), from_states[1])
        job[4] = _row(from_last, m)
        job[5] = from_last[1]
        job[6] = _row(states, m)
        job[7] = states[1]
        _do(unit, size, job, n - m, H)


@njit(error_model="numpy")
def _begin_sum(job, total, begun):
    """Begin a job that adds products to a matrix, or, if the sum has not begun, writes them there."""
    _begin(job, total[0], total[1], total[0] if begun else 0, total[1])


@njit(error_model="numpy")
def _backward(call, out, g_out, g_last, g_x, g_h0, g_in, g_rec, g_bias, chunk, low, high):
    """Write the gradients of :func:`_forward` for the sequences low to high, and their sums.

    Args:
        call: As of :func:`_forward`.
        out: The states.
        g_out: Address of dL/dh_t by the states themselves, or 0, and its strides as those of `x`
            but the last.
        g_last: (B, H) dL/dh of the last states, or 0.
        g_x: dL/dx, a row for each of the states, written unless 0.
        g_h0: (B, H) dL/dh0, written unless 0.
        g_in: (H, D) dL/dW_in, written.
        g_rec: (H, H) dL/dW_rec, written.
        g_bias: (H,) dL/db, written.
        chunk: How many steps are summed at once.
        low: The first sequence.
        high: The one after the last.
    """
    unit, (size, D, H), rows, first, reverse, at_x, w_in, w_rec, (h0, h0_row) = call
    x, x_step, x_first, x_row, x_input = at_x
    g_out, g_step, g_first, g_row = g_out
    row = size * H
    pitch = _pitch(size, H)
    T = len(rows)
    step = (high - low) * pitch
    # W_rec and, for dL/dx, W_in as they are read fastest, dL/dW_in^T, and `chunk` + 1 times d_t
    room = np.empty(H * (pitch + _pitch(size, D)) + D * pitch + (chunk + 1) * step + 64, np.uint8)
    to_next = _aligned(room)
    to_x = _pack(unit, size, w_rec[0], w_rec[1], w_rec[2], H, H, to_next)
    s_in = _pack(unit, size, w_in[0], w_in[1], w_in[2], H, D, to_x) if g_x else to_x
    scratch = s_in + D * pitch
    one = np.full(1, unit)
    job = np.empty(HEAD + PRODUCT, np.int64)
    to_in = np.empty(HEAD + chunk * PRODUCT, np.int64)
    to_rec = np.empty(HEAD + 2 * chunk * PRODUCT, np.int64)
    to_bias = np.empty(HEAD + chunk * PRODUCT, np.int64)
    form = unit, size, H
    begun = 0
    waiting = 0
    for s in range(T - 1, -1, -1):
        t, before, after = _order(s, T, reverse)
        n = _rows(rows, t, low, high)
        m = min(n, _rows(rows, after, low, high))
        begin = (first[t] + low) * row
        seen = g_out + t * g_step + first[t] * g_first + low * g_row if g_out else 0
        here = scratch + s % (chunk + 1) * step
        then = scratch + (s + 1) % (chunk + 1) * step
        given = (seen, g_row), (_row((g_last, row), low), row)
        states = out + begin, row
        _states_gradient(form, job, (here, pitch), (then, pitch), to_next, given, states, (m, n))
        if g_x:
            _begin(job, g_x + (first[t] + low) * size * D, size * D, 0, 0)
            _add(job, here, pitch, size, to_x, _PANELS, H)
            _do(unit, size, job, n, D)
        m = min(n, _rows(rows, before, low, high))
        if g_h0 and m < n:  # these begin here
            _begin(job, g_h0 + (low + m) * row, row, 0, 0)
            _add(job, here + m * pitch, pitch, size, to_next, _PANELS, H)
            _do(unit, size, job, n - m, H)
        if waiting == 0:
            _begin_sum(to_in, (s_in, pitch), begun)
            _begin_sum(to_rec, (g_rec, row), begun)
            _begin_sum(to_bias, (g_bias, row), begun)
        inputs = x + t * x_step + first[t] * x_first + low * x_row
        _add(to_in, inputs, x_input, x_row, here, pitch, n)
        if m:
            _add(to_rec, here, size, pitch, out + (first[before] + low) * row, row, m)
        _add(to_rec, here + m * pitch, size, pitch, h0 + (low + m) * h0_row, h0_row, n - m)
        _add(to_bias, np.int64(one.ctypes.data), 0, 0, here, pitch, n)
        waiting += 1
        if waiting == chunk or s == 0:
            _do(unit, size, to_in, D, H)
            _do(unit, size, to_rec, H, H)
            _do(unit, size, to_bias, 1, H)
            begun = 1
            waiting = 0
    _copy(unit, s_in, size, pitch, H, D, g_in, size * D, size)
    room[0], one[0] = 0, 0  # Numba frees an array after its last use


def _kept(date):
    """Compile the loops; Numba caches them on disk until this file, or a value that they close over, changes."""

    @njit(error_model="numpy", nogil=True, cache=True)
    def forward(*arguments):
        _ = date
        _forward(*arguments)

    @njit(error_model="numpy", nogil=True, cache=True)
    def backward(*arguments):
        _ = date
        _backward(*arguments)

    return recompile_if_damaged(forward), recompile_if_damaged(backward)


forward, backward = _kept(Path(__file__).with_name("tile.py").stat().st_mtime_ns)
