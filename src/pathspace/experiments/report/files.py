"""The files of a report, each of them complete or absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.published import Published
from pathspace.experiments.report import claim, pairs
from pathspace.experiments.report.claim_figure import draw_claim
from pathspace.experiments.report.conclusion import conclusion
from pathspace.experiments.report.figure import draw
from pathspace.experiments.report.page import Section, write_page
from pathspace.experiments.report.switchable import switchable_curves
from pathspace.experiments.report.table import build_table, write_table
from pathspace.experiments.run import RunResult
from pathspace.experiments.storage import finite, write_bytes, write_csv, write_json

FIGURE, CLAIM = "curves.png", "claim.png"
_RUN = ("method", "start", "learning_rate", "weight_decay", "seed")
RUN_COLUMNS = (
    *_RUN, "purpose", "test_error", "validation_error", "validation_loss", "diverged_at", "steps", "seconds",
    "step_seconds",
)  # fmt: skip


def write_report(
    comparison: Comparison,
    output: Path,
    *,
    title: str,
    configuration: dict[str, Any],
    published: Published | None = None,
) -> Path:
    """Write the page, the figure, the tables and all numbers of a comparison.

    Args:
        comparison: The results.
        output: An existing folder: gets `report.html`, `curves.png`, `table.csv`, `runs.csv`, `curves.csv`,
            `validation.csv`, `epochs.csv` and `results.json`; where there are baselines, `claim.csv` and `claim.png`
            too; where a paper compares two of the methods, `pairs.csv`.
        title: The headline of the page.
        configuration: What `config.json` holds.
        published: The numbers of a paper, if there are any.

    Returns:
        The page.
    """
    table = build_table(comparison, published)
    png, svg = draw(comparison)
    final = _final_runs(comparison)
    write_bytes(output / FIGURE, png)
    write_table(output / "table.csv", table)
    write_csv(output / "runs.csv", RUN_COLUMNS, _run_lines(comparison, final))
    write_csv(
        output / "curves.csv",
        (*_RUN, "step", "training_loss"),
        ((*_names(run), step, loss) for run in final for step, loss in enumerate(run.losses)),
    )
    write_csv(
        output / "validation.csv",
        (*_RUN, "step", "validation_loss", "validation_error"),
        ((*_names(run), v.step, v.loss, v.error) for run in final for v in run.validations),
    )
    write_csv(
        output / "epochs.csv",
        (*_RUN, "step", "training_error", "test_error"),
        ((*_names(run), e.step, e.training, e.test) for run in final for e in run.epochs),
    )
    write_json(output / "results.json", as_json(comparison, configuration, published))
    sections = [Section("Results", table, svg, switchable_curves(comparison))]
    if comparison.settings.baselines and comparison.choices:
        won = claim.claim_table(comparison)
        png, svg = draw_claim([comparison])
        write_bytes(output / CLAIM, png)
        write_table(output / "claim.csv", won)
        sections.insert(0, Section("Against the best baseline", won, svg))
    if compared := pairs.pairs_of(comparison, published):
        beside = pairs.pairs_table(comparison, compared)
        write_table(output / "pairs.csv", beside)
        sections.append(Section(beside.title, beside))
    return write_page(output, title, sections, configuration, published, conclusion(comparison))


def write_parts(
    parts: Mapping[str, Comparison], output: Path, *, title: str, configuration: dict[str, Any]
) -> Path:
    """Write the page and the picture that bring several comparisons together.

    Args:
        parts: The comparisons by name, all with baselines; their own reports are written already.
        output: An existing folder: gets `report.html` and `claim.png`.
        title: The headline of the page.
        configuration: What the page prints at its end.

    Returns:
        The page.
    """
    png, svg = draw_claim(list(parts.values()))
    write_bytes(output / CLAIM, png)
    sections = [
        Section(name, claim.claim_table(part), svg if number == 0 else "", switchable_curves(part))
        for number, (name, part) in enumerate(parts.items())
    ]
    found = [f"{name}: {sentence}" for name, part in parts.items() for sentence in conclusion(part)]
    return write_page(output, title, sections, configuration, conclusions=found)


def as_json(
    comparison: Comparison, configuration: dict[str, Any], published: Published | None = None
) -> dict[str, Any]:
    """Return a comparison as plain values for JSON, with None for what is missing or not finite."""
    rows = []
    for row in comparison.rows:
        rows.append(
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
        )
    choices = [
        {
            "method": method,
            "start": start,
            "learning_rate": choice.learning_rate,
            "weight_decay": choice.weight_decay,
            "at_edge": choice.at_edge,
            "all_diverged": choice.all_diverged,
            "validation_errors": [
                {"learning_rate": rate, "error": finite(error)} for rate, error in choice.scores.items()
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
        "claim": claim.as_json(comparison) if comparison.settings.baselines and comparison.choices else None,
        "pairs": pairs.as_json(pairs.pairs_of(comparison, published)),
        "published": None
        if published is None
        else {
            "source": published.source,
            "setting": published.setting,
            "results": [{"label": r.label, "value": r.value, "method": r.method} for r in published.results],
        },
        "configuration": configuration,
    }


def _final_runs(comparison: Comparison) -> list[RunResult]:
    return [run for row in comparison.rows for run in row.runs]


def _names(run: RunResult) -> tuple[Any, ...]:
    c = run.config
    return (c.method, c.start, c.learning_rate, c.weight_decay, c.seed)


def _run_lines(comparison: Comparison, final: Sequence[RunResult]) -> Iterable[tuple[Any, ...]]:
    for purpose, runs in (("validation", comparison.tuning), ("result", final)):
        for run in runs:
            last = run.validations[-1]
            yield (
                *_names(run),
                purpose,
                run.test_error,
                last.error,
                last.loss,
                run.diverged_at,
                len(run.losses),
                f"{run.seconds:.4f}",
                "" if run.step_seconds is None else f"{run.step_seconds:.6f}",
            )
