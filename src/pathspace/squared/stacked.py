"""Stacks of recurrent layers in the squared network: their states, and the gradients in what makes them.

Letters: T time, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.squared.linear import linear_forward, linear_pullback
from pathspace.squared.recurrence import linear_recurrence, run_recurrence, transition_gradient
from pathspace.squared.squares import Outer, Square, dense
from pathspace.squared.tape import Inside, Mix

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """The form of a stack of recurrent layers."""

    per_cell: int  # parameters of a cell
    starts: tuple[bool, ...]  # whether a cell has an initial state
    layers: int
    directions: int
    time_dim: int = 0  # of what enters

    def cells(self, slots: Sequence[T]) -> Iterator[tuple[int, Sequence[T], T | None]]:
        """(first slot, parameters, initial state) of every cell."""
        position = 0
        for has_start in self.starts:
            end = position + self.per_cell
            yield position, slots[position:end], slots[end] if has_start else None
            position = end + has_start


def stacked_recurrence(
    x: Tensor,
    slots: Sequence[Tensor],
    stack: Stack,
    inside: list[tuple[Tensor, Tensor, Tensor]] | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor]:
    """Squared states of a stack of recurrent layers: outputs ``[T, directions * H]`` and last states ``[cells, H]``.

    For every cell, the states before and after each transition and what enters it are appended to
    ``inside``, if it is given. ``mix`` replaces the state of a cell at each of its steps.
    """
    last: list[Tensor] = []
    outputs: list[Tensor] = []
    for index, (_, cell, initial) in enumerate(stack.cells(slots)):
        backwards = index % stack.directions == 1
        start = None if initial is None else initial.reshape(-1)
        bias = cell[2] + cell[3] if stack.per_cell == 4 else None
        constant = x.shape[0] > 1 and x.stride(0) == 0  # the same input at every step: one product is enough
        u = F.linear(x[:1] if constant else x, cell[0], bias).expand(x.shape[0], -1)
        if mix is None:
            h = linear_recurrence(cell[1], u, start, backwards=backwards)
        else:
            h = _mixed_recurrence(cell[1], u, start, backwards, index, mix)
        if inside is not None:
            first = h.new_zeros(1, h.shape[1]) if start is None else start.reshape(1, -1)
            before = torch.cat([h[1:], first] if backwards else [first, h[:-1]])
            inside.append((before, h, u))
        last.append(h[0] if backwards else h[-1])
        outputs.append(h)
        if len(outputs) == stack.directions:
            x = torch.cat(outputs, 1) if stack.directions > 1 else outputs[0]
            outputs = []
    return x, torch.stack(last)


def _mixed_recurrence(
    S: Tensor, u: Tensor, start: Tensor | None, backwards: bool, cell: int, mix: Mix
) -> Tensor:
    """h_t = mix(S h_{t-1} + u_t), one step after the other."""
    states = list(u.unbind(0))
    h = start
    for t in reversed(range(len(states))) if backwards else range(len(states)):
        h = states[t] = mix((cell, t), states[t] if h is None else states[t] + S @ h)
    return torch.stack(states)


def stacked_states(x: Tensor, slots: Sequence[Tensor | Square], stack: Stack) -> list[Tensor]:
    """:func:`stacked_recurrence` without a gradient, and cheaper: the states of every cell, ``[T, H]`` each."""
    states: list[Tensor] = []
    for index, (_, cell, initial) in enumerate(stack.cells(slots)):
        bias = dense(cell[2]) + dense(cell[3]) if stack.per_cell == 4 else None
        u, _ = linear_forward(x, cell[0], bias)
        start = None if initial is None else dense(initial).reshape(-1)
        states.append(run_recurrence(dense(cell[1]), u, start, index % stack.directions == 1))
        if (index + 1) % stack.directions == 0:
            top = states[-stack.directions :]
            x = torch.cat(top, 1) if stack.directions > 1 else top[0]
    return states


def stacked_pullback(
    x: Tensor,
    slots: Sequence[Tensor | Square],
    inside: Inside,
    g: Tensor | None,
    last: Tensor | None,
    stack: Stack,
    needed: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | Outer | None]]:
    """Gradients of a stack of recurrent layers in its input and its slots.

    Args:
        x: what enters, ``[T, D]``.
        slots: parameters and initial states.
        inside: states of every cell, ``[T, H]`` each; gets the gradients in them.
        g: gradient of the outputs ``[T, directions * H]``; None for zero.
        last: gradient of the last states ``[cells, H]``; None for zero.
        stack: the form of the stack.
        needed: which gradients are wanted: in x, and in each slot.
    """
    states = inside.states
    found: list[Tensor | Outer | None] = [None] * len(slots)
    cells = list(enumerate(stack.cells(slots)))
    # What enters every cell grows with time then, and so do all its states: see ``run_recurrence``
    summed = stack.directions == 1 and not any(stack.starts) and x.stride(0) == 0
    for layer in reversed(range(stack.layers)):
        below: Tensor | None = None
        own = cells[layer * stack.directions : (layer + 1) * stack.directions]
        entering = x if layer == 0 else _joined(states, layer - 1, stack)
        for index, (position, cell, initial) in own:
            h, backwards = states[index], index % stack.directions == 1
            mine = _gradient_of_states(h, g, last, index, stack)
            S, start = dense(cell[1]), None if initial is None else dense(initial)
            delta = run_recurrence(S.t(), mine, None, not backwards, summed=summed)
            inside.deltas[index] = delta
            if needed[position + 2]:
                found[position + 1] = transition_gradient(
                    h, delta, None if start is None else start.reshape(-1), backwards
                )
            wanted = [layer > 0 or needed[0], needed[position + 1], True]
            back, found[position], total = linear_pullback((entering, cell[0], None), None, [delta], wanted)
            found[position + 2 : position + stack.per_cell] = [total] * (stack.per_cell - 2)
            if start is not None:
                first = delta[-1] if backwards else delta[0]
                found[position + stack.per_cell] = (S.t() @ first).reshape(start.shape)
            if isinstance(back, Tensor):
                below = back if below is None else below + back
        g = below
    return g, found


def _joined(states: Sequence[Tensor], layer: int, stack: Stack) -> Tensor:
    top = states[layer * stack.directions : (layer + 1) * stack.directions]
    return torch.cat(list(top), 1) if stack.directions > 1 else top[0]


def _gradient_of_states(h: Tensor, g: Tensor | None, last: Tensor | None, index: int, stack: Stack) -> Tensor:
    """What reaches the states ``[T, H]`` of one cell from above: outputs, and the last state."""
    direction, hidden = index % stack.directions, h.shape[1]
    mine = torch.zeros_like(h) if g is None else g[:, direction * hidden : (direction + 1) * hidden]
    if last is not None:
        mine = mine.clone(memory_format=torch.contiguous_format)
        mine[0 if direction else -1] += last[index]
    return mine
