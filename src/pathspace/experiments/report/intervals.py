"""Means over seeds with the interval that holds the true mean in 95 of 100 such experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and how far from it the interval reaches on either side; infinite for a single value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    r"""Return the mean of n values with Student's interval.

    .. code-block:: text

        mean -+ q s / sqrt(n),  s^2 = sum (x - mean)^2 / (n - 1)
        q the (1 + level) / 2 quantile of Student's t with n - 1 degrees of freedom

    It supposes that the values are independent and about normal; of five seeds no more can be supposed.

    Args:
        values: One per seed, n at least 1.
        level: How often such an interval is to hold the true mean.
    """
    from scipy.special import stdtrit

    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, math.inf)
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(count - 1)
    return Interval(mean, float(stdtrit(count - 1, (1 + level) / 2)) * deviation / math.sqrt(count))
