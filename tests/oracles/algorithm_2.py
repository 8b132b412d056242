"""S19's Algorithms 1 and 2, and its step in path space by a list of basis paths, on matrices alone.

Nothing of the package is used. `algorithm_2` puts right what the print has wrong: line 6 sums W^o G
over the masked weights too and W^i M^i over the wrong axis, prints G / W for G over the incoming
skeleton weight, and line 9 leaves the mask of W^i R out. W^i is [h, d], W^r [h, h], W^o [k, h];
nothing has a bias, as in S19's Eqs. (1) and (2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = tuple[Tensor, Tensor, Tensor]


def masks(w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 1, counted from 0: M^i[j][j % d] = 1 and M^o[j % k][j] = 1."""
    m_in, m_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
    for j in range(len(w_in)):
        m_in[j, j % w_in.shape[1]] = 1
        m_out[j % len(w_out), j] = 1
    return m_in, m_out


def loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """Half the mean square of Eqs. (1) and (2) at the last step; x is [batch, time, d]."""
    w_in, w_rec, w_out = weights
    h = x.new_zeros(len(x), len(w_rec))
    for t in range(x.shape[1]):
        h = torch.relu(x[:, t] @ w_in.T + h @ w_rec.T)
    return (h @ w_out.T - y).square().mean() / 2


def gradients(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    leaves = tuple(w.clone().requires_grad_() for w in weights)
    return torch.autograd.grad(loss(leaves, x, y), leaves)


def algorithm_2(weights: Weights, eta: float, x: Tensor, y: Tensor) -> Weights:
    """Lines 3 to 10, with outgoing skeleton weights counted as 1, as printed."""
    w_in, w_rec, w_out = weights
    g_in, g_rec, g_out = gradients(weights, x, y)
    m_in, m_out = masks(w_in, w_out)
    s = (w_in * m_in).sum(1)
    # line 6; and Eqs. (13) to (16)
    through = (w_rec * g_rec).sum(0) + (w_out * g_out * (1 - m_out)).sum(0)
    g_paths = (g_in * m_in).sum(1) - through / s
    # line 7; and Eq. (17)
    ratio = 1 - eta * g_paths / s
    # lines 9 and 10; and Eqs. (10) to (12)
    new_in = ratio[:, None] * w_in * m_in + (w_in - eta * g_in) * (1 - m_in)
    new_out = w_out * m_out + (w_out - eta * (g_out / s) / s) / ratio * (1 - m_out)
    new_rec = (w_rec - eta * (g_rec / s) / s) / ratio
    return new_in, new_rec, new_out


def basis(w_in: Tensor, w_out: Tensor) -> list[list[tuple[int, int, int]]]:
    """The Skeleton Method: paths as lists of (matrix, row, column), those of skeleton edges alone first."""
    (h, d), k = w_in.shape, len(w_out)
    into = [(0, j, j % d) for j in range(h)]
    out_of = [(2, j % k, j) for j in range(h)]
    paths = [[into[j], out_of[j]] for j in range(h)]
    paths += [[(0, j, i), out_of[j]] for j in range(h) for i in range(d) if (0, j, i) != into[j]]
    paths += [[into[j], (2, o, j)] for j in range(h) for o in range(k) if (2, o, j) != out_of[j]]
    paths += [[into[i], (1, j, i), out_of[j]] for i in range(h) for j in range(h)]
    return paths


def values(weights: Weights) -> Tensor:
    """v_p, the product of the weights along p."""
    lists = [w.tolist() for w in weights]
    paths = basis(weights[0], weights[2])
    return torch.tensor(
        [math.prod(lists[m][a][b] for m, a, b in p) for p in paths], dtype=torch.float64
    )


def jacobian(weights: Weights) -> Tensor:
    """dv / dw, [paths, weights]: the product of the other weights of a path, none of which is on it twice."""
    lists = [w.tolist() for w in weights]
    offsets = [0, weights[0].numel(), weights[0].numel() + weights[1].numel()]
    paths = basis(weights[0], weights[2])
    result = torch.zeros(len(paths), sum(w.numel() for w in weights), dtype=torch.float64)
    for row, path in zip(result, paths, strict=True):
        for edge in path:
            m, a, b = edge
            others = [lists[n][c][d] for n, c, d in path if (n, c, d) != edge]
            row[offsets[m] + a * weights[m].shape[1] + b] = math.prod(others)
    return result


def path_step(weights: Weights, eta: float, x: Tensor, y: Tensor) -> Tensor:
    """Eq. (6): v - eta dL/dv, with dL/dv from Eq. (7), dL/dw = J^T dL/dv, solved as it stands."""
    j = jacobian(weights)
    g = torch.cat([part.flatten() for part in gradients(weights, x, y)])
    found = torch.linalg.lstsq(j.T, g[:, None]).solution[:, 0]
    assert torch.allclose(j.T @ found, g, rtol=1e-9, atol=1e-12)
    return values(weights) - eta * found
