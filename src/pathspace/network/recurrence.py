"""The linear recurrence h_t = S h_{t-1} + u_t of a squared recurrent layer.

S, u and h are not negative. Where u does not change, three shortcuts apply, all decided by ratios of entries of one
unit, which node-wise rescaling does not change, so that rescaled copies of a network stay bitwise alike:

*A fixed point.* With h' = S h + u and r = max_i (h' - u)_i / h_i, S h <= r h, so S shrinks the norm
max_i |x|_i / h_i to r of it (Collatz and Wielandt), and the states to come differ from h' by at most e r / (1 - r) of
h, e = max_i |h' - h|_i / h_i. Below rounding, the rest of the sequence is h'.

*A tail.* With u = 0 and h' = S h <= r h, all states to come add up to at most h' r / (1 - r). Where the sequence is
only summed, and only with weights that do not grow along it, what is below the rounding of the sum so far is zero.

*Doubling.* From a zero start h_{n+i} = S^n h_i + h_n: log2 T squarings of S and one large product in the place of T
matrix-vector products, for T much larger than H, where S does not contract.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pathspace.network.precision import full_precision

_LOOK_AFTER = 16  # steps; layers of the usual starts contract to the rounding of float32 in about 14
_LOOK_EVERY = 8  # steps between two looks at whether the rest of the sequence is known
_DOUBLE_BEYOND = (
    3  # H: squaring S costs as much as about this many H products with vectors, for the usual sizes
)


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
        h = run_recurrence(S, u, start, backwards, signed=True)  # derivatives of higher order have signs
        ctx.save_for_backward(S, h, start)
        ctx.backwards = backwards
        return h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        with full_precision(grad_outputs[0]):
            return _LinearRecurrence._pull_back(ctx, grad_outputs[0])

    @staticmethod
    def _pull_back(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        S, h, start = ctx.saved_tensors
        # delta_t = g_t + S^T delta_{t+1}: the same recurrence the other way, so it can be differentiated again.
        other_way = not ctx.backwards
        if torch.is_grad_enabled():
            delta: Tensor = _LinearRecurrence.apply(S.t(), g, None, other_way)  # type: ignore[assignment]
        else:
            delta = run_recurrence(S.t(), g, None, other_way, signed=True)
        grad_S = transition_gradient(h, delta, start, ctx.backwards)
        first = delta[-1] if ctx.backwards else delta[0]
        return grad_S, delta, None if start is None else S.t() @ first, None


def transition_gradient(h: Tensor, delta: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
    """dG/dS = sum_t delta_t h_{t-1}^T."""
    after, before, first = (delta[:-1], h[1:], delta[-1]) if backwards else (delta[1:], h[:-1], delta[0])
    grad_S = after.t() @ before
    return grad_S if start is None else grad_S + torch.outer(first, start)


def run_recurrence(
    S: Tensor,
    u: Tensor,
    start: Tensor | None = None,
    backwards: bool = False,
    *,
    summed: bool = False,
    signed: bool = False,
) -> Tensor:
    """:func:`linear_recurrence` without a gradient.

    Args:
        S: transition matrix ``[H, H]``.
        u: what enters at each step, ``[T, H]``.
        start: h_{-1}, ``[H]``; zero if None.
        backwards: run from t = T-1 down to 0.
        summed: states are only summed over time, with weights that do not grow along the recurrence: then a tail
            below the rounding of the sum may be left zero.
        signed: u or start may be negative: then only a bitwise repetition ends the loop early.
    """
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    states = h.unbind(0)  # all rows at once: indexing costs as much as a small product
    steps = len(states)
    entering = (u[0],) * steps if u.stride(0) == 0 else u.unbind(0)
    if backwards:
        states, entering = states[::-1], entering[::-1]
    if start is None:
        states[0].copy_(entering[0])
    else:
        torch.addmv(entering[0], S, start, out=states[0])
    known = _constant_from(u, backwards) if steps > _LOOK_AFTER else steps
    addmv, n = torch.addmv, 1  # n states are done
    while n < steps:
        addmv(entering[n], S, states[n - 1], out=states[n])
        n += 1
        if n < _LOOK_AFTER or n % _LOOK_EVERY or n >= steps or n <= known + 1:
            continue
        seen = h[steps - n :] if backwards else h[:n]
        rest = h[: steps - n] if backwards else h[n:]
        new, old = states[n - 1], states[n - 2]
        if signed:
            ending = new if torch.equal(new, old) else None
        else:
            ending = _ending(new, old, entering[n - 1], seen if summed else None)
        if ending is not None:
            rest.copy_(ending)
            break
        if _worth_doubling(S, steps - n) and start is None and known <= 1:
            moving = bool(entering[1].any())
            if known == 0 or not moving:
                _double(S, h, n, backwards, moving)
                break
    return h


def _constant_from(u: Tensor, backwards: bool) -> int:
    """The first step, in the order of the recurrence, from which u stays as it is."""
    if u.stride(0) == 0:
        return 0
    changes = (u[1:] != u[:-1]).any(1).nonzero()
    if not len(changes):
        return 0
    return u.shape[0] - 1 - int(changes[0]) if backwards else int(changes[-1]) + 1


def _ending(new: Tensor, old: Tensor, u: Tensor, seen: Tensor | None) -> Tensor | None:
    """What all states after ``new`` = S ``old`` + u are, to rounding; None if that is not known."""
    alive, passed = old > 0, new - u
    # S old <= growth old; nothing but zeros passes from a zero
    growth = float(torch.where(alive, passed / old, passed * math.inf).nan_to_num(0.0, math.inf).amax())
    rounding = torch.finfo(new.dtype).eps
    change = float(torch.where(alive, (new - old).abs() / old, 0.0).amax())
    if change == 0 and growth < math.inf:
        return new  # it repeats bitwise
    if not growth < 1:
        return None
    # the distance of all later states from this one
    if change * growth <= rounding * (1 - growth):
        return new
    if seen is not None and not bool(u.any()):
        # the sum of all later states, compared with the sum so far
        tail = float(torch.where(alive, new / seen.sum(0), 0.0).amax())
        if tail * growth <= rounding * (1 - growth):
            return torch.zeros_like(new)
    return None


def _worth_doubling(S: Tensor, steps: int) -> bool:
    return steps > (0 if S.is_cuda else _DOUBLE_BEYOND * S.shape[0])


def _double(S: Tensor, h: Tensor, n: int, backwards: bool, moving: bool) -> None:
    """Fill all states from the first n; ``moving`` says whether u is zero after the first step or the same at all."""
    states = h.flip(0) if backwards else h
    power = torch.linalg.matrix_power(S, n)
    while n < len(states):
        more = min(n, len(states) - n)
        if moving:
            # h_{n+i} = S^n h_i + h_n, counted from 1
            torch.addmm(states[n - 1], states[:more], power.t(), out=states[n : n + more])
        else:
            torch.mm(states[:more], power.t(), out=states[n : n + more])
        n += more
        if n < len(states):
            power = power @ power
    if backwards:
        h.copy_(states.flip(0))


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
