"""Steepest descent of one unit in three forms of its metric M (O13: Ollivier 2013/2015; Section 2.2 of part I).

The weights into a unit are 1..I, its bias is 0; G is the gradient, M the metric ``[I + 1, I + 1]``.

    full            d = M^-1 G
    diagonal        d_i = G_i / M_ii
    quasi-diagonal  d_i = (G_i - G_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00),   d_0 = G_0 / M_00 - sum_i (M_0i / M_00) d_i

The full form does not change under any affine map of what enters the unit; the diagonal one only
when each input is rescaled; the quasi-diagonal one also when inputs are shifted. It is exact for a
single input and a bias.

Letters: G and M as above, O units, I weights into each.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING = 64  # a remainder of M_ii that is smaller than so many units of rounding is none


def solve_full(gradient: Tensor, metric: Tensor) -> Tensor:
    """d = M^+ G for every unit, with the pseudo-inverse where M is singular.

    Args:
        gradient: ``[O, I + 1]``.
        metric: ``[O, I + 1, I + 1]``, symmetric and non-negative.

    Returns:
        The direction, ``[O, I + 1]``.

    Example:
        >>> import torch, pathspace as ps
        >>> ps.metrics.solve_full(torch.tensor([[2.0, 4.0]]), torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
        tensor([[2., 2.]])
    """
    return (torch.linalg.pinv(metric, hermitian=True) @ gradient.unsqueeze(-1)).squeeze(-1)


def solve_diagonal(gradient: Tensor, diagonal: Tensor) -> Tensor:
    """d_i = G_i / M_ii, zero where M_ii is.

    Args:
        gradient: of any shape.
        diagonal: non-negative, of that shape.

    Returns:
        The direction.

    Example:
        >>> import torch, pathspace as ps
        >>> ps.metrics.solve_diagonal(torch.tensor([2.0, 1.0]), torch.tensor([4.0, 0.0]))
        tensor([0.5000, 0.0000])
    """
    return torch.where(diagonal > 0, gradient / torch.where(diagonal > 0, diagonal, 1.0), 0.0)


def solve_quasi_diagonal(
    gradient: Tensor, bias_gradient: Tensor, diagonal: Tensor, cross: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the quasi-diagonal direction of the weights into some units, and of their biases.

    Args:
        gradient: of the weights, ``[O, I]``.
        bias_gradient: of the biases, ``[O]``.
        diagonal: M_ii, ``[O, I]``.
        cross: M_0i, ``[O, I]``.
        bias: M_00, ``[O]``.

    Returns:
        The directions ``[O, I]`` and ``[O]``. A weight whose remainder M_ii - M_0i^2 / M_00 is
        nothing but rounding (an input that is constant, a second bias) does not move.

    Example:
        >>> import torch, pathspace as ps
        >>> one = torch.ones(1, 1)
        >>> d, d0 = ps.metrics.solve_quasi_diagonal(2 * one, one[0], 2 * one, one, one[0])
        >>> d.item(), d0.item()
        (1.0, 0.0)
    """
    has_bias = bias > 0
    safe = torch.where(has_bias, bias, 1.0)
    ratio = torch.where(has_bias.unsqueeze(1), cross / safe.unsqueeze(1), 0.0)  # M_0i / M_00
    remainder = diagonal - cross * ratio
    keeps = remainder > _ROUNDING * torch.finfo(diagonal.dtype).eps * diagonal
    d = torch.where(
        keeps,
        (gradient - bias_gradient.unsqueeze(1) * ratio) / torch.where(keeps, remainder, 1.0),
        0.0,
    )
    return d, torch.where(has_bias, bias_gradient / safe, 0.0) - (ratio * d).sum(1)
