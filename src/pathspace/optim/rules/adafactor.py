"""Adafactor with sums of squares that are made in one pass, where torch's own takes norms.

Norms over the rows and over the columns of a matrix took longer than the rest of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from pathspace.optim.rules.few_passes import FewPasses
from pathspace.rescaling.optimizer_states import Group


class _Entry(NamedTuple):
    """A parameter with its gradient and what torch's Adafactor keeps of it.

    Attributes:
        p: the parameter.
        g: its gradient.
        row: mean squares of its rows, ``[..., n, 1]``; None for a vector.
        column: of its columns, ``[..., 1, m]``; None for a vector.
        variance: of its elements; None for a matrix.
        step: how many steps it has taken.
    """

    p: Tensor
    g: Tensor
    row: Tensor | None
    column: Tensor | None
    variance: Tensor | None
    step: Tensor


class Adafactor(FewPasses, optim.Adafactor):
    """``torch.optim.Adafactor``, its options and its state."""

    torch_only = ("foreach",)

    def _take(self, group: Group) -> None:
        columns: list[list[Any]] = [[] for _ in _Entry._fields]
        self._init_group(group, *columns)
        for entry in map(_Entry, *columns):
            _step(entry, group)


def _step(entry: _Entry, group: Mapping[str, Any]) -> None:
    """Take a step of one parameter."""
    p = entry.p
    g = -entry.g if group["maximize"] else entry.g
    lr = float(group["lr"])
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(p.dtype).eps
    entry.step.add_(1)
    t = entry.step.item()
    rate = max(eps2, _root_mean_square(p)) * min(lr, 1 / math.sqrt(t))
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    estimate = _estimate(entry, g, t ** group["beta2_decay"], eps1)
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(g)
    p.add_(update, alpha=-rate / max(1.0, _root_mean_square(update) / group["d"]))


def _estimate(entry: _Entry, g: Tensor, weight: float, eps: float) -> Tensor:
    """Take the squares of a gradient into their means, and return the estimate of its elements' variances."""
    squares = g.square()
    if entry.row is None or entry.column is None:
        assert entry.variance is not None
        return squares.copy_(entry.variance.lerp_(squares, weight))
    entry.row.lerp_(squares.mean(-1, keepdim=True), weight)
    entry.column.lerp_(squares.mean(-2, keepdim=True), weight)
    of_row = entry.row / entry.row.mean(-2, keepdim=True).clamp_(min=eps)
    return torch.mul(of_row, entry.column, out=squares)


def _root_mean_square(tensor: Tensor) -> float:
    """Return the root of the mean square of the elements."""
    flat = tensor.reshape(-1)
    return math.sqrt(torch.dot(flat, flat).item() / len(flat))
