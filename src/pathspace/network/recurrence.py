"""The linear recurrence h_t = S h_{t-1} + u_t of a squared recurrent layer.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LOOK_AFTER = 40  # steps; contracting layers of the usual starts repeat after about 30


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, u: Tensor, start: Tensor | None) -> Tensor:
        h = _run(S, u, start)
        ctx.save_for_backward(S, h, start)
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        S, h, start = ctx.saved_tensors
        # delta_t = g_t + S^T delta_{t+1}: the same recurrence backwards, so it can be differentiated again.
        delta = _LinearRecurrence.apply(S.t(), grad_outputs[0].flip(0), None).flip(0)  # type: ignore[union-attr]
        # dG/dS = sum_t delta_t h_{t-1}^T
        grad_S = delta[1:].t() @ h[:-1]
        if start is None:
            return grad_S, delta, None
        return grad_S + torch.outer(delta[0], start), delta, S.t() @ delta[0]


def _run(S: Tensor, u: Tensor, start: Tensor | None) -> Tensor:
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    states = h.unbind(0)  # all rows at once: indexing costs as much as a small product
    entering = [u[0]] * len(states) if u.stride(0) == 0 else u.unbind(0)
    if start is None:
        states[0].copy_(entering[0])
    else:
        torch.addmv(entering[0], S, start, out=states[0])
    # While u does not change, a state that repeats exactly repeats for ever: contracting layers stop early, with
    # bitwise the result of the full loop. Looking for it costs a synchronisation on a GPU, and time in short loops.
    looks = not u.is_cuda and len(states) > _LOOK_AFTER
    same = (u[1:] == u[:-1]).all(1).tolist() if looks else []
    t = 1
    while t < len(states):
        torch.addmv(entering[t], S, states[t - 1], out=states[t])
        if looks and t % 8 == 7 and same[t - 1] and torch.equal(states[t], states[t - 1]):
            end = t + 1
            while end < len(states) and same[end - 1]:
                end += 1
            h[t + 1 : end] = states[t]
            t = end - 1
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
    return _LinearRecurrence.apply(S, u, start)  # type: ignore[return-value]
