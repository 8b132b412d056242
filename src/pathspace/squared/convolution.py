"""A convolution and a sum over windows in the squared network, with no more positions than differ, and their gradients.

See ``repeated``. Where too many positions differ, PyTorch's own operations run on all of them.

Letters: h ``[C, *space]`` what enters, q ``[O, C / groups, *kernel]`` squared weights, g gradient of what leaves; M and
n classes of positions and of windows, t taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.repeated import (
    Repeated,
    Windows,
    columns,
    often,
    repeated,
    spread,
    summed,
    summed_back,
)
from pathspace.squared.squares import Square, dense

Backward = Callable[[Tensor, Tensor, Tensor, list[bool]], tuple[Tensor | None, Tensor | None]]
"""(g, h, q, whether the gradients of h and q are needed) -> these, found by PyTorch's own operation."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of the squared network.

    Attributes:
        windows: where it reads; None to run it on all positions.
        groups: of channels.
        run: PyTorch's operation, on h, q and the squared biases or None.
        backward: the gradients of that.
        space: how many axes space has.
    """

    windows: Windows | None
    groups: int
    run: Callable[..., Tensor]
    backward: Backward
    space: int

    def forward(
        self, h: Tensor | Repeated, q: Tensor | Square, c: Tensor | Square | None = None
    ) -> tuple[Tensor | Repeated, Any]:
        """What leaves, and h, for the pullback."""
        weight, bias = dense(q), None if c is None else dense(c)
        few = None if self.windows is None else repeated(h, self.space)
        at = None if few is None else columns(self.windows, few.axes, weight.device)  # pyright: ignore
        if few is None or at is None:
            whole = spread(h)
            return self.run(whole, weight, bias), whole
        # y = q columns + c
        matrix, read = self._matrix(weight), self._matrix(at.take(few.values), taps=at.taps)
        made = torch.matmul(matrix, read).view(weight.shape[0], -1)
        made = made if bias is None else made.add_(bias[:, None])
        return Repeated(made, at.axes, few.lead), few

    def _matrix(self, t: Tensor, taps: int = 0) -> Tensor:
        """``[O, C / groups * taps]`` of weights, ``[C / groups * taps, n]`` of columns; for each of several groups."""
        rows = t.shape[0] // self.groups
        return t.view(*self._lead, rows * taps, -1) if taps else t.reshape(*self._lead, rows, -1)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.groups == 1 else (self.groups,)

    def pullback(
        self, inputs: Sequence[Any], h: Any, gradients: Sequence[Any], needed: Sequence[bool]
    ) -> list[Any]:
        """Gradients in h, q and c."""
        weight, g = dense(inputs[1]), gradients[0]
        h = inputs[0] if h is None else h  # nobody needed what leaves
        found: list[Any] = [None] * len(inputs)
        few = repeated(g, self.space)
        if few is not None and self.windows is not None:
            if needed[0]:
                found[0] = self._to_h(self.windows, weight, few)
            entering = repeated(h, self.space) if needed[1] else None
            if entering is not None:
                # q is read for the last time where h needs no gradient, or has it
                free = isinstance(inputs[1], Square) and (found[0] is not None or not needed[0])
                out = inputs[1].reusable_buffer() if free else None
                found[1] = self._to_q(self.windows, weight, entering, few, out)
        missing = [need and known is None for need, known in zip(needed[:2], found, strict=False)]
        if any(missing):
            rest = self.backward(spread(g), spread(h), weight, missing)
            found[:2] = [known if own is None else own for own, known in zip(rest, found, strict=False)]
        if len(inputs) > 2 and needed[2]:
            if few is not None:
                found[2] = few.total()
            else:
                channels = g.dim() - self.space - 1
                found[2] = g.sum([d for d in range(g.dim()) if d != channels])
        return found

    def _to_h(self, windows: Windows, weight: Tensor, g: Repeated) -> Repeated | None:
        """What every position gets from the windows that read it: (q^T g), summed over taps."""
        at = summed_back(windows, g.axes, weight.device, by_tap=True)
        if at is None:
            return None
        each = torch.matmul(self._matrix(weight).mT, self._matrix(g.values))
        return Repeated(at.sum(each.view(weight.shape[1] * self.groups, -1)), at.axes, g.lead)

    def _to_q(
        self, windows: Windows, weight: Tensor, h: Repeated, g: Repeated, out: Tensor | None
    ) -> Tensor | None:
        """The sum of g h^T over windows, of which those alike in both are counted."""
        at = columns(windows, h.axes, weight.device, g.axes)
        if at is None:
            return None
        read = self._matrix(at.take(h.values), taps=at.taps)
        count = often(at.axes, read.dtype, read.device)
        place = None if out is None else self._matrix(out)
        if g.values.shape[1] == 1:  # g (sum of h)^T
            total = torch.matmul(read, count)
            return torch.mul(self._matrix(g.values), total[..., None, :], out=place).view(weight.shape)
        beside = self._matrix(g.values.index_select(1, at.beside).mul_(count))
        return torch.matmul(beside, read.mT, out=place).view(weight.shape)


@dataclass(frozen=True)
class WindowSum:
    """Sums over windows of every channel.

    Attributes:
        windows: where they read.
        run: PyTorch's operation.
        backward: its gradient, from g and h.
    """

    windows: Windows
    run: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]

    def forward(self, h: Tensor | Repeated) -> tuple[Tensor | Repeated, Any]:
        """What leaves, and h where the pullback needs it."""
        few = repeated(h, len(self.windows.size))
        at = None if few is None else summed(self.windows, few.axes, few.values.device)
        if few is None or at is None:
            whole = spread(h)
            return self.run(whole), whole
        return Repeated(at.sum(few.values), at.axes, few.lead), h

    def pullback(
        self, inputs: Sequence[Any], h: Any, gradients: Sequence[Any], needed: Sequence[bool]
    ) -> list[Any]:
        """The gradient in h."""
        g = gradients[0]
        if g is None or not needed[0]:
            return [None]
        few = repeated(g, len(self.windows.size))
        at = None if few is None else summed_back(self.windows, few.axes, few.values.device)
        if few is None or at is None:
            return [self.backward(spread(g), spread(inputs[0] if h is None else h))]
        return [Repeated(at.sum(few.values), at.axes, few.lead)]
