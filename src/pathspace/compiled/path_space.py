"""G-SGD's and G-Adam's step on all parameters, in two compiled calls; ``paths.space.frame`` has the rule.

A tensor of any shape is a matrix of ``rows`` and ``columns``, its first dimension and all others; the nodes at an end
of its elements vary along rows, along columns, or along both. Vectors over nodes, skeleton edges and classes are
float64.

Letters: w weight, g = dL/dw, x = dL/d(path coordinate), f factors of nodes, x = g f_u f_v; q, R as in ``paths.frame``;
T the sum of w g over what leaves a class; K skeleton edges, P classes that move; eta lr.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pathspace.compiled.linear import REORDER
from pathspace.compiled.memory import matrix_at, vector_at

# columns of the table of tensors: addresses (of moments only where the rule keeps some), shape, its edges among the K,
# and for either end where its nodes lie in the list of all: -1 for none; columns of all rows are apart by ``STRIDE``
PARAMETER, GRADIENT, MEAN, SQUARE, ROWS, COLUMNS, BEGIN, END, SOURCE, TARGET = *range(9), 11
TENSOR = 14
BY_ROW, BY_COLUMN, STRIDE = range(3)
# columns of the table of numbers: ``SIGN`` is -1 to ascend, ``KEEP`` is 1 - eta weight_decay; then a rule's own
LR, KEEP, SIGN, MOMENTUM, NESTEROV = range(5)
BETA, OTHER_BETA, EPS, STEP, SCALE, SMALL = range(3, 9)
NUMBER = 9
# rows of the memory over nodes: A and B, 1 / a and 1 / b, f, 1 / R, T
PRODUCT, INVERSE_UNIT, FACTOR, INVERSE, LEAVING = range(5)
# rows of the memory over edges: w, g, x, and the direction that a rule makes of x
WEIGHT, SLOPE, X, DIRECTION = range(4)
# rows of the memory over classes: the constant part of a_e / v_e at e = I(c), all of it, q, R
RATE, RELATIVE, MOMENT, RATIO = range(4)
# columns of the table of classes: nodes, edges, the parameter that owns I(c), where I(c) starts, whose R this is,
# whether I(c) is a coordinate, and whether O(c) is no I(c')
CLASS, OPPOSITE, INTO, OUT_OF, OWNER, START, LIKE, MOVED, SINGLE = range(9)
_ALONG, _OVER, _BY, _BY_INVERSE, _LINE = range(5)
SCRATCH = 5
"""Rows of the scratch memory, as wide as the longest row or list of edges, and at least ``BLOCK``."""
BLOCK = 4096

_ALMOST_ZERO = 1e-300  # as in ``paths.frame``
_BLOCK = 16  # rows that are summed in the type of the weights


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def survey(tensors, ends, edges, order, classes, links, numbers, nodes, at_edges, at_classes, scratch, norm):
    """Bring products, factors and x of the skeleton edges to the present weights and gradients.

    Args:
        tensors: table of tensors.
        ends: nodes at the ends of their elements.
        edges: flat indices of the K edges; those of one tensor ascend.
        order: edge, node, and the node before it, in the order in which products are computed.
        classes: table of classes.
        links: pairs of classes c, c' with O(c) = I(c'), the last before an output first.
        numbers: table of numbers.
        nodes: memory over nodes.
        at_edges: memory over edges.
        at_classes: memory over classes.
        scratch: memory of the tensors' type.
        norm: whether to look at all gradients.

    Returns:
        The sum of x^2 over all paths, and all elements outside the network, if ``norm``; else 0.
    """
    f, T = nodes[FACTOR], nodes[LEAVING]
    T[:] = 0
    for i in range(len(tensors)):
        t = tensors[i]
        w = vector_at(t[PARAMETER], t[ROWS] * t[COLUMNS], scratch)
        g = vector_at(t[GRADIENT], t[ROWS] * t[COLUMNS], scratch)
        for k in range(t[BEGIN], t[END]):
            at_edges[WEIGHT, k] = w[edges[k]]
            at_edges[SLOPE, k] = numbers[i, SIGN] * g[edges[k]]
        _leave(t, ends, numbers[i, SIGN], T, scratch)
    # A_c = w A_u for I(c) = (u -> c); B_c = w B_v for O(c) = (c -> v)
    for n in range(len(order)):
        k, node, start = order[n]
        nodes[PRODUCT, node] = at_edges[WEIGHT, k] * nodes[PRODUCT, start]
    # f = 1 / r for r = A / a, and 0 where r = 0
    for n in range(len(f)):
        r = nodes[PRODUCT, n] * nodes[INVERSE_UNIT, n]
        f[n] = r / (r * r + _ALMOST_ZERO)
    q = at_classes[MOMENT]
    for p in range(len(classes)):
        c = classes[p]
        at_classes[RELATIVE, p] = f[c[CLASS]] * f[c[OPPOSITE]] * at_classes[RATE, p]
        # q_c = w_I g_I + w_O g_O - T_c, and without w_O g_O + q_c' if O(c) is I(c')
        q[p] = at_edges[WEIGHT, c[INTO]] * at_edges[SLOPE, c[INTO]]
        if c[SINGLE]:
            q[p] += at_edges[WEIGHT, c[OUT_OF]] * at_edges[SLOPE, c[OUT_OF]]
        q[p] -= T[c[CLASS]]
    for n in range(len(links)):
        q[links[n, 0]] += q[links[n, 1]]
    at_edges[X] = 0  # edges O are held
    for p in range(len(classes)):
        if classes[p, MOVED]:
            at_edges[X, classes[p, INTO]] = q[p] * at_classes[RELATIVE, p]
    return _squares(tensors, ends, edges, f, at_edges[X], scratch) if norm else 0.0


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _leave(t, ends, sign, T, scratch):
    """T_u += sign w g, for all elements of one tensor."""
    rows, columns = t[ROWS], t[COLUMNS]
    by_row, by_column, stride = t[SOURCE + BY_ROW], t[SOURCE + BY_COLUMN], t[SOURCE + STRIDE]
    if by_row < 0 and by_column < 0:
        return
    W = matrix_at(t[PARAMETER], rows, columns, scratch)
    G = matrix_at(t[GRADIENT], rows, columns, scratch)
    if by_row >= 0:
        for k in range(rows):
            total = scratch.dtype.type(0)
            for d in range(columns):
                total += W[k, d] * G[k, d]
            T[ends[by_row + k]] += sign * total
    elif stride:
        for k in range(rows):
            for d in range(columns):
                T[ends[by_column + k * stride + d]] += sign * (W[k, d] * G[k, d])
    else:
        sums = scratch[_LINE, :columns]
        for first in range(0, rows, _BLOCK):
            sums[:] = 0
            last = min(first + _BLOCK, rows)
            whole = first + (last - first) // 4 * 4
            for k in range(first, whole, 4):
                for d in range(columns):
                    sums[d] += (W[k, d] * G[k, d] + W[k + 1, d] * G[k + 1, d]) + (
                        W[k + 2, d] * G[k + 2, d] + W[k + 3, d] * G[k + 3, d]
                    )
            for k in range(whole, last):
                for d in range(columns):
                    sums[d] += W[k, d] * G[k, d]
            for d in range(columns):
                T[ends[by_column + d]] += sign * sums[d]


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _times(values, ends, begin, out):
    """Multiply by values of nodes, those that the list of all has from ``begin`` on; of none if it is negative."""
    if begin >= 0:
        for d in range(len(out)):
            out[d] *= out.dtype.type(values[ends[begin + d]])


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _factors(values, ends, t, end, first, by, along):
    """Multiply by what a block of rows, from ``first`` on, and the columns have from the nodes at one end."""
    _times(values, ends, t[end + BY_ROW] + first if t[end + BY_ROW] >= 0 else -1, by)
    _times(values, ends, t[end + BY_COLUMN] + first * t[end + STRIDE], along)


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _is_varied(t):
    """Whether the columns of every row have nodes of their own."""
    return t[SOURCE + STRIDE] != 0 or t[TARGET + STRIDE] != 0


@njit(error_model="numpy", fastmath=REORDER, cache=True)
def _squares(tensors, ends, edges, f, x, scratch):
    """Sum of x^2, where x = g f_u f_v but at skeleton edges."""
    total = 0.0
    for k in range(len(x)):
        total += x[k] * x[k]
    for i in range(len(tensors)):
        t = tensors[i]
        columns, next_edge = t[COLUMNS], t[BEGIN]
        G = matrix_at(t[GRADIENT], t[ROWS], columns, scratch)
        by, along = scratch[_BY, :1], scratch[_ALONG, :columns]
        for k in range(t[ROWS]):
            new = along[: columns if k == 0 or _is_varied(t) else 0]
            by[0], new[:] = 1, 1
            _factors(f, ends, t, SOURCE, k, by, new)
            _factors(f, ends, t, TARGET, k, by, new)
            begin, found = 0, scratch.dtype.type(0)
            while begin < columns:
                end = columns
                if next_edge < t[END] and edges[next_edge] < (k + 1) * columns:
                    end = edges[next_edge] - k * columns
                    next_edge += 1
                for d in range(begin, end):
                    element = by[0] * (G[k, d] * along[d])
                    found += element * element
                begin = max(begin, end + 1)  # a weight that is both O(c) and I(c') comes twice
            while next_edge < t[END] and edges[next_edge] < (k + 1) * columns:
                next_edge += 1
            total += found
    return total


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _direct(x, mean, square, n, adaptive):
    """Take gradients into the moments, and overwrite them by the direction."""
    cast = x.dtype.type
    if adaptive:
        # d = (m / (1 - beta1^t)) / (sqrt(s / (1 - beta2^t)) + eps)
        new, keep, new_square = cast(1 - n[BETA]), cast(n[OTHER_BETA]), cast(1 - n[OTHER_BETA])
        scale, small = cast(n[SCALE]), cast(n[SMALL])
        for d in range(len(x)):
            mean[d] += new * (x[d] - mean[d])
            square[d] = keep * square[d] + new_square * (x[d] * x[d])
            x[d] = mean[d] / (np.sqrt(square[d]) * scale + small)
    elif n[MOMENTUM] != 0:
        momentum, ahead = cast(n[MOMENTUM]), n[NESTEROV] != 0
        for d in range(len(x)):
            mean[d] = momentum * mean[d] + x[d]
            x[d] = x[d] + momentum * mean[d] if ahead else mean[d]


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def advance(
    tensors, ends, edges, classes, numbers, nodes, at_edges, at_classes, scratch, clip, clamp, adaptive
):
    """Take the step with all gradients times ``clip``, and R between ``clamp`` and its inverse, or any R if it is 0.

    ``adaptive`` asks for Adam's rule; :func:`survey` tells about the tables. Returns how many R were clamped; how many
    are negative, if ``clamp`` is 0.
    """
    if adaptive:  # the bias of m multiplies the denominator
        for i in range(len(tensors)):
            n = numbers[i]
            first = 1 - n[BETA] ** n[STEP]
            n[SCALE], n[SMALL] = first / np.sqrt(1 - n[OTHER_BETA] ** n[STEP]), n[EPS] * first
    moments = np.empty((2, at_edges.shape[1]), scratch.dtype)
    for i in range(len(tensors)):
        _direct_edges(tensors[i], edges, numbers[i], at_edges, moments, clip, adaptive, scratch)
    count = _find_ratios(classes, numbers, nodes, at_edges, at_classes, clamp)
    for i in range(len(tensors)):
        t = tensors[i]
        _move(t, ends, numbers[i], nodes, clip, adaptive, scratch)
        size = t[ROWS] * t[COLUMNS]
        w = vector_at(t[PARAMETER], size, scratch)
        for k in range(t[BEGIN], t[END]):
            w[edges[k]] = at_edges[WEIGHT, k]
        for row, address in enumerate((t[MEAN], t[SQUARE])):
            if address:
                moment = vector_at(address, size, scratch)
                for k in range(t[BEGIN], t[END]):
                    moment[edges[k]] = moments[row, k]
    return count


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _direct_edges(t, edges, n, at_edges, moments, clip, adaptive, scratch):
    """Directions of the skeleton edges of one tensor, and their moments, which :func:`_move` would overwrite."""
    span = slice(t[BEGIN], t[END])
    line = scratch[_LINE, : t[END] - t[BEGIN]]
    for row, address in enumerate((t[MEAN], t[SQUARE])):
        if address:
            moment = vector_at(address, t[ROWS] * t[COLUMNS], scratch)
            for k in range(t[BEGIN], t[END]):
                moments[row, k] = moment[edges[k]]
    for k in range(len(line)):
        line[k] = clip * at_edges[X, t[BEGIN] + k]
    _direct(line, moments[0, span], moments[1, span], n, adaptive)
    at_edges[DIRECTION, span] = line


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _find_ratios(classes, numbers, nodes, at_edges, at_classes, clamp):
    """R of all classes, 1 / R of all nodes, and the new weights of the edges I(c)."""
    count, ratios, inverse = 0, at_classes[RATIO], nodes[INVERSE]
    for p in range(len(classes)):
        # R = 1 + dv / v, dv / v = -lr d a / v
        c = classes[p]
        n = numbers[c[OWNER]]
        relative = -n[LR] * at_classes[RELATIVE, p] * at_edges[DIRECTION, c[INTO]]
        at_classes[MOMENT, p] = 1 + relative + (n[KEEP] - 1)
    for p in range(len(classes)):
        ratio = at_classes[MOMENT, classes[p, LIKE]]
        if clamp > 0:
            kept = ratio
            if ratio < 1 / clamp:
                kept = 1 / clamp
            elif ratio > clamp:
                kept = clamp
            count += kept != ratio
            ratio = kept
        else:
            count += ratio < 0
        ratios[p], inverse[classes[p, CLASS]] = ratio, 1 / ratio
    for p in range(len(classes)):
        # w <- w R_c / R_u for I(c) = (u -> c)
        if classes[p, MOVED]:
            at_edges[WEIGHT, classes[p, INTO]] *= ratios[p] * inverse[classes[p, START]]
    return count


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _move(t, ends, n, nodes, clip, adaptive, scratch):
    """W <- ((1 - eta weight_decay) w - eta d f_u f_v) / R_u for all elements, skeleton edges and all."""
    rows, columns, f, inverse = t[ROWS], t[COLUMNS], nodes[FACTOR], nodes[INVERSE]
    W = matrix_at(t[PARAMETER], rows, columns, scratch)
    G = matrix_at(t[GRADIENT], rows, columns, scratch)
    mean = W if t[MEAN] == 0 else matrix_at(t[MEAN], rows, columns, scratch)
    square = W if t[SQUARE] == 0 else matrix_at(t[SQUARE], rows, columns, scratch)
    along, over = scratch[_ALONG, :columns], scratch[_OVER, :columns]
    plain = not adaptive and n[MOMENTUM] == 0
    # calls cost as much as a short row
    block = 1 if _is_varied(t) else max(1, min(rows, BLOCK // max(1, columns)))
    for first in range(0, rows, block):
        count = min(block, rows - first)
        span = slice(first, first + count)
        by, by_inverse = scratch[_BY, :count], scratch[_BY_INVERSE, :count]
        new = columns if first == 0 or _is_varied(t) else 0
        new_along, new_over = along[:new], over[:new]
        by[:], by_inverse[:], new_along[:], new_over[:] = 1, 1, 1, 1
        _factors(f, ends, t, SOURCE, first, by, new_along)
        _factors(f, ends, t, TARGET, first, by, new_along)
        _factors(inverse, ends, t, SOURCE, first, by_inverse, new_over)
        if plain:
            new_along *= new_along
            by *= by * scratch.dtype.type(clip * n[SIGN])
            _subtract(W[span], G[span], by, along, by_inverse, over, n)
        else:
            x = scratch[_LINE, : count * columns].reshape(count, columns)
            _scale(G[span], by, along, clip * n[SIGN], x)
            _direct(x.reshape(-1), mean[span].reshape(-1), square[span].reshape(-1), n, adaptive)
            _subtract(W[span], x, by, along, by_inverse, over, n)


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _scale(G, by, along, factor, x):
    """X = factor g f_u f_v."""
    for k in range(G.shape[0]):
        scale = G.dtype.type(factor * by[k])
        for d in range(G.shape[1]):
            x[k, d] = scale * (G[k, d] * along[d])


@njit(error_model="numpy", fastmath={"contract"}, cache=True)
def _subtract(W, x, by, along, by_inverse, over, n):
    """W <- (keep w - eta x f_u f_v) / R_u."""
    keep = W.dtype.type(n[KEEP])
    for k in range(W.shape[0]):
        step, inverse = W.dtype.type(n[LR] * by[k]), by_inverse[k]
        for d in range(W.shape[1]):
            W[k, d] = (keep * W[k, d] - step * (x[k, d] * along[d])) * (inverse * over[d])
