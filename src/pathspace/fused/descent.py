"""Path-SGD's step on all parameters, and the norm that it clips, in one compiled call each.

Letters: p parameter, g = dL/dp, kappa = rows columns^T, or a matrix; c its normalizer, d = c g / kappa, v velocity.
"""

from __future__ import annotations

from numba import njit

from pathspace.fused.linear import REORDER
from pathspace.fused.memory import matrix_at, vector_at

PARAMETER, GRADIENT, VELOCITY, ROWS, COLUMNS, FORM, FIRST, SECOND = range(
    8
)  # columns of the table of tensors
PLAIN, DENSE, OUTER = 0, 1, 2
"""Forms of the metric, by the number of tensors that it is made of: none outside the network, where d = g."""
FACTOR, LR, DECAY, MOMENTUM, NESTEROV, SIGN = range(
    6
)  # columns of the table of numbers; ``FACTOR`` is c, ``SIGN`` -1 to ascend


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def squared_norm(tensors, numbers, scratch):
    """The sum of g d over all parameters; ``scratch`` is memory of their type for one row."""
    square = 0.0
    for i in range(len(tensors)):
        rows, columns, form = tensors[i, ROWS], tensors[i, COLUMNS], tensors[i, FORM]
        g = matrix_at(tensors[i, GRADIENT], rows, columns, scratch)
        total = 0.0
        for k in range(rows):
            _direction(tensors[i], g, k, numbers[i, FACTOR], form, scratch)
            along = scratch.dtype.type(0)
            for d in range(columns):
                along += g[k, d] * scratch[d]
            total += along
        square += total
    return square


@njit(error_model="numpy", fastmath={"contract", "arcp"}, cache=True)
def _direction(tensor, g, k, factor, form, out):
    """Row k of factor g / kappa."""
    columns = g.shape[1]
    scale = out.dtype.type(factor)
    if form == OUTER:
        scale = out.dtype.type(factor / vector_at(tensor[FIRST], len(g), out)[k])
        along = vector_at(tensor[SECOND], columns, out)
        for d in range(columns):
            out[d] = g[k, d] / along[d] * scale
    elif form == DENSE:
        kappa = matrix_at(tensor[FIRST], len(g), columns, out)
        for d in range(columns):
            out[d] = g[k, d] / kappa[k, d] * scale
    else:
        for d in range(columns):
            out[d] = g[k, d] * scale


@njit(error_model="numpy", fastmath={"contract", "arcp"}, cache=True)
def descend(tensors, numbers, clip, scratch):
    """V = momentum v + d;  p = (1 - eta weight_decay) p - eta v, with d scaled by ``clip``."""
    cast = scratch.dtype.type
    for i in range(len(tensors)):
        rows, columns, form = tensors[i, ROWS], tensors[i, COLUMNS], tensors[i, FORM]
        p = matrix_at(tensors[i, PARAMETER], rows, columns, scratch)
        g = matrix_at(tensors[i, GRADIENT], rows, columns, scratch)
        lr, momentum = cast(numbers[i, LR]), cast(numbers[i, MOMENTUM])
        keep = cast(1 - numbers[i, LR] * numbers[i, DECAY])
        factor = clip * numbers[i, SIGN] * numbers[i, FACTOR]
        for k in range(rows):
            _direction(tensors[i], g, k, factor, form, scratch)
            if momentum != 0:
                v = matrix_at(tensors[i, VELOCITY], rows, columns, scratch)[k]
                for d in range(columns):
                    v[d] = momentum * v[d] + scratch[d]
                if numbers[i, NESTEROV] != 0:
                    for d in range(columns):
                        scratch[d] += momentum * v[d]
                else:
                    for d in range(columns):
                        scratch[d] = v[d]
            for d in range(columns):
                p[k, d] = keep * p[k, d] - lr * scratch[d]
