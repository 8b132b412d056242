"""Exact tests for few runs: no normal distribution, no large numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

LEVEL = 0.05


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p of so many wins and losses where either is as likely; ties count for nothing.

    .. code-block:: text

        p = min(1, 2 sum over k <= min(wins, losses) of C(n, k) / 2^n),    n = wins + losses

    On pairs of successes and failures it is McNemar's test in its exact form: a win is a pair in which only the first
    succeeded.
    """
    n = wins + losses
    tail = sum(comb(n, k) for k in range(min(wins, losses) + 1))
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
