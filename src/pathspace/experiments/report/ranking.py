"""Which test errors lie apart from the least one; where 95 % intervals overlap, nothing is better or worse."""

from __future__ import annotations

from collections.abc import Sequence

from pathspace.experiments.compare import Row
from pathspace.experiments.report.intervals import Interval, t_interval

BEST, LEVEL, WORSE, DIVERGED = "best", "level", "worse", "diverged"


def rank(rows: Sequence[Row]) -> list[str]:
    """Rank rows of one start by their mean test errors.

    Args:
        rows: From one start.

    Returns:
        For each row `BEST` (the least mean), `LEVEL` (its interval overlaps with that of the best), `WORSE` (its
        interval lies wholly above it), or `DIVERGED` (a run has no test error).
    """
    intervals = [error_interval(row) for row in rows]
    there = [interval for interval in intervals if interval is not None]
    least = min(there, key=lambda interval: interval.mean, default=None)
    return [_standing(interval, least) for interval in intervals]


def error_interval(row: Row) -> Interval | None:
    """Return the interval of the mean test error, infinite for one seed; None where a run has no test error."""
    errors = [run.test_error for run in row.runs if run.test_error is not None]
    return t_interval(errors) if errors and len(errors) == len(row.runs) else None


def _standing(interval: Interval | None, least: Interval | None) -> str:
    if interval is None or least is None:
        return DIVERGED
    if interval is least:
        return BEST
    return WORSE if interval.low > least.high else LEVEL
