"""Both passes through a squared network in one compiled call: kappa1 of all parameters, their means and bounds.

A plan (see ``plan``) is a table of operations on slots. The values of a slot are rows: one for a slot that is alike at
all times, and for a sequence over T steps its first ones, of which the last stands for all later ones; gradients
of sequences are kept from the last step back.

Letters: T time, h rows of a slot, g = dG/dh; W a matrix, kappa = dG/dW^2.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER, apply_square_to_rows, apply_square_transposed_to_rows
from pathspace.compiled.memory import matrix_at, vector_at
from pathspace.compiled.recurrence import pairs_of, recurrence, sum_of_outer_products

LINEAR, CELL, LAST = 0, 1, 2
"""Operations: a matrix and up to two biases; a recurrence; the last step of a sequence."""

# columns of the tables: operations, slots, parameters
CODE, BEFORE, AFTER, WEIGHT, BIAS, OTHER_BIAS, STEPS, NEEDED = range(8)
WIDTH, TIMES, OFFSET, ROOM, COUNT, BACK_OFFSET, BACK_ROOM, BACK_COUNT, BACK_ZEROS = range(9)
ADDRESS, ROWS, COLUMNS, FORM, FIRST, SECOND, ROW_WEIGHTS, COLUMN_WEIGHTS = range(8)
OUTER, DENSE, VECTOR = 0, 1, 2
"""Forms of kappa: rows times columns, a matrix, the vector of a bias (which lies where its matrix's rows do)."""
LOW, HIGH, SUM, LOW_COLUMN, HIGH_COLUMN, COLUMN_SUM = range(6)  # columns of the report
UNSETTLED, EXTREME, SAFE = 0, 1, 2
"""A sequence was too long for its memory; kappa must be looked at; it is far from the ends of its type, and no zero."""
_ELEMENTS, _FACTORS = 1e30, 1e18  # how far from one elements of kappa, or of its factors, may be


@njit(error_model="numpy", cache=True, inline="always")
def _values(memory, slots, s, count):
    width, offset = slots[s, WIDTH], slots[s, OFFSET]
    return memory[offset : offset + count * width].reshape(count, width)


@njit(error_model="numpy", cache=True, inline="always")
def _gradients(memory, slots, s, count):
    width, offset = slots[s, WIDTH], slots[s, BACK_OFFSET]
    return memory[offset : offset + count * width].reshape(count, width)


@njit(error_model="numpy", cache=True)
def kappa_pass(operations, slots, parameters, memory, scratch, pairs, report, moderate):
    """Fill kappa, wherever ``parameters`` says that it lies, and the report on it.

    Args:
        operations: in the order of the forward pass.
        slots: widths and places of their rows; counts of rows are written to it. Slot 0 is what enters: ones.
        parameters: where they lie, and where their kappas and the weights of their means do.
        memory: of the rows of all slots, those of slot 0 filled, and of their gradients, those of the last filled.
        scratch: memory for four rows of the largest width.
        pairs: memory for three integers a time step, or a pair of rows that can meet.
        report: for each parameter the smallest and largest element and the weighted sum of each factor of its kappa.
        moderate: how far from one sums may be, for ``SAFE``.

    Returns:
        ``UNSETTLED``, ``EXTREME`` or ``SAFE``.
    """
    for i in range(len(operations)):
        if not _forward(operations[i], slots, parameters, memory, scratch):
            return UNSETTLED
    for i in range(len(operations) - 1, -1, -1):
        if not _backward(operations[i], slots, parameters, memory, scratch, pairs):
            return UNSETTLED
    verdict = SAFE
    for i in range(len(parameters)):
        _report(parameters[i], memory, report[i])
        # sums are what rescaling does not change; elements it does, and they decide only near the ends of float32
        outer = parameters[i, FORM] == OUTER
        for j in range(6 if outer else 3):
            most = moderate if j % 3 == 2 else _FACTORS if outer else _ELEMENTS
            if not 1 / most <= report[i, j] <= most:
                verdict = EXTREME
    return verdict


@njit(error_model="numpy", cache=True)
def _forward(op, slots, parameters, memory, scratch):
    before, after, weight = op[BEFORE], op[AFTER], op[WEIGHT]
    count = slots[before, COUNT]
    h = _values(memory, slots, before, count)
    if op[CODE] == LAST:
        _values(memory, slots, after, 1)[0] = h[count - 1]
        slots[after, COUNT] = 1
        return True
    W = matrix_at(parameters[weight, ADDRESS], parameters[weight, ROWS], parameters[weight, COLUMNS], memory)
    if op[CODE] == CELL:
        room = _values(memory, slots, after, slots[after, ROOM])
        count, _ = recurrence(W, False, h, False, op[STEPS], room, scratch[: len(W)])
        slots[after, COUNT] = count
        return count > 0
    y = _values(memory, slots, after, count)
    slots[after, COUNT] = count
    y[:] = 0
    for bias in (op[BIAS], op[OTHER_BIAS]):
        if bias >= 0:
            b = vector_at(parameters[bias, ADDRESS], len(W), memory)
            for r in range(count):
                for k in range(len(b)):
                    y[r, k] += b[k] * b[k]
    apply_square_to_rows(W, h, y, scratch[: 4 * h.shape[1]].reshape(4, h.shape[1]))
    return True


@njit(error_model="numpy", cache=True)
def _backward(op, slots, parameters, memory, scratch, pairs):
    before, after, weight, steps = op[BEFORE], op[AFTER], op[WEIGHT], op[STEPS]
    count = slots[after, BACK_COUNT]
    zeros = slots[after, BACK_ZEROS] == 1
    g = _gradients(memory, slots, after, count)
    if op[CODE] == LAST:
        times = slots[before, TIMES]
        back = _gradients(memory, slots, before, min(2, times))
        back[0] = g[0]
        if times > 1:
            back[1] = 0
        slots[before, BACK_COUNT], slots[before, BACK_ZEROS] = len(back), times > 1
        return True
    W = matrix_at(parameters[weight, ADDRESS], parameters[weight, ROWS], parameters[weight, COLUMNS], memory)
    h = _values(memory, slots, before, slots[before, COUNT])
    if op[CODE] == CELL:
        # delta_t = g_t + S^T delta_{t+1};  kappa(W) = sum_t delta_t h_{t-1}^T
        delta = _gradients(memory, slots, before, slots[before, BACK_ROOM])
        count, zeros = recurrence(W, True, g, zeros, steps, delta, scratch[: len(W)])
        if count == 0:
            return False
        slots[before, BACK_COUNT], slots[before, BACK_ZEROS] = count, zeros
        states = _values(memory, slots, after, slots[after, COUNT])
        kappa = matrix_at(parameters[weight, FIRST], len(W), len(W), memory)
        met = pairs_of(count, zeros, len(states), steps, 1, pairs)
        sum_of_outer_products(delta, states, pairs[:met], kappa)
        return True
    if parameters[weight, FORM] == DENSE:
        kappa = matrix_at(parameters[weight, FIRST], len(W), h.shape[1], memory)
        met = pairs_of(count, zeros, len(h), steps, 0, pairs)
        sum_of_outer_products(g, h, pairs[:met], kappa)
        total = vector_at(parameters[weight, SECOND], len(W), memory)
    else:  # what enters is the same at all times
        vector_at(parameters[weight, SECOND], h.shape[1], memory)[:] = h[0]
        total = vector_at(parameters[weight, FIRST], len(W), memory)
    _total(g, steps, total)
    if op[NEEDED]:
        back = _gradients(memory, slots, before, count)
        back[:] = 0
        apply_square_transposed_to_rows(W, g, back, scratch[: 4 * h.shape[1]].reshape(4, h.shape[1]))
        slots[before, BACK_COUNT], slots[before, BACK_ZEROS] = count, zeros
    return True


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _total(g, steps, total):
    """The sum over all steps, of which the last row of g stands for the rest."""
    total[:] = 0
    for r in range(len(g)):
        times = total.dtype.type(1 if r < len(g) - 1 else steps - r)
        for k in range(len(total)):
            total[k] += times * g[r, k]


@njit(error_model="numpy", cache=True)
def _report(parameter, like, report):
    rows, columns = parameter[ROWS], parameter[COLUMNS]
    weights = vector_at(parameter[ROW_WEIGHTS], rows, like)
    if parameter[FORM] == DENSE:
        kappa = matrix_at(parameter[FIRST], rows, columns, like)
        column_weights = vector_at(parameter[COLUMN_WEIGHTS], columns, like)
        report[LOW], report[HIGH], report[SUM] = np.inf, 0.0, 0.0
        for k in range(rows):
            low, high = bounds(kappa[k])
            report[LOW], report[HIGH] = min(report[LOW], low), max(report[HIGH], high)
            report[SUM] += weights[k] * weighted_sum(kappa[k], column_weights)
        return
    vector = vector_at(parameter[FIRST], rows, like)
    report[LOW], report[HIGH] = bounds(vector)
    report[SUM] = weighted_sum(vector, weights)
    if parameter[FORM] == OUTER:
        vector = vector_at(parameter[SECOND], columns, like)
        report[LOW_COLUMN], report[HIGH_COLUMN] = bounds(vector)
        report[COLUMN_SUM] = weighted_sum(vector, vector_at(parameter[COLUMN_WEIGHTS], columns, like))


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def weighted_sum(x, y):
    """The sum of the products of two vectors."""
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@njit(error_model="numpy", fastmath={"nnan", "nsz", "reassoc"}, cache=True)
def bounds(x):
    """The smallest and the largest element; where one is no number, the sum tells."""
    low, high = x[0], x[0]
    for i in range(len(x)):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    return low, high
