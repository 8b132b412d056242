"""What a comparison found, in sentences that follow from its table: the top of the page, the end of the command.

Two questions are kept apart. Same: is the training curve the same from every start, to the last bit? Good: which test
errors lie apart from the least one?
"""

from __future__ import annotations

from collections.abc import Sequence

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.claim import claim_sentences
from pathspace.experiments.report.ranking import BEST, DIVERGED, LEVEL, WORSE, rank
from pathspace.experiments.report.table import error_label
from pathspace.experiments.starts import are_one_function

WORDS = {
    LEVEL: "not told apart from it (the 95 % intervals overlap)",
    WORSE: "worse (the intervals lie apart)",
    DIVERGED: "diverged",
}


def conclusion(comparison: Comparison) -> tuple[str, ...]:
    """Return the sentences; none for a single run, which there is nothing to compare with."""
    if comparison.settings.baselines and comparison.choices:
        return (*_sameness(comparison), *claim_sentences(comparison))
    errors = [_errors(comparison, start) for start in comparison.settings.starts]
    return (*_sameness(comparison), *(sentence for sentence in errors if sentence))


def _sameness(comparison: Comparison) -> list[str]:
    same = [name for name, difference in comparison.differences.items() if difference == 0.0]
    other = [name for name, difference in comparison.differences.items() if difference != 0.0]
    told = []
    if same:
        told.append(f"The same training curve from every start, to the last bit: {_names(same)}.")
    if other:
        of = " of the same function" if are_one_function(comparison.settings.starts) else ""
        told.append(f"Another curve from another start{of}: {_names(other)}.")
    return told


def _errors(comparison: Comparison, start: str) -> str:
    methods = dict.fromkeys(row.method for row in comparison.rows if row.start == start)
    rows = [comparison.own_row(method, start) for method in methods]
    if len(rows) < 2:
        return ""
    standings = rank(rows)
    if BEST not in standings:
        return f"From the {start} start every method has a run that diverged."
    best = rows[standings.index(BEST)]
    error = error_label(comparison, best)
    told = [f"From the {start} start {METHODS[best.method].label} has the least mean test error, {error}"]
    for standing, words in WORDS.items():
        names = [row.method for row, one in zip(rows, standings, strict=True) if one == standing]
        if names:
            told.append(f"{words}: {_names(names)}")
    if comparison.settings.seeds == 1:
        told.append("a single seed has no interval and shows no difference")
    return "; ".join(told) + "."


def _names(methods: Sequence[str]) -> str:
    return ", ".join(METHODS[name].label for name in methods)
