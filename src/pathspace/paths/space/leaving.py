"""What leaves each unit class: T_c, the sum of w g over all weights that leave class c.

Letters: w weights, g gradients, c a unit class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.paths.space.chart import Ends, Place
from pathspace.paths.space.slots import Index, Scratch, Slots

_BLOCK = 2**16  # elements: two blocks and their product stay in the cache of a core

Tensors = Mapping[str, Tensor]


class Leaving:
    """The sums T of a chart's parameters, computed anew at every step in the same memory.

    Args:
        places: name -> place of the parameters.
        weights: the parameters; their types and shapes are looked at.
        like: a vector over nodes.
        scratch: memory.

    Attributes:
        sums: T at every node.
    """

    def __init__(self, places: Mapping[str, Place], weights: Tensors, like: Tensor, scratch: Scratch) -> None:
        self.sums = Slots(torch.zeros_like(like))
        columns: dict[tuple[Ends, torch.dtype], list[str]] = {}
        parts: list[tuple[Index, _Weights | _Columns]] = []
        for name, place in places.items():
            w, ends = weights[name], place.sources
            if ends is None:
                continue
            if ends.last and w.dim() == 2 and w.shape[1] == ends.nodes.count:
                columns.setdefault((ends, w.dtype), []).append(name)
            else:
                parts.append((ends.nodes, _Weights(name, ends, scratch)))
        parts += [(ends.nodes, _Columns.of(names, weights)) for (ends, _), names in columns.items()]
        self._parts = [(nodes, nodes.view(self.sums.values), part) for nodes, part in parts]
        visits = torch.zeros_like(like)
        for nodes, _ in parts:
            visits.index_add_(0, nodes.places, visits.new_ones(nodes.count))
        self._once = not bool((visits > 1).any()) and all(view is not None for _, view, _ in self._parts)

    def sum_(self, weights: Tensors, gradients: Tensors) -> None:
        """Bring ``sums`` up to date."""
        if not self._once:
            self.sums.values.zero_()
        for nodes, view, part in self._parts:
            terms = part.sum(weights, gradients)
            if view is None:
                self.sums.values.index_add_(0, nodes.places, terms.to(self.sums.values.dtype))
            elif self._once:
                view.copy_(terms)
            else:
                view.add_(terms)
        self.sums.refresh()


@dataclass(frozen=True, eq=False, slots=True)
class _Weights:
    """A parameter of any shape."""

    name: str
    ends: Ends
    scratch: Scratch

    def sum(self, weights: Tensors, gradients: Tensors) -> Tensor:
        w = weights[self.name]
        return self.ends.sum_to(torch.mul(w, gradients[self.name], out=self.scratch.like(w)))


@dataclass(frozen=True, eq=False, slots=True)
class _Columns:
    """Matrices whose columns leave the same nodes: sums over columns, a block of rows at a time."""

    names: list[str]  # the one with the most rows first
    memory: Tensor
    last: list[Tensor]  # the part of the memory that each one's last block takes

    @staticmethod
    def of(names: list[str], weights: Tensors) -> _Columns:
        names = sorted(names, key=lambda name: -weights[name].shape[0])
        w = weights[names[0]]
        rows = w.shape[0] if w.is_cuda else min(w.shape[0], max(1, _BLOCK // w.shape[1]))
        memory = w.new_empty(rows, w.shape[1])
        last = [memory[: (weights[name].shape[0] - 1) % rows + 1] for name in names]
        return _Columns(names, memory, last)

    def sum(self, weights: Tensors, gradients: Tensors) -> Tensor:
        rows, empty = self.memory.shape[0], True
        for name, last in zip(self.names, self.last, strict=True):
            w, g = weights[name], gradients[name]
            blocks = ((w, g),) if w.shape[0] <= rows else zip(w.split(rows), g.split(rows), strict=True)
            for w_block, g_block in blocks:
                if empty:
                    torch.mul(w_block, g_block, out=self.memory)
                    empty = False
                else:
                    (self.memory if w_block.shape[0] == rows else last).addcmul_(w_block, g_block)
        return self.memory.sum(0)
