"""The report of a comparison, and of several that a recipe brings together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS, are_one_function
from pathspace.experiments.recipes import AS_PRINTED, Published
from pathspace.experiments.report import (
    NOTHING,
    Figure,
    Lines,
    Report,
    Section,
    Table,
    claim,
    published_section,
    titled_table,
)
from pathspace.experiments.report.curves import draw_curves
from pathspace.experiments.report.statistics import Interval, Rank, interval_label, rank
from pathspace.experiments.report.table import build_table, digits_of, error_interval, error_label
from pathspace.experiments.run import RunResult
from pathspace.experiments.storage import finite

CLAIM = "claim.png"
RUN = ("method", "start", "learning_rate", "weight_decay", "seed")
CELLS_OF_A_RUN = (
    "purpose", "test_error", "validation_error", "validation_loss", "diverged_at", "steps", "seconds", "step_seconds",
)  # fmt: skip
STANDINGS: dict[Rank, str] = {
    "level": "not told apart from it (the 95 % intervals overlap)",
    "worse": "worse (the intervals lie apart)",
    "diverged": "diverged",
}
Verdict = Literal["confirmed", "refuted", "not decided"]
SHARE = 0.25
"""Of the paper's epochs: shorter runs decide nothing, however large their difference."""


def comparison_report(
    comparison: Comparison,
    *,
    title: str,
    configuration: Mapping[str, Any],
    published: Published | None = None,
    more: Sequence[Section] = (),
) -> Report:
    """Return the report of a comparison, beside a paper's numbers, with the sections of a study as `more`."""
    claims = claims_something(comparison)
    sections = [
        Section(
            "Results",
            build_table(comparison, published),
            "table.csv",
            Figure("curves.png", partial(draw_curves, comparison)),
            numbers=_numbers(comparison),
            printed=not claims,
        )
    ]
    if claims:
        figure = Figure(CLAIM, partial(claim.draw_claim, [comparison]))
        won = Section(
            "Against the best baseline", claim.claim_table(comparison), "claim.csv", figure
        )
        sections.insert(0, won)
    if compared := pairs_of(comparison, published):
        table = pairs_table(comparison, compared)
        sections.append(Section(table.title, table, "pairs.csv"))
    sections += more
    if published is not None:
        sections.append(published_section(published))
    results = as_json(comparison, configuration, published)
    return Report(title, sections, configuration, results, conclusion(comparison))


def parts_report(
    parts: Mapping[str, Comparison], *, title: str, configuration: Mapping[str, Any]
) -> Report:
    """Return the report that brings comparisons with baselines together, with one figure; each has its own report."""
    sections = [Section(name, claim.claim_table(part)) for name, part in parts.items()]
    figure = Figure(CLAIM, partial(claim.draw_claim, list(parts.values())))
    sections[0] = replace(sections[0], figure=figure)
    found = [f"{name}: {sentence}" for name, part in parts.items() for sentence in conclusion(part)]
    return Report(title, sections, configuration, None, found)


def claims_something(comparison: Comparison) -> bool:
    """Say whether methods are to beat baselines."""
    return bool(comparison.settings.baselines and comparison.choices)


def conclusion(comparison: Comparison) -> tuple[str, ...]:
    """Return what was found, in sentences that follow from the table; none for a single run.

    Two questions are kept apart. Same: is the training curve the same from every start, to the last
    bit? Good: which test errors lie apart from the least one?
    """
    sentences = _same_curves(comparison)
    if claims_something(comparison):
        return (*sentences, *claim.claim_sentences(comparison))
    errors = [_errors(comparison, start) for start in comparison.settings.starts]
    return (*sentences, *filter(None, errors))


def _same_curves(comparison: Comparison) -> list[str]:
    """Say which methods have the same training curve from every start, and which have another."""
    same = [name for name, difference in comparison.differences.items() if difference == 0.0]
    other = [name for name, difference in comparison.differences.items() if difference != 0.0]
    sentences = []
    if same:
        sentences.append(
            f"The same training curve from every start, to the last bit: {_names(same)}."
        )
    if same and not other and not all(METHODS[name].invariant for name in same):
        sentences.append(
            "Methods that are not invariant have it, too: nothing in this network is rescaled, so all starts are one "
            "(`pathspace check-scale` says why)."
        )
    if other:
        of = " of the same function" if are_one_function(comparison.settings.starts) else ""
        sentences.append(f"Another curve from another start{of}: {_names(other)}.")
    return sentences


def _errors(comparison: Comparison, start: str) -> str:
    rows = comparison.own_rows(start)
    if len(rows) < 2:
        return ""
    standings = rank([error_interval(row) for row in rows])
    if "best" not in standings:
        return f"From the {start} start every method has a run that diverged."
    best = rows[standings.index("best")]
    error = error_label(comparison, best)
    parts = [
        f"From the {start} start {METHODS[best.method].label} has the least mean test error, {error}"
    ]
    is_single = comparison.settings.seeds == 1
    for standing, words in STANDINGS.items():
        names = [row.method for row, own in zip(rows, standings, strict=True) if own == standing]
        if names and not (is_single and standing == "level"):
            parts.append(f"{words}: {_names(names)}")
    if is_single:
        parts.append("a single seed has no interval, so the others are not told apart from it")
    return "; ".join(parts) + "."


def _names(methods: Sequence[str]) -> str:
    return ", ".join(METHODS[name].label for name in methods)


def _numbers(comparison: Comparison) -> dict[str, Lines]:
    """Return the numbers of single runs: `purpose` tells those that chose a rate from those that are reported."""
    final = comparison.runs
    runs = [(*_key(run), *_run_cells(run, "validation")) for run in comparison.tuning]
    runs += [(*_key(run), *_run_cells(run, "result")) for run in final]
    curves = [(*_key(run), *each) for run in final for each in enumerate(run.losses)]
    validations = [(*_key(run), *astuple(each)) for run in final for each in run.validations]
    epochs = [(*_key(run), *astuple(each)) for run in final for each in run.epochs]
    return {
        "runs.csv": Lines((*RUN, *CELLS_OF_A_RUN), runs),
        "curves.csv": Lines((*RUN, "step", "training_loss"), curves),
        "validation.csv": Lines((*RUN, "step", "validation_loss", "validation_error"), validations),
        "epochs.csv": Lines((*RUN, "step", "training_error", "test_error"), epochs),
    }


def _key(run: RunResult) -> tuple[Any, ...]:
    return tuple(getattr(run.config, name) for name in RUN)


def _run_cells(run: RunResult, purpose: str) -> tuple[Any, ...]:
    last = run.validations[-1]
    step_seconds = "" if run.step_seconds is None else f"{run.step_seconds:.6f}"
    ended = run.diverged_at, len(run.losses), f"{run.seconds:.4f}", step_seconds
    return (purpose, run.test_error, last.error, last.loss, *ended)


def as_json(
    comparison: Comparison, configuration: Mapping[str, Any], published: Published | None = None
) -> dict[str, Any]:
    """Return a comparison as plain values for JSON, with None for what is missing or not finite."""
    rows = [
        {
            "method": row.method,
            "label": METHODS[row.method].label,
            "start": row.start,
            "learning_rate": row.learning_rate,
            "weight_decay": row.weight_decay,
            "rate_chosen_from": row.rate_chosen_from,
            "test_error_mean": row.mean_test_error,
            "test_error_deviation": row.test_error_deviation,
            "test_errors": [run.test_error for run in row.runs],
            "diverged": row.diverged,
            "seconds": row.mean_seconds,
            "devices": sorted({run.device for run in row.runs}),
            "same_curve": None if row.difference is None else row.difference == 0.0,
            "largest_difference": finite(row.difference),
        }
        for row in comparison.rows
    ]
    choices = [
        {
            "method": method,
            "start": start,
            "learning_rate": choice.learning_rate,
            "weight_decay": choice.weight_decay,
            "at_edge": choice.at_edge,
            "all_diverged": choice.all_diverged,
            "validation_errors": [
                {"learning_rate": rate, "error": finite(error)}
                for rate, error in choice.scores.items()
            ],
            "pairs": [
                {"learning_rate": rate, "weight_decay": decay, "error": finite(error)}
                for (rate, decay), error in choice.pairs.items()
            ],
        }
        for (method, start), choice in comparison.choices.items()
    ]
    return {
        "task": comparison.task_description,
        "metric": comparison.metric,
        "conclusion": list(conclusion(comparison)),
        "rows": rows,
        "learning_rates": choices,
        "weights": dict(comparison.weights),
        "claim": claim.as_json(comparison) if claims_something(comparison) else None,
        "pairs": pairs_as_json(pairs_of(comparison, published)),
        "published": None if published is None else _published_as_json(published),
        "configuration": configuration,
    }


def _published_as_json(published: Published) -> dict[str, Any]:
    found = published.results
    results = [{"label": r.label, "value": r.value, "method": r.method} for r in found]
    return {"source": published.source, "setting": published.setting, "results": results}


@dataclass(frozen=True)
class Pair:
    """Our runs of two methods that a paper compares, from the first start.

    Attributes:
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
    settings = comparison.settings
    rows = {row.method: row for row in comparison.own_rows(settings.starts[0])}
    found = []
    epochs = published.protocol(settings).epochs
    long = epochs is not None and settings.epochs >= SHARE * epochs
    for pair in _that_ran(published.pairs, rows.keys()):
        numbers = [published.result(settings, name) for name in pair]
        printed = [Decimal(number.words) for number in numbers if number is not None]
        theirs = printed[0] - printed[1] if len(printed) == 2 else None
        first, second = (rows[name] for name in pair)
        ours = claim.paired_difference(first, second)
        found.append(Pair(first, second, ours, theirs, _pair_verdict(ours, theirs, long=long)))
    return found


def _that_ran(
    pairs: Sequence[tuple[str, str]], methods: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Go through pairs of methods that ran; a rule as printed is the paper's, too."""
    for first, second in pairs:
        for name in (first, f"{first}{AS_PRINTED}"):
            if name in methods and second in methods:
                yield name, second


def _pair_verdict(ours: Interval | None, theirs: Decimal | None, *, long: bool) -> Verdict | None:
    if not theirs:
        return None
    if not long or ours is None or not ours.sign:
        return "not decided"
    return "confirmed" if (ours.sign > 0) == (theirs > 0) else "refuted"


def pairs_table(comparison: Comparison, pairs: list[Pair]) -> Table:
    """Put pairs into words."""
    digits = f"+{digits_of(comparison.metric)}"
    rows = [
        {
            "pair": f"{_names([pair.first.method])} against {_names([pair.second.method])}",
            "difference": interval_label(pair.difference, digits),
            "published": NOTHING if pair.published is None else f"{pair.published:+}",
            "verdict": pair.verdict or NOTHING,
        }
        for pair in pairs
    ]
    note = (
        "Difference: test error of the first minus that of the second, paired by seeds, ± half of Student's 95 % "
        f"interval. Confirmed or refuted: it excludes 0 after at least {100 * SHARE:g} % of the paper's epochs."
    )
    return titled_table("What the paper compares", rows, [note])


def pairs_as_json(pairs: list[Pair]) -> list[dict[str, Any]]:
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
