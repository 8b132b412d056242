"""A ReLU recurrent layer over all its steps, forward and backward.

Letters: T steps, B sequences, D inputs, H units; a row is a sequence at a step, its numbers are adjacent.

    h_t = relu(W_in x_t + b + W_rec h_{t-1})
    d_t = (dL/dh_t + W_rec^T d_{t+1}) [h_t > 0]
    dL/dW_rec = sum_t d_t h_{t-1}^T     dL/dW_in = sum_t d_t x_t^T     dL/db = sum_t d_t     dL/dx_t = W_in^T d_t

Sequences may end early: step t has the first rows[t] of them. All matrices are addresses and strides in bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import njit
from numba.core.registry import cpu_target

from pathspace.nn.kernels.tile import HEAD, PRODUCT, on_its_own, tile, vector_bytes

WIDTH = vector_bytes(cpu_target.target_context.codegen().magic_tuple()[2])  # type: ignore[attr-defined]
"""Bytes of a vector on this processor; 0 if it has none that the kernel can use."""

# Blocks of 8 x 3 vectors fit the 32 registers of AVX-512, of 6 x 2 the 16 of AVX2.
_WIDTH = WIDTH or 32
_ROWS, _FEWER, _VECTORS = (8, 4, 3) if _WIDTH == 64 else (6, 2, 2)


def _panel(vectors):
    """A function that does a job for some rows, and so many vectors of each."""

    @njit(error_model="numpy")
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

    return panel


_panel1, _panel2, _panel3 = _panel(1), _panel(2), _panel(_VECTORS)


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
        panels = (vectors - begin + _VECTORS - 1) // _VECTORS  # of nearly one size
        n = (vectors - begin + panels - 1) // panels
        column, last = begin * _WIDTH, min(lanes, columns - (begin + n - 1) * lanes)
        if n == 1:
            _panel1(unit, address, rows, column, last)
        elif n == 2:
            _panel2(unit, address, rows, column, last)
        else:
            _panel3(unit, address, rows, column, last)
        begin += n


@njit(error_model="numpy")
def _begin(job, out, out_row, start, start_row):
    job[:HEAD] = 0
    job[0], job[1], job[2], job[3] = out, out_row, start, start_row


@njit(error_model="numpy")
def _add(job, a, a_row, a_term, m, m_term, terms):
    """Add a product to a job."""
    if terms > 0:
        i = HEAD + PRODUCT * job[9]
        job[i], job[i + 1], job[i + 2] = a, a_row, a_term
        job[i + 3], job[i + 4], job[i + 5] = m, m_term, terms
        job[9] += 1


@njit(error_model="numpy")
def _rows(rows, t, low, high):
    """How many of the sequences low to high step t has."""
    return max(0, min(rows[t], high) - low) if 0 <= t < len(rows) else 0


@njit(error_model="numpy")
def _forward(unit, sizes, rows, first, reverse, x, w_in_t, w_rec_t, b_in, b_rec, h0, out, low, high):
    """Write the states h_t of the sequences low to high.

    Args:
        unit: A number of the type of all.
        sizes: Bytes of a number, D and H.
        rows: (T,) how many sequences a step has.
        first: (T,) the row of the states where a step begins.
        reverse: 1 to go from the last step to the first.
        x: Address, and from a step, a row of the states, a sequence and an input to the next.
        w_in_t: W_in^T, (D, H).
        w_rec_t: W_rec^T, (H, H).
        b_in: The first part of b, (H,), or 0.
        b_rec: The second, or 0.
        h0: Address of the first states, and from a sequence to the next.
        out: Address of the states, written.
        low: The first sequence.
        high: The one after the last.
    """
    size, D, H = sizes
    x, x_step, x_first, x_row, x_input = x
    h0, h0_row = h0
    row = size * H
    job = np.empty(HEAD + 2 * PRODUCT, np.int64)
    T = len(rows)
    for s in range(T):
        t = T - 1 - s if reverse else s
        before = t + 1 if reverse else t - 1
        n = _rows(rows, t, low, high)
        m = min(n, _rows(rows, before, low, high))
        here = out + (first[t] + low) * row
        inputs = x + t * x_step + first[t] * x_first + low * x_row
        if m:
            _begin(job, here, row, b_in, 0)
            job[4], job[8] = b_rec, 1
            _add(job, inputs, x_row, x_input, w_in_t, row, D)
            _add(job, out + (first[before] + low) * row, row, size, w_rec_t, row, H)
            _do(unit, size, job, m, H)
        if m < n:  # these begin here
            _begin(job, here + m * row, row, b_in, 0)
            job[4], job[8] = b_rec, 1
            _add(job, inputs + m * x_row, x_row, x_input, w_in_t, row, D)
            _add(job, h0 + (low + m) * h0_row, h0_row, size, w_rec_t, row, H)
            _do(unit, size, job, n - m, H)


@njit(error_model="numpy")
def _backward(
    unit, sizes, rows, first, reverse, x, w_in, w_rec, h0, out, g_out, g_last, g_x, g_h0, sums, scratch,
    chunk, one, low, high,
):  # fmt: skip
    """Write the gradients of :func:`_forward` for the sequences low to high, and their sums.

    Args:
        unit: See :func:`_forward`, like what is not named here.
        sizes: The same.
        rows: The same.
        first: The same.
        reverse: The same.
        x: The same.
        w_in: W_in, (H, D).
        w_rec: W_rec, (H, H).
        h0: The same.
        out: The states.
        g_out: Address of dL/dh_t by the states themselves, or 0, and its strides as those of `x` but the last.
        g_last: (B, H) dL/dh of the last states, or 0.
        g_x: dL/dx, a row for each of the states, written unless 0.
        g_h0: (B, H) dL/dh0, written unless 0.
        sums: (D, H), (H, H) and (H,): dL/dW_in^T, dL/dW_rec and dL/db, written.
        scratch: Room for `chunk` + 1 times d_t.
        chunk: How many steps are summed at once.
        one: Address of the number 1.
        low: The same.
        high: The same.
    """
    size, D, H = sizes
    x, x_step, x_first, x_row, x_input = x
    h0, h0_row = h0
    g_out, g_step, g_first, g_row = g_out
    s_in, s_rec, s_bias = sums
    row, T, room = size * H, len(rows), (high - low) * size * H
    job = np.empty(HEAD + PRODUCT, np.int64)
    to_in = np.empty(HEAD + chunk * PRODUCT, np.int64)
    to_rec = np.empty(HEAD + 2 * chunk * PRODUCT, np.int64)
    to_bias = np.empty(HEAD + chunk * PRODUCT, np.int64)
    begun, waiting = 0, 0
    for s in range(T - 1, -1, -1):
        t = T - 1 - s if reverse else s
        before, after = (t + 1, t - 1) if reverse else (t - 1, t + 1)
        n = _rows(rows, t, low, high)
        m = min(n, _rows(rows, after, low, high))
        begin = (first[t] + low) * row
        seen = g_out + t * g_step + first[t] * g_first + low * g_row if g_out else 0
        here, then = scratch + s % (chunk + 1) * room, scratch + (s + 1) % (chunk + 1) * room
        # d_t = (dL/dh_t + W_rec^T d_{t+1}) [h_t > 0]
        if m:
            _begin(job, here, row, seen, g_row)
            job[6], job[7] = out + begin, row
            _add(job, then, row, size, w_rec, row, H)
            _do(unit, size, job, m, H)
        if m < n:  # these end here
            skip = begin + m * row
            _begin(job, here + m * row, row, seen + m * g_row if seen else 0, g_row)
            job[4], job[5] = g_last + (low + m) * row if g_last else 0, row
            job[6], job[7] = out + skip, row
            _do(unit, size, job, n - m, H)
        if g_x:
            _begin(job, g_x + (first[t] + low) * size * D, size * D, 0, 0)
            _add(job, here, row, size, w_in, size * D, H)
            _do(unit, size, job, n, D)
        m = min(n, _rows(rows, before, low, high))
        if g_h0 and m < n:  # these begin here
            _begin(job, g_h0 + (low + m) * row, row, 0, 0)
            _add(job, here + m * row, row, size, w_rec, row, H)
            _do(unit, size, job, n - m, H)
        if waiting == 0:
            _begin(to_in, s_in, row, s_in if begun else 0, row)
            _begin(to_rec, s_rec, row, s_rec if begun else 0, row)
            _begin(to_bias, s_bias, row, s_bias if begun else 0, row)
        inputs = x + t * x_step + first[t] * x_first + low * x_row
        _add(to_in, inputs, x_input, x_row, here, row, n)
        if m:
            _add(to_rec, here, size, row, out + (first[before] + low) * row, row, m)
        _add(to_rec, here + m * row, size, row, h0 + (low + m) * h0_row, h0_row, n - m)
        _add(to_bias, one, 0, 0, here, row, n)
        waiting += 1
        if waiting == chunk or s == 0:
            _do(unit, size, to_in, D, H)
            _do(unit, size, to_rec, H, H)
            _do(unit, size, to_bias, 1, H)
            begun, waiting = 1, 0


def _kept(date):
    """The loops as Numba keeps them on disk: until this file changes, or what they close over."""

    @njit(error_model="numpy", nogil=True, cache=True)
    def forward(*arguments):
        _ = date
        _forward(*arguments)

    @njit(error_model="numpy", nogil=True, cache=True)
    def backward(*arguments):
        _ = date
        _backward(*arguments)

    return forward, backward


forward, backward = _kept(Path(__file__).with_name("tile.py").stat().st_mtime_ns)
