"""The linear recurrence h_t = S h_{t-1} + u_t of a squared recurrent layer.

Where u does not change and nothing is negative, three shortcuts apply. All are decided by ratios of entries of one
unit, which node-wise rescaling does not change, so that rescaled copies of a network stay bitwise alike.

*Krylov vectors.* From a zero start h_t = sum_{s <= t} K_s with K_s = S^s u (for u = 0 after the first step, h_t = K_t).
If l K <= S K <= r K elementwise, with K = K_{n-1}, then l^m K <= K_{n-1+m} <= r^m K for all m (Collatz and Wielandt;
S is not negative). A few products bring l and r together, whether S contracts or grows, and the rest of the sequence
is a geometric one. It is taken as soon as the bounds on every sum up to h_T differ by no more than rounding.

*Doubling.* h_{n+i} = S^n h_i + h_n: log2 T squarings of S and one large product in the place of T matrix-vector
products, for T much larger than H, where l and r do not come together.

*A fixed point.* For layers above the first, whose u settles later: with h' = S h + u and r = max_i (h' - u)_i / h_i, S
shrinks the norm max_i |x|_i / h_i to r of it, so the states to come differ from h' by at most e r / (1 - r) of h,
e = max_i |h' - h|_i / h_i. Below rounding, the rest of the sequence is h'; and what is left of one that decays to zero
is zero, if it is only summed.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.precision import full_precision

_LOOK_FIRST = 8  # Krylov vectors; enough for layers of the usual starts in float32
_FEW = 24  # Krylov vectors; most layers need no more
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
    steps, known = u.shape[0], u.shape[0]
    if steps > _LOOK_FIRST:
        known = _constant_from(u, backwards)
        decays = known == 1 and not bool(u[-2 if backwards else 1].any())
        if start is None and not signed and (known == 0 or (decays and summed)):
            made = _by_krylov_vectors(S, u[-1 if backwards else 0], steps, moving=known == 0)
            return made.flip(0) if backwards else made
    h = torch.empty_like(u, memory_format=torch.contiguous_format)
    states = h.unbind(0)  # all rows at once: indexing costs as much as a small product
    entering = (u[0],) * steps if u.stride(0) == 0 else u.unbind(0)
    if backwards:
        states, entering = states[::-1], entering[::-1]
    if start is None:
        states[0].copy_(entering[0])
    else:
        torch.addmv(entering[0], S, start, out=states[0])
    addmv, n = torch.addmv, 1  # n states are done
    while n < steps:
        addmv(entering[n], S, states[n - 1], out=states[n])
        n += 1
        if n % _LOOK_EVERY or n >= steps or n <= known + 1:
            continue
        seen = h[steps - n :] if backwards else h[:n]
        new, old = states[n - 1], states[n - 2]
        if signed:
            ending = new if torch.equal(new, old) else None
        else:
            ending = _ending(new, old, entering[n - 1], seen if summed else None)
        if ending is not None:
            rest = h[: steps - n] if backwards else h[n:]
            rest.copy_(ending)
            break
    return h


def _constant_from(u: Tensor, backwards: bool) -> int:
    """The first step, in the order of the recurrence, from which u stays as it is."""
    if u.stride(0) == 0:
        return 0
    if not bool((u[:-1] if backwards else u[1:]).any()):  # what is read at the last step alone
        return 1
    changes = (u[1:] != u[:-1]).any(1).nonzero()
    if not len(changes):
        return 0
    return u.shape[0] - 1 - int(changes[0]) if backwards else int(changes[-1]) + 1


def _by_krylov_vectors(S: Tensor, first: Tensor, steps: int, *, moving: bool) -> Tensor:
    """The states S^t first, or their sums up to t where u is ``moving``, in the order of the recurrence."""
    K = first.new_empty(steps, first.shape[0])
    rows: Sequence[Tensor] = K[:_FEW].unbind(0)
    rows[0].copy_(first)
    mv, n, look = torch.mv, 1, _LOOK_FIRST
    while n < steps:
        if n == len(rows):
            rows = K.unbind(0)
        mv(S, rows[n - 1], out=rows[n])
        n += 1
        if n < look or n >= steps:
            continue
        look = n + (_LOOK_FIRST // 2 if n < 2 * _LOOK_EVERY else _LOOK_EVERY)
        ratio = _geometric(K[:n], steps - n)
        if ratio is not None:
            powers = torch.full((steps - n,), ratio, dtype=torch.float64, device=K.device).cumprod(0)
            torch.outer(powers.to(K), rows[n - 1], out=K[n:])
            break
        if n >= 2 * _LOOK_EVERY and _worth_doubling(S, steps - n):
            states = K.cumsum_(0) if moving else K
            _double(S, states, n, moving=moving)
            return states
    return K.cumsum_(0) if moving else K


def _geometric(K: Tensor, more: int) -> float | None:
    """The ratio of the Krylov vectors to come, if that gives the next ``more`` and all their sums to rounding."""
    new, old = K[-1], K[-2]
    ratios, weights = new / old, K.sum(0) / new
    low, high = (float(bound) for bound in torch.aminmax(ratios))
    if not high < math.inf:  # zeros: units that nothing reaches, or not yet
        alive = old > 0
        if bool(new[~alive].any()) or not bool(alive.any()):
            return None
        low, high = (float(bound) for bound in torch.aminmax(ratios[alive]))
        weights = weights.nan_to_num(math.inf)
    least, most = _geometric_sum(low, more), _geometric_sum(high, more)
    # sums differ by K_{n-1} times this, and are at least K_0 + ... + K_{n-1} + K_{n-1} least
    spread = (most - least) / (float(weights.amin()) + least)
    return (low + high) / 2 if spread <= torch.finfo(K.dtype).eps else None


def _geometric_sum(r: float, n: int) -> float:
    """The sum r + r^2 + ... + r^n; infinity where that is too large."""
    if n * abs(math.log(max(r, 1e-300))) > 700:
        return r / (1 - r) if r < 1 else math.inf
    return float(n) if r == 1 else r * math.expm1(n * math.log(r)) / (r - 1) if r > 0 else 0.0


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


def _double(S: Tensor, states: Tensor, n: int, *, moving: bool) -> None:
    """Fill all states from the first n; ``moving`` says whether u is the same at all steps or zero after the first."""
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
