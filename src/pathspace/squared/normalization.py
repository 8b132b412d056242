"""A normalization layer in the squared network, and its gradient with the mean held.

y_c = g_c (a_c - mean) / sqrt(var + eps) + b_c, with statistics over a set S of values, forgets the scale of what
enters. So does the squared network: with z the path mass that enters,

    gamma_y^2 = g_c^2 z_c / m + b_c^2,     m = mean of z over S, held constant in derivatives

m = 0: nothing enters, b_c^2 is passed on, and the derivative in z is 0.

Letters: z what enters, m mean of z over S, n = z / m, q = g^2 and c = b^2 squared gain and bias, d gradient of what
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.squares import Square, dense


@dataclass(frozen=True)
class Normalization:
    """One normalization layer.

    Attributes:
        shape: of what enters, with dimensions that S takes only a part of taken apart (channels into groups).
        over: the dimensions of it that make up S.
        place: the shape in which gain and bias stand beside what enters.
        gain: whether there is one.
        bias: likewise.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    place: tuple[int, ...] = ()
    gain: bool = False
    bias: bool = False

    def run(self, z: Tensor, *affine: Tensor) -> Tensor:
        """Gamma_y^2; autograd holds m, too."""
        y = z * self._inverse(z.detach())
        q, c = self._affine(affine)
        y = y if q is None else y * q
        return y if c is None else y + c

    def forward(self, z: Tensor, *affine: Tensor | Square) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gamma_y^2, and n and 1/m for the pullback."""
        inverse = self._inverse(z)
        n = z * inverse
        q, c = self._affine(affine)
        y = n if q is None else n * q
        return (y if c is None else y + c), (n, inverse)

    def pullback(
        self, inputs: Sequence[Any], saved: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients in z, q and c: d q / m, the sums of d n and of d."""
        z, d = inputs[0], gradients[0]
        assert d is not None
        inverse = self._inverse(z) if saved is None else saved[1]
        n = z * inverse if saved is None else saved[0]
        q, _ = self._affine(inputs[1:])
        found: list[Tensor | None] = [None]
        if needed[0]:
            found[0] = d * inverse if q is None else d * (q * inverse)
        for squares, have in ((d * n if self.gain else None, self.gain), (d, self.bias)):
            if have and squares is not None:
                found.append(squares.sum_to_size(self.place).reshape(inputs[len(found)].shape))
        return found

    def _affine(self, affine: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        squares = iter(affine)
        q = dense(next(squares)).reshape(self.place) if self.gain else None
        c = dense(next(squares)).reshape(self.place) if self.bias else None
        return q, c

    def _inverse(self, z: Tensor) -> Tensor:
        """1/m beside every value, 0 where m = 0."""
        parts = z.reshape(self.shape)
        size = 1
        for d in self.over:
            size *= self.shape[d]
        # divided before it is summed: a sum beyond the type's range would make zeros of numbers within it
        m = (parts / size).sum(self.over, keepdim=True)
        inverse = torch.where(m == 0, 0.0, m.reciprocal())
        return inverse.expand(self.shape).reshape(z.shape)
