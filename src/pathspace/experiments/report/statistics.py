"""Means over seeds with their intervals, and exact tests for few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pathspace.experiments.report import NOTHING, number_label
from pathspace.experiments.storage import finite

LEVEL = 0.05
"""How often an interval misses the true mean, and a table of tests errs, where nothing differs."""
Rank = Literal["best", "level", "worse", "diverged"]


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

    @property
    def sign(self) -> int:
        """1 or -1 for an interval above or below 0; 0 for one that holds it."""
        return (self.low > 0) - (self.high < 0)

    def as_list(self) -> list[float | None]:
        """Return mean, low and high for JSON."""
        return [finite(value) for value in (self.mean, self.low, self.high)]


def interval_label(interval: Interval | None, digits: str) -> str:
    """Print the mean, and half of the interval where it is finite; None as an empty cell."""
    if interval is None:
        return NOTHING
    return number_label(interval.mean, digits, None if math.isinf(interval.half) else interval.half)


def t_interval(values: Sequence[float], level: float = 1 - LEVEL) -> Interval:
    r"""Return the mean of n values with Student's interval.

    .. code-block:: text

        mean -+ q s / sqrt(n),  s^2 = sum (x - mean)^2 / (n - 1)
        q the (1 + level) / 2 quantile of Student's t with n - 1 degrees of freedom

    It supposes that the values are independent and about normal; of five seeds no more can be
    supposed.

    Args:
        values: One per seed, n at least 1.
        level: How often such an interval is to hold the true mean.
    """
    from scipy.special import stdtrit

    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, math.inf)
    # errors of 1e200 occur, whose squares are not finite
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(count - 1)
    return Interval(mean, float(stdtrit(count - 1, (1 + level) / 2)) * deviation / math.sqrt(count))


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p of so many wins and losses where either is as likely; ties count for nothing.

    .. code-block:: text

        p = min(1, 2 sum over k <= min(wins, losses) of C(n, k) / 2^n),    n = wins + losses

    On pairs of successes and failures it is McNemar's test in its exact form: a win is a pair in
    which only the first succeeded. `scipy.stats.binomtest` rounds the same number differently.
    """
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method for as many comparisons: all together err once in 20 such tables.

    The k-th smallest of n is multiplied by n - k + 1, and is no smaller than the one before.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, least = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted


def rank(intervals: Sequence[Interval | None]) -> list[Rank]:
    """Say how means of errors stand: where intervals overlap, nothing is better or worse.

    Args:
        intervals: Of methods from one start; None where a run diverged.

    Returns:
        For each `"best"` (the least mean), `"level"` with it (the intervals overlap), `"worse"` (its
        interval lies wholly above that of the best), or `"diverged"`.
    """
    there = [interval for interval in intervals if interval is not None]
    least = min(there, key=lambda interval: interval.mean, default=None)
    found: list[Rank] = []
    for interval in intervals:
        if interval is None or least is None:
            found.append("diverged")
        elif interval is least:
            found.append("best")
        else:
            found.append("worse" if interval.low > least.high else "level")
    return found
