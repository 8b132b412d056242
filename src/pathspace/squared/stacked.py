"""Stacks of recurrent layers in the squared network.

Letters: T time, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.squared.recurrence import linear_recurrence
from pathspace.squared.tape import Mix


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
