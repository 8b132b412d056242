"""The linear recurrence h_t = S h_{t-1} + u_t of a squared recurrent layer.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, u: Tensor, start: Tensor) -> Tensor:
        h = _run(S, u, start)
        ctx.save_for_backward(S, h, start)
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        S, h, start = ctx.saved_tensors
        # delta_t = g_t + S^T delta_{t+1}: the same recurrence backwards, so it can be differentiated again.
        g = grad_outputs[0].flip(0)
        delta = _LinearRecurrence.apply(S.t(), g, torch.zeros_like(start)).flip(0)  # type: ignore[union-attr]
        # dG/dS = sum_t delta_t h_{t-1}^T
        before = torch.cat([start[None], h[:-1]])
        return delta.t() @ before, delta, S.t() @ delta[0]


def _run(S: Tensor, u: Tensor, start: Tensor) -> Tensor:
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    steps = u.shape[0]
    previous = start
    if u.is_cuda or steps < 16:
        for t in range(steps):
            previous = torch.addmv(u[t], S, previous, out=h[t])
        return h
    # While u does not change, a state that repeats exactly repeats for ever: contracting layers stop early, with
    # bitwise the result of the full loop.
    same = (u[1:] == u[:-1]).all(1).tolist()
    t = 0
    while t < steps:
        torch.addmv(u[t], S, previous, out=h[t])
        if t % 4 == 3 and t + 1 < steps and same[t - 1] and torch.equal(h[t], previous):
            end = t + 1
            while end < steps and same[end - 1]:
                end += 1
            h[t + 1 : end] = h[t]
            t = end - 1
        previous = h[t]
        t += 1
    return h


def linear_recurrence(S: Tensor, u: Tensor, start: Tensor | None = None) -> Tensor:
    """States h_t = S h_{t-1} + u_t of a linear recurrence.

    Args:
        S: transition matrix ``[H, H]``.
        u: what enters at each step, ``[T, H]``.
        start: h_{-1}, ``[H]``; zero if None.

    Returns:
        All states, ``[T, H]``; differentiable, any number of times.
    """
    if start is None:
        start = u.new_zeros(u.shape[1])
    return _LinearRecurrence.apply(S, u, start)  # type: ignore[return-value]
