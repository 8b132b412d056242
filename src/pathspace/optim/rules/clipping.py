"""Gradients that are too long are scaled down."""

from __future__ import annotations

import math


def clip_factor(square: float, largest: float) -> float:
    """What scales a gradient of squared norm ``square`` down to norm ``largest``; 1 if it is not longer."""
    # a norm that is not a number must show in the parameters, not vanish in a comparison
    return 1.0 if square <= largest**2 else largest / math.sqrt(square) if square == square else square
