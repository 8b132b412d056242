"""Path-SGD's step on all parameters, and the norm that it clips, in one compiled call each.

Letters: p parameter, g = dL/dp, kappa = rows columns^T, or a matrix; c its normalizer, d = c g / kappa, v velocity.
"""

from __future__ import annotations

from numba import njit

from pathspace.compiled.linear import REORDER
from pathspace.compiled.memory import matrix_at, vector_at

PARAMETER, GRADIENT, VELOCITY, ROWS, COLUMNS, FORM, FIRST, SECOND = range(
    8
)  # columns of the table of tensors
PLAIN, DENSE, OUTER = 0, 1, 2
"""Forms of the metric, by the number of tensors that it is made of: none outside the network, where d = g."""
FACTOR, LR, DECAY, MOMENTUM, NESTEROV, SIGN = range(
    6
)  # columns of the table of numbers; ``FACTOR`` is c, ``SIGN`` -1 to ascend


ONES, INVERSE, QUOTIENT = range(
    3
)  # rows of the scratch memory, as wide as the longest row or column; the first holds ones


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _invert(tensor, scratch):
    """1 / columns, for all rows: a product costs a fraction of a quotient; the factors are far from the type's ends."""
    if tensor[FORM] == OUTER:
        columns = vector_at(tensor[SECOND], tensor[COLUMNS], scratch)
        for d in range(len(columns)):
            scratch[INVERSE, d] = 1 / columns[d]


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _scale(tensor, k, factor, like):
    """What is left of factor / kappa in row k, besides the columns."""
    if tensor[FORM] == OUTER:
        return factor / vector_at(tensor[FIRST], tensor[ROWS], like)[k]
    return factor


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _divide(tensor, g, k, quotient):
    """Row k of g / kappa: some elements of kappa may be so small that their inverse is infinite."""
    kappa = matrix_at(tensor[FIRST], tensor[ROWS], tensor[COLUMNS], quotient)[k]
    for d in range(len(kappa)):
        quotient[d] = g[d] / kappa[d]


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def squared_norm(tensors, numbers, scratch):
    """The sum of g d over all parameters."""
    square = 0.0
    for i in range(len(tensors)):
        G = matrix_at(tensors[i, GRADIENT], tensors[i, ROWS], tensors[i, COLUMNS], scratch)
        form = tensors[i, FORM]
        _invert(tensors[i], scratch)
        total = 0.0
        for k in range(len(G)):
            scale = scratch.dtype.type(_scale(tensors[i], k, numbers[i, FACTOR], scratch))
            if form == DENSE:
                _divide(tensors[i], G[k], k, scratch[QUOTIENT])
                total += scale * _product(G[k], scratch[QUOTIENT], scratch[ONES])
            else:
                total += scale * _product(G[k], G[k], scratch[INVERSE if form == OUTER else ONES])
        square += total
    return square


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _product(x, a, b):
    total = x.dtype.type(0)
    for d in range(len(x)):
        total += x[d] * (a[d] * b[d])
    return total


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def descend(tensors, numbers, clip, scratch):
    """V = momentum v + d;  p = (1 - eta weight_decay) p - eta v, with d scaled by ``clip``."""
    for i in range(len(tensors)):
        rows, columns, form, n = tensors[i, ROWS], tensors[i, COLUMNS], tensors[i, FORM], numbers[i]
        P = matrix_at(tensors[i, PARAMETER], rows, columns, scratch)
        G = matrix_at(tensors[i, GRADIENT], rows, columns, scratch)
        V = P if n[MOMENTUM] == 0 else matrix_at(tensors[i, VELOCITY], rows, columns, scratch)
        factor = clip * n[SIGN] * n[FACTOR]
        if form == DENSE:
            size = rows * columns
            kappa = vector_at(tensors[i, FIRST], size, scratch)
            _move_dense(P.reshape(size), V.reshape(size), G.reshape(size), kappa, factor, n)
        elif form == OUTER:
            _invert(tensors[i], scratch)
            by = vector_at(tensors[i, FIRST], rows, scratch)
            _move(P, V, G, scratch[INVERSE], by, factor, n)
        else:
            _move(P, V, G, scratch[ONES], scratch[ONES], factor, n)


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _move(P, V, A, b, by, factor, numbers):
    """The step of some rows, with d = factor / by a b; all rows at once, as a call costs as much as a short row."""
    cast = P.dtype.type
    lr, momentum = cast(numbers[LR]), cast(numbers[MOMENTUM])
    keep = cast(1 - numbers[LR] * numbers[DECAY])
    for k in range(P.shape[0]):
        p, v, a, scale = P[k], V[k], A[k], cast(factor / by[k])
        if momentum == 0:
            step = lr * scale
            for d in range(P.shape[1]):
                p[d] = keep * p[d] - step * (a[d] * b[d])
        elif numbers[NESTEROV] == 0:
            for d in range(P.shape[1]):
                v[d] = momentum * v[d] + scale * (a[d] * b[d])
                p[d] = keep * p[d] - lr * v[d]
        else:
            for d in range(P.shape[1]):
                along = scale * (a[d] * b[d])
                v[d] = momentum * v[d] + along
                p[d] = keep * p[d] - lr * (along + momentum * v[d])


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _move_dense(p, v, g, kappa, factor, numbers):
    """The same with d = factor g / kappa, in one loop over all elements."""
    cast = p.dtype.type
    lr, momentum, factor = cast(numbers[LR]), cast(numbers[MOMENTUM]), cast(factor)
    keep = cast(1 - numbers[LR] * numbers[DECAY])
    if momentum == 0:
        step = lr * factor
        for d in range(len(p)):
            p[d] = keep * p[d] - step * (g[d] / kappa[d])
    elif numbers[NESTEROV] == 0:
        for d in range(len(p)):
            v[d] = momentum * v[d] + factor * (g[d] / kappa[d])
            p[d] = keep * p[d] - lr * v[d]
    else:
        for d in range(len(p)):
            along = factor * (g[d] / kappa[d])
            v[d] = momentum * v[d] + along
            p[d] = keep * p[d] - lr * (along + momentum * v[d])
