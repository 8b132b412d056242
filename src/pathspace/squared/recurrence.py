"""Recurrent layers in the squared network: the linear recurrence h_t = S h_{t-1} + u_t, and stacks of it.

Letters: T time, H hidden, t runs over 0..T-1; S ``[H, H]``, u and h ``[T, H]``, h_{-1} = start ``[H]``; delta = dG/dh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """Squared states of a stack of recurrent layers: outputs ``[T, directions * H]`` and last states ``[cells, H]``.

    Of several sequences x ``[T, N, in]`` that differ, as the windows of one, there is a dimension N in all of these.

    For every cell, the states before and after each transition and what enters it are appended to
    ``inside``, if it is given. ``mix`` replaces the state of a cell at each of its steps.
    """
    last: list[Tensor] = []
    outputs: list[Tensor] = []
    for index, (cell, initial) in enumerate(stack.cells(slots)):
        backwards = index % stack.directions == 1
        start = None if initial is None else initial.reshape(*x.shape[1:-1], -1)
        bias = cell[2] + cell[3] if stack.per_cell == 4 else None
        constant = x.shape[0] > 1 and x.stride(0) == 0  # the same input at every step: one product is enough
        u = F.linear(x[:1] if constant else x, cell[0], bias)
        u = u.expand(x.shape[0], *u.shape[1:])
        if mix is None and x.dim() == 2:
            h = linear_recurrence(cell[1], u, start, backwards=backwards)
        else:
            h = _mixed_recurrence(cell[1], u, start, backwards, index, mix)
        if inside is not None:
            first = torch.zeros_like(h[:1]) if start is None else start.unsqueeze(0)
            before = torch.cat([h[1:], first] if backwards else [first, h[:-1]])
            inside.append((before, h, u))
        last.append(h[0] if backwards else h[-1])
        outputs.append(h)
        if len(outputs) == stack.directions:
            x = torch.cat(outputs, -1) if stack.directions > 1 else outputs[0]
            outputs = []
    return x, torch.stack(last)


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
