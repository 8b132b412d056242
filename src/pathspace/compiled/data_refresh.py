"""A refresh of the data-dependent kappa in one compiled call: averages of its data, kappa, its means and bounds.

Letters: kappa = path + alpha data; m the average of data, a its decay; w_e the gauge, the product of weights of rows
and of columns.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER
from pathspace.compiled.memory import matrix_at, vector_at
from pathspace.compiled.passes import bounds, weighted_sum

# columns of the table of tensors: addresses, but for ``ROWS``, ``COLUMNS`` and ``FORM``
DATA, AVERAGE, KAPPA, ROWS, COLUMNS, FORM, FIRST, SECOND, ROW_WEIGHTS, COLUMN_WEIGHTS = range(10)
"""``AVERAGE`` is zero before the first draw. The new average is written over the data."""
NOTHING, DENSE, OUTER, ONE_COLUMN = range(4)
"""Forms of the path: zero, a matrix, rows times columns, rows times one number."""
DECAY, SHARE = range(2)  # columns of the table of numbers: a, and what the average is multiplied with
LOW, HIGH, SUM = range(3)  # columns of the report


@njit(error_model="numpy", cache=True)
def refresh(tensors, numbers, report, like):
    """Average data, fill kappa, and report its smallest and largest element and its weighted sum."""
    for i in range(len(tensors)):
        t, rows, columns, form = tensors[i], tensors[i, ROWS], tensors[i, COLUMNS], tensors[i, FORM]
        data, kappa = matrix_at(t[DATA], rows, columns, like), matrix_at(t[KAPPA], rows, columns, like)
        average = data if t[AVERAGE] == 0 else matrix_at(t[AVERAGE], rows, columns, like)
        path = kappa if form != DENSE else matrix_at(t[FIRST], rows, columns, like)
        leaving = vector_at(t[FIRST], rows, like) if form >= OUTER else like
        entering = vector_at(t[SECOND], 1 if form == ONE_COLUMN else columns, like) if form >= OUTER else like
        weights, column_weights = (
            vector_at(t[ROW_WEIGHTS], rows, like),
            vector_at(t[COLUMN_WEIGHTS], columns, like),
        )
        keep, share = like.dtype.type(numbers[i, DECAY]), like.dtype.type(numbers[i, SHARE])
        low, high, total = np.inf, 0.0, 0.0
        for k in range(rows):
            _average(data[k], average[k], keep, t[AVERAGE] != 0)
            if form == DENSE:
                _add(kappa[k], path[k], share, data[k])
            elif form == OUTER:
                _add_product(kappa[k], leaving[k], entering, share, data[k])
            else:
                _add_number(kappa[k], leaving[k] * entering[0] if form == ONE_COLUMN else 0.0, share, data[k])
            least, most = bounds(kappa[k])
            low, high = min(low, least), max(high, most)
            total += weights[k] * weighted_sum(kappa[k], column_weights)
        report[i, LOW], report[i, HIGH], report[i, SUM] = low, high, total


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _average(data, average, keep, has_one):
    rest = data.dtype.type(1) - keep
    if has_one:
        for d in range(len(data)):
            data[d] = keep * average[d] + rest * data[d]
    elif keep != 0:
        for d in range(len(data)):
            data[d] *= rest


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add(kappa, path, share, data):
    for d in range(len(kappa)):
        kappa[d] = path[d] + share * data[d]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_product(kappa, row, columns, share, data):
    for d in range(len(kappa)):
        kappa[d] = row * columns[d] + share * data[d]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _add_number(kappa, number, share, data):
    number = kappa.dtype.type(number)
    for d in range(len(kappa)):
        kappa[d] = number + share * data[d]
