"""What a paper says of two methods beside what our runs say: differences of test errors, paired by seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.published import AS_PRINTED, Published
from pathspace.experiments.report.claim import paired_difference
from pathspace.experiments.report.document import NOTHING, Table, TableRow
from pathspace.experiments.report.statistics import Interval
from pathspace.experiments.report.table import digits_of
from pathspace.experiments.storage import finite

Verdict = Literal["confirmed", "refuted", "not decided"]
SHARE = 0.25
"""Of the paper's epochs: shorter runs decide nothing, however large their difference."""


@dataclass(frozen=True)
class Pair:
    """Two methods that a paper compares, from the first start.

    Attributes:
        first: Ours of the first method.
        second: Ours of the second.
        difference: Test error of the first minus that of the second, paired by seeds; None where a
            run failed.
        published: The same of the paper's numbers, with its decimals; None where one is not given.
        verdict: On what the sign of `published` says; None without it.
    """

    first: Row
    second: Row
    difference: Interval | None
    published: Decimal | None
    verdict: Verdict | None


def pairs_of(comparison: Comparison, published: Published | None) -> list[Pair]:
    """Return those of the paper's pairs of which both methods ran, each as ours and as printed."""
    if published is None:
        return []
    settings, start = comparison.settings, comparison.settings.starts[0]
    methods = {row.method for row in comparison.rows if row.start == start}
    rows = {method: comparison.own_row(method, start) for method in methods}
    found = []
    epochs = published.protocol(settings).epochs
    long = epochs is not None and settings.epochs >= SHARE * epochs
    for first, second in _that_ran(published.pairs, methods):
        numbers = [published.result(settings, name) for name in (first, second)]
        printed = [Decimal(number.words) for number in numbers if number is not None]
        theirs = printed[0] - printed[1] if len(printed) == 2 else None
        ours = paired_difference(rows[first], rows[second])
        found.append(
            Pair(rows[first], rows[second], ours, theirs, _verdict(ours, theirs, long=long))
        )
    return found


def _that_ran(pairs: Sequence[tuple[str, str]], methods: set[str]) -> list[tuple[str, str]]:
    """Return pairs of methods that ran; a rule as printed is the paper's, too."""
    return [
        (one, second)
        for first, second in pairs
        for one in (first, f"{first}{AS_PRINTED}")
        if {one, second} <= methods
    ]


def _verdict(ours: Interval | None, theirs: Decimal | None, *, long: bool) -> Verdict | None:
    if not theirs:
        return None
    if not long or ours is None or not ours.sign:
        return "not decided"
    return "confirmed" if (ours.sign > 0) == (theirs > 0) else "refuted"


def pairs_table(comparison: Comparison, pairs: list[Pair]) -> Table:
    """Put pairs into words."""
    rows = tuple(
        TableRow(
            (
                f"{METHODS[pair.first.method].label} against {METHODS[pair.second.method].label}",
                NOTHING
                if pair.difference is None
                else pair.difference.words(digits_of(comparison.metric), sign="+"),
                NOTHING if pair.published is None else f"{pair.published:+}",
                pair.verdict or NOTHING,
            ),
        )
        for pair in pairs
    )
    note = (
        "Difference: test error of the first minus that of the second, paired by seeds, ± half of Student's 95 % "
        f"interval. Confirmed or refuted: it excludes 0 after at least {100 * SHARE:g} % of the paper's epochs."
    )
    return Table(
        "What the paper compares", ("pair", "difference", "published", "verdict"), rows, (note,)
    )


def as_json(pairs: list[Pair]) -> list[dict[str, Any]]:
    """Return pairs as plain values for JSON, with None for what is missing or not finite."""
    return [
        {
            "first": pair.first.method,
            "second": pair.second.method,
            "difference": None if pair.difference is None else pair.difference.mean,
            "half_interval": None if pair.difference is None else finite(pair.difference.half),
            "seeds": len(pair.first.runs),
            "published": None if pair.published is None else float(pair.published),
            "verdict": pair.verdict,
        }
        for pair in pairs
    ]
