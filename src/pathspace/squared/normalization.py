"""A normalization layer in the squared network, with its mean held in derivatives.

y_c = g_c (a_c - mean) / sqrt(var + eps) + b_c, with statistics over a set S of values, forgets the
scale of what enters. So does the squared network: with z the path mass that enters,

    gamma_y^2 = g_c^2 z_c / m + b_c^2,     m = mean of z over S, held constant in derivatives

m = 0: nothing enters, b_c^2 is passed on, and the derivative in z is 0.

Letters: z what enters, m mean of z over S, q = g^2 and c = b^2 squared gain and bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """One normalization layer.

    Attributes:
        shape: of what enters, with dimensions that S takes only a part of taken apart (channels
            into groups).
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

    def run(self, z: Tensor, *affine: Tensor, held: Tensor | None = None) -> Tensor:
        """Gamma_y^2; ``affine`` are q and c, as far as there are any, and ``held`` is what to take for 1/m."""
        y = z * (self.inverse(z) if held is None else held)
        squares = iter(affine)
        if self.gain:
            y = y * next(squares).reshape(self.place)
        return y + next(squares).reshape(self.place) if self.bias else y

    def inverse(self, z: Tensor, *_: Tensor) -> Tensor:
        """1/m beside every value, 0 where m = 0; held constant in derivatives."""
        parts = z.detach().reshape(self.shape)
        size = math.prod(self.shape[d] for d in self.over)
        # divided before it is summed: a sum beyond the type's range would make zeros of numbers
        # within it
        m = (parts / size).sum(self.over, keepdim=True)
        inverse = torch.where(m == 0, 0.0, m.reciprocal())
        return inverse.expand(self.shape).reshape(z.shape)
