"""The linear recurrence h_t = S h_{t-1} + u_t of a squared recurrent layer.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``; delta = dG/dh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.squared.precision import full_precision


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
        h = _states(S, u, start, backwards)
        ctx.save_for_backward(S, h, start)
        ctx.backwards = backwards
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        S, h, start = ctx.saved_tensors
        with full_precision(grad_outputs[0]):
            # delta_t = g_t + S^T delta_{t+1}: the same recurrence the other way, so it can be differentiated again
            delta = linear_recurrence(S.t(), grad_outputs[0], backwards=not ctx.backwards)
            # dG/dS = sum_t delta_t h_{t-1}^T
            after, before, first = (delta[:-1], h[1:], -1) if ctx.backwards else (delta[1:], h[:-1], 0)
            to_S = after.t() @ before
            if start is None:
                return to_S, delta, None, None
            return to_S + torch.outer(delta[first], start), delta, S.t() @ delta[first], None


def _states(S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    states, entering = h.unbind(0), u.unbind(0)  # all rows at once: indexing costs as much as a small product
    if backwards:
        states, entering = states[::-1], entering[::-1]
    before = start
    for state, enters in zip(states, entering, strict=True):
        before = state.copy_(enters) if before is None else torch.addmv(enters, S, before, out=state)
    return h


def linear_recurrence(
    S: Tensor, u: Tensor, start: Tensor | None = None, *, backwards: bool = False
) -> Tensor:
    """States h_t = S h_{t-1} + u_t of a linear recurrence.

    Args:
        S: transition matrix ``[H, H]``.
        u: what enters at each step, ``[T, H]``.
        start: h_{-1}, ``[H]``; zero if None.
        backwards: run from t = T-1 down to 0, h_t = S h_{t+1} + u_t, from h_T = ``start``.

    Returns:
        All states, ``[T, H]``; differentiable, any number of times.
    """
    return _LinearRecurrence.apply(S, u, start, backwards)  # type: ignore[return-value]
