"""Gradients that are too long are scaled down."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_factor(square: Tensor, largest: float) -> float | Tensor:
    """Return what scales a gradient of squared norm ``square`` down to norm ``largest``; 1 if it is not longer.

    Args:
        square: shape ``[]``.
        largest: positive.

    Returns:
        A tensor where the squared norm is on a GPU, which need not be waited for, else a number.
    """
    # a norm that is not a number must show in the parameters, not vanish in a comparison
    if square.is_cuda:
        return torch.where(square <= largest**2, 1.0, largest / square.sqrt())
    number = square.item()
    if number <= largest**2:
        return 1.0
    return largest / math.sqrt(number) if number == number else number


def changes(factor: float | Tensor) -> bool:
    """Return whether to multiply with a factor: a tensor is not looked at, as a GPU would have to be waited for."""
    return isinstance(factor, Tensor) or factor != 1
