"""A linear map of squared parameters, with no more of them than it needs, and its gradients by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.squared.squares import Outer, Square, dense, single_row, single_value


def linear_forward(
    h: Tensor, q: Tensor | Square, c: Tensor | Square | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """y = h q^T + c, with no more of q than it needs: its row sums where h is one number."""
    bias = None if c is None else dense(c)
    value = single_value(h) if isinstance(q, Square) else None
    if value is not None and isinstance(q, Square):
        # value is the 1 of an input
        row = q.row_sums() * value if bias is None else torch.addcmul(bias, q.row_sums(), value)
        return row.expand(*h.shape[:-1], row.shape[0]), ()
    matrix, row = dense(q), single_row(h)
    if row is None:
        return F.linear(h, matrix, bias), ()
    made = torch.mv(matrix, row) if bias is None else torch.addmv(bias, matrix, row)
    return made.expand(*h.shape[:-1], made.shape[0]), ()


def linear_pullback(
    inputs: Sequence[Any], _: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | Outer | None]:
    """Gradients of y = h q^T + c in h, q and c; that in q is an outer product if g or h repeats one row."""
    h, q, g = inputs[0], inputs[1], gradients[0]
    assert g is not None
    out, before = g.shape[-1], h.shape[-1]
    count = g.numel() // max(1, out)
    g_row, h_row = single_row(g), single_row(h)
    g_sum = g.reshape(-1, out).sum(0) if g_row is None else g_row * count if count > 1 else g_row
    found: list[Tensor | Outer | None] = [None] * len(inputs)
    if needed[0] and g_row is None:
        found[0] = g @ dense(q)
    elif needed[0] and g_row is not None:
        value = single_value(g_row)
        sums = q.column_sums() * value if value is not None and isinstance(q, Square) else None
        back = torch.mv(dense(q).t(), g_row) if sums is None else sums
        found[0] = back.expand(h.shape)
    if needed[1]:
        if h_row is not None:
            found[1] = Outer(g_sum, h_row)
        elif g_row is not None:
            found[1] = Outer(g_row, h.reshape(-1, before).sum(0))
        else:
            found[1] = g.reshape(-1, out).t() @ h.reshape(-1, before)
    if len(inputs) > 2 and needed[2]:
        found[2] = g_sum
    return found
