"""Recurrent layers in the squared network: the linear recurrence h_t = S h_{t-1} + u_t, and stacks of it.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start
``[H]``; delta = dG/dh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.squared.precision import full_precision
from pathspace.squared.tape import Mix


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
        # delta_t = g_t + S^T delta_{t+1}: the same recurrence the other way, so it can be
        # differentiated again
        delta = linear_recurrence(S.t(), grad_outputs[0], backwards=not ctx.backwards)
        with full_precision(delta):
            # dG/dS = sum_t delta_t h_{t-1}^T
            if ctx.backwards:
                first = delta[-1]
                to_S = delta[:-1].t() @ h[1:]
            else:
                first = delta[0]
                to_S = delta[1:].t() @ h[:-1]
            if start is None:
                return to_S, delta, None, None
            return to_S + torch.outer(first, start), delta, S.t() @ first, None


def _states(S: Tensor, u: Tensor, start: Tensor | None, backwards: bool) -> Tensor:
    # powers of S cost less than the small products that they save; on a GPU launches cost more
    # than products
    enough = max(64, len(S) // 16) if u.is_cuda else 4 * len(S)
    if not len(S) or len(u) < enough:
        return _step_by_step(S, u, start, backwards)
    if backwards:
        return _in_blocks(S, u.flip(0), start).flip(0)
    return _in_blocks(S, u, start)


def _step_by_step(S: Tensor, u: Tensor, start: Tensor | None, backwards: bool = False) -> Tensor:
    h = u.clone(memory_format=torch.contiguous_format)
    # all rows at once: indexing costs as much as a small product
    states = h.unbind(0)
    before = start
    for state in reversed(states) if backwards else states:
        if before is not None:
            state.addmv_(S, before)
        before = state
    return h


def _in_blocks(S: Tensor, u: Tensor, start: Tensor | None) -> Tensor:
    """By 3 sqrt(T) products in place of T: the ends of blocks, each from zero, then from one another; then all."""
    size = math.isqrt(len(u))
    through = torch.linalg.matrix_power(S, size)
    # of units that nothing may enter: 0 times infinity. Where a CUDA graph is recorded nothing can
    # be looked at, and what is not finite is computed again in float64
    captured = S.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and not bool(through.isfinite().all()):
        return _step_by_step(S, u, start)
    h = F.pad(u, (0, 0, 0, -len(u) % size)).unflatten(0, (-1, size))
    if start is not None:
        h[0, 0] += S @ start
    states = h.unbind(1)
    ends = states[0]
    for enters in states[1:]:
        ends = torch.addmm(enters, ends, S.t())
    for before, end in pairwise(ends):
        end.addmv_(through, before)
    before = F.pad(ends[:-1], (0, 0, 1, 0))
    for state in states:
        before = state.addmm_(before, S.t())
    return h.flatten(0, 1)[: len(u)]


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
    with full_precision(u):
        if not torch.is_grad_enabled():
            return _states(S, u, start, backwards)
        return _LinearRecurrence.apply(S, u, start, backwards)


@dataclass(frozen=True)
class Stack:
    """The form of a stack of recurrent layers."""

    per_cell: int  # parameters of a cell
    starts: tuple[bool, ...]  # whether a cell has an initial state
    layers: int
    directions: int
    time_dim: int = 0  # of what enters

    def cells(self, slots: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], Tensor | None]]:
        """(parameters, initial state) of every cell."""
        position = 0
        for has_start in self.starts:
            end = position + self.per_cell
            yield slots[position:end], slots[end] if has_start else None
            position = end + has_start


def stacked_recurrence(
    x: Tensor,
    slots: Sequence[Tensor],
    stack: Stack,
    inside: list[tuple[Tensor, Tensor, Tensor]] | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the squared states of a stack of recurrent layers.

    Of several sequences x ``[T, N, in]`` that differ, as the windows of one, there is a dimension N
    in all results.

    For every cell, the states before and after each transition and what enters it are appended to
    ``inside``, if it is given. ``mix`` replaces the state of a cell at each of its steps.

    Returns:
        Outputs ``[T, directions * H]``, and last states ``[cells, H]``.
    """
    last: list[Tensor] = []
    outputs: list[Tensor] = []
    for index, (cell, initial) in enumerate(stack.cells(slots)):
        backwards = index % stack.directions == 1
        start = None if initial is None else initial.reshape(*x.shape[1:-1], -1)
        u = _entering(x, cell)
        if mix is None and x.dim() == 2:
            h = linear_recurrence(cell[1], u, start, backwards=backwards)
        else:
            h = _mixed_recurrence(cell[1], u, start, backwards, index, mix)
        if inside is not None:
            inside.append((_states_before(h, start, backwards=backwards), h, u))
        last.append(h[0] if backwards else h[-1])
        outputs.append(h)
        if len(outputs) == stack.directions:
            x = torch.cat(outputs, -1) if stack.directions > 1 else outputs[0]
            outputs = []
    return x, torch.stack(last)


def _entering(x: Tensor, cell: Sequence[Tensor]) -> Tensor:
    """Compute u_t = W x_t + b for all steps."""
    bias = cell[2] + cell[3] if len(cell) == 4 else None
    # the same input at every step: one product is enough
    constant = x.shape[0] > 1 and x.stride(0) == 0
    u = F.linear(x[:1] if constant else x, cell[0], bias)
    return u.expand(x.shape[0], *u.shape[1:])


def _states_before(h: Tensor, start: Tensor | None, *, backwards: bool) -> Tensor:
    """Return the states before each transition; the first is the start, or zero."""
    first = torch.zeros_like(h[:1]) if start is None else start.unsqueeze(0)
    return torch.cat([h[1:], first] if backwards else [first, h[:-1]])


def _mixed_recurrence(
    S: Tensor, u: Tensor, start: Tensor | None, backwards: bool, cell: int, mix: Mix | None
) -> Tensor:
    """h_t = mix(S h_{t-1} + u_t), one step after the other."""
    states = list(u.unbind(0))
    h = start
    for t in reversed(range(len(states))) if backwards else range(len(states)):
        h = states[t] if h is None else states[t] + F.linear(h, S)
        h = states[t] = h if mix is None else mix((cell, t), h)
    return torch.stack(states)
