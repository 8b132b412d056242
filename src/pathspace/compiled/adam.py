"""Path-Adam's step on all parameters, its metric, and the norm that it clips, in one compiled call each.

Letters: p parameter, g = dL/dp, kappa = rows columns^T, or a tensor; c its normalizer, D = kappa / c, h = g / sqrt(D),
m and v the moments of h, t the number of steps.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER
from pathspace.compiled.memory import matrix_at, vector_at

PARAMETER, GRADIENT, MEAN, SQUARE, SIZE, ROOT = range(
    6
)  # columns of the table of tensors; no root outside the network
LR, DECAY, BETA, OTHER_BETA, EPS, SIGN, STEP = range(
    7
)  # columns of the table of numbers; ``SIGN`` -1 to ascend
_ROWS, _COLUMNS, _ROOT, _INVERSE, _OTHER_INVERSE, _FIRST, _SECOND = range(7)
"""Columns of the table of metrics: 1 / w_e of the gauge is a product, and kappa is one, or a tensor (no second)."""


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def roots(sources, numbers, like):
    """Write sqrt(D), D = (kappa + a / w_e) / c, of each parameter to where its root lies; numbers are c and a."""
    for i in range(len(sources)):
        rows, columns = sources[i, _ROWS], sources[i, _COLUMNS]
        root = matrix_at(sources[i, _ROOT], rows, columns, like)
        by_row = vector_at(sources[i, _INVERSE], rows, like)
        by_column = vector_at(sources[i, _OTHER_INVERSE], columns, like)
        c = numbers[0, i]
        for k in range(rows):
            added = like.dtype.type(numbers[1, i] * by_row[k] / c)
            if sources[i, _SECOND] == 0:
                kappa = matrix_at(sources[i, _FIRST], rows, columns, like)
                inverse = like.dtype.type(1 / c)
                for d in range(columns):
                    root[k, d] = np.sqrt(kappa[k, d] * inverse + added * by_column[d])
            else:
                scale = like.dtype.type(vector_at(sources[i, _FIRST], rows, like)[k] / c)
                along = vector_at(sources[i, _SECOND], columns, like)
                for d in range(columns):
                    root[k, d] = np.sqrt(along[d] * scale + added * by_column[d])


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def squared_norm(tensors, like):
    """The sum of h^2 over all parameters."""
    square = 0.0
    for i in range(len(tensors)):
        size = tensors[i, SIZE]
        g = vector_at(tensors[i, GRADIENT], size, like)
        total = like.dtype.type(0)
        if tensors[i, ROOT] == 0:
            for k in range(size):
                total += g[k] * g[k]
        else:
            root = vector_at(tensors[i, ROOT], size, like)
            for k in range(size):
                h = g[k] / root[k]
                total += h * h
        square += total
    return square


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def advance(tensors, numbers, clip, like):
    """H = clip g / sqrt(D), its moments, and p = (1 - eta weight_decay) p - eta d / sqrt(D)."""
    cast = like.dtype.type
    for i in range(len(tensors)):
        size, n = tensors[i, SIZE], numbers[i]
        p, g = vector_at(tensors[i, PARAMETER], size, like), vector_at(tensors[i, GRADIENT], size, like)
        m, v = vector_at(tensors[i, MEAN], size, like), vector_at(tensors[i, SQUARE], size, like)
        # d = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        first, second = 1 - n[BETA] ** n[STEP], 1 - n[OTHER_BETA] ** n[STEP]
        scale, eps = cast(first / np.sqrt(second)), cast(n[EPS] * first)
        new, keep = cast(1 - n[BETA]), cast(n[OTHER_BETA])
        new_square, factor = cast(1 - n[OTHER_BETA]), cast(n[SIGN] * clip)
        lr, stay = cast(n[LR]), cast(1 - n[LR] * n[DECAY])
        if tensors[i, ROOT] == 0:
            for k in range(size):
                h = g[k] * factor
                m[k] += new * (h - m[k])
                v[k] = keep * v[k] + new_square * (h * h)
                p[k] = stay * p[k] - lr * (m[k] / (np.sqrt(v[k]) * scale + eps))
            continue
        root = vector_at(tensors[i, ROOT], size, like)
        for k in range(size):
            h = g[k] / root[k] * factor
            m[k] += new * (h - m[k])
            v[k] = keep * v[k] + new_square * (h * h)
            p[k] = stay * p[k] - lr * (m[k] / (np.sqrt(v[k]) * scale + eps)) / root[k]
