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
    def forward(ctx: Any, S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
        h = run_recurrence(S, u, start, backwards)
        ctx.save_for_backward(S, h, start)
        ctx.backwards = backwards
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        S, h, start = ctx.saved_tensors
        # delta_t = g_t + S^T delta_{t+1}: the same recurrence the other way, so it can be differentiated again.
        g, other_way = grad_outputs[0], not ctx.backwards
        if torch.is_grad_enabled():
            delta: Tensor = _LinearRecurrence.apply(S.t(), g, None, other_way)  # type: ignore[assignment]
        else:
            delta = run_recurrence(S.t(), g, None, other_way)
        # dG/dS = sum_t delta_t h_{t-1}^T
        after, before, first = (
            (delta[:-1], h[1:], delta[-1]) if ctx.backwards else (delta[1:], h[:-1], delta[0])
        )
        grad_S = after.t() @ before
        if start is None:
            return grad_S, delta, None, None
        return grad_S + torch.outer(first, start), delta, S.t() @ first, None


def run_recurrence(S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
    """:func:`linear_recurrence` without a gradient."""
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    states = h.unbind(0)  # all rows at once: indexing costs as much as a small product
    steps = len(states)
    entering = (u[0],) * steps if u.stride(0) == 0 else u.unbind(0)
    if backwards:
        states, entering = states[::-1], entering[::-1]
    previous = states[0]
    if start is None:
        previous.copy_(entering[0])
    else:
        torch.addmv(entering[0], S, start, out=previous)
    # While u does not change, a state that repeats exactly repeats for ever: contracting layers stop early, with
    # bitwise the result of the full loop. Looking for it costs a synchronisation on a GPU, and time in short loops.
    looks = not u.is_cuda and steps > _LOOK_AFTER
    same = (u[1:] == u[:-1]).all(1).tolist() if looks else []
    same = same[::-1] if backwards else same
    addmv, t = torch.addmv, 1
    while t < steps:
        previous = addmv(entering[t], S, previous, out=states[t])
        if looks and t % 8 == 7 and same[t - 1] and torch.equal(previous, states[t - 1]):
            end = t + 1
            while end < steps and same[end - 1]:
                end += 1
            rest = slice(steps - end, steps - t - 1) if backwards else slice(t + 1, end)
            h[rest] = previous
            t = end - 1
        t += 1
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
