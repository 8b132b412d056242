"""What the paper says has fewer bits than what, over draws of texts and networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pathspace.experiments.report.document import Table, TableRow
from pathspace.experiments.report.statistics import Interval, t_interval
from pathspace.experiments.storage import finite
from pathspace.experiments.symbols.cells import Score, best
from pathspace.experiments.symbols.protocol import COMPARED, Protocol


@dataclass(frozen=True)
class Pair:
    """Two rows of the table on one text.

    Attributes:
        first: The row that has fewer bits, the paper says.
        second: The other one.
        text: On what.
        difference: Bits of the first minus bits of the second on the test text, paired by draws.
        fewer: Draws in which the first has fewer.
    """

    first: str
    second: str
    text: str
    difference: Interval
    fewer: int

    @property
    def verdict(self) -> Literal["fewer", "more", "not decided"]:
        """What the interval says of the first row's bits."""
        verdicts: dict[int, Literal["fewer", "more", "not decided"]] = {
            -1: "fewer",
            0: "not decided",
            1: "more",
        }
        return verdicts[self.difference.sign]


def pairs_of(protocol: Protocol, scores: Sequence[Score]) -> list[Pair]:
    """Return what can be said of the rows that ran; nothing of a single draw."""
    if protocol.seeds == 1:
        return []
    chosen = best(scores)
    found = []
    for first, second in COMPARED:
        if {first, second} <= set(protocol.rows):
            for text in protocol.texts:
                differences = [
                    chosen[first, text, draw].test - chosen[second, text, draw].test
                    for draw in range(protocol.seeds)
                ]
                fewer = sum(difference < 0 for difference in differences)
                found.append(Pair(first, second, text, t_interval(differences), fewer))
    return found


def pairs_table(protocol: Protocol, pairs: Sequence[Pair]) -> Table:
    """Put pairs into words."""
    rows = []
    for before, pair in zip([None, *pairs], pairs, strict=False):
        begins = before is None or (before.first, before.second) != (pair.first, pair.second)
        rows.append(
            TableRow(
                (
                    f"{pair.first} against {pair.second}" if begins else "",
                    pair.text,
                    pair.difference.words(",.1f", sign="+"),
                    f"{pair.fewer} of {protocol.seeds}",
                    pair.verdict,
                ),
                begins_method=begins,
            )
        )
    note = (
        "Difference: bits of the first minus bits of the second, paired by draws, ± half of Student's 95 % interval. "
        "Fewer or more: it excludes 0. The paper has fewer throughout."
    )
    columns = ("pair", "text", "difference", "fewer in", "verdict")
    return Table("What the paper compares", columns, tuple(rows), (note,))


def as_json(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return pairs as plain values for JSON, with None for what is not finite."""
    return [
        {
            "first": pair.first,
            "second": pair.second,
            "text": pair.text,
            "difference": finite(pair.difference.mean),
            "half_interval": finite(pair.difference.half),
            "fewer": pair.fewer,
            "verdict": pair.verdict,
        }
        for pair in pairs
    ]
