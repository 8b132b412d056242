"""A comparison as the table of D16: what measures a node, times what the measure is used for.

Each measure R of a node's incoming weights can normalize the node (SGD on w~, w = w~ / gamma~) or give the metric of
steepest descent. For both uses: the test error from the first start and, at a rate of its own, from the others;
whether the training curves from all starts are the same; the time of a step.

Source: B. Neyshabur, R. Tomioka, R. Salakhutdinov and N. Srebro (2016), Data-Dependent Path Normalization in Neural
Networks, Table 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as RichTable

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.saved_figure import as_png, own_style
from pathspace.experiments.report.table import NOTHING, error_label
from pathspace.experiments.storage import finite, write_bytes, write_csv, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

USES = ("normalization", "steepest descent")
# measure -> the method that normalizes by it, the method that descends along it
MEASURES: dict[str, tuple[str, str]] = {
    "none": ("", "sgd"),
    "D": ("path-norm", "path-sgd"),
    "(D + M) / 2": ("ddp-norm", "ddp-sgd"),
    "(D + C) / 2": ("ddp-norm-centred", "ddp-sgd-centred"),
    "M": ("moment-norm", "diagonal-natural"),
    "M, quasi-diagonal": ("", "quasi-diagonal"),
    "M, whole": ("", "natural"),
    "C": ("batch-norm", "covariance-sgd"),
}


@dataclass(frozen=True)
class Entry:
    """One cell of the table.

    Attributes:
        measure: A name in `MEASURES`.
        use: A name in `USES`.
        method: A name in `methods.METHODS`.
        errors: By start, the mean test error at the rate chosen from it; None where a run diverged.
        labels: The same in words, with the deviation.
        same_curve: Whether two training curves from different starts at one rate are the same to the last bit; None
            where none were compared.
        difference: The largest difference of two such curves; None if one of them diverged and the other did not, or
            none were compared.
        milliseconds: The median time of a step.
    """

    measure: str
    use: str
    method: str
    errors: dict[str, float | None]
    labels: dict[str, str]
    same_curve: bool | None
    difference: float | None
    milliseconds: float


def study(comparison: Comparison, output: Path, *, data_dir: Path | None = None) -> list[RenderableType]:
    """Arrange a comparison by measure and use.

    Args:
        comparison: With some of the methods in `MEASURES`.
        output: Gets `unification.json`, `unification.csv` and `unification.png`.
        data_dir: Not needed.

    Returns:
        The table and a note; a note alone if the comparison has none of the methods.
    """
    del data_dir
    found = entries(comparison)
    if not found:
        known = ", ".join(name for pair in MEASURES.values() for name in pair if name)
        return [
            f"No table by measure and use: it arranges the methods {known}, and none of them was compared."
        ]
    starts = comparison.settings.starts
    write_csv(
        output / "unification.csv",
        ("measure", "use", "method", *starts, "difference", "milliseconds"),
        (
            (e.measure, e.use, e.method, *(e.errors[start] for start in starts), e.difference, e.milliseconds)
            for e in found
        ),
    )
    write_json(
        output / "unification.json", {"metric": comparison.metric, "cells": [asdict(e) for e in found]}
    )
    write_bytes(output / "unification.png", _draw(comparison, found))
    return [
        _table(comparison, found),
        "D: paths; M: second moment; C: covariance of what enters a node. Errors: each start at the rate that is best "
        "from it. Same curve: whether the training losses from all starts agree to the last bit at one rate.",
    ]


def entries(comparison: Comparison) -> list[Entry]:
    """Return the cells that the comparison has methods for."""
    found = []
    for measure, methods in MEASURES.items():
        for use, method in zip(USES, methods, strict=True):
            if method not in comparison.settings.methods:
                continue
            rows = [row for row in comparison.rows if row.method == method]
            best = {start: comparison.own_row(method, start) for start in comparison.settings.starts}
            largest = comparison.differences.get(method)
            steps = [run.step_seconds for row in rows for run in row.runs if run.step_seconds is not None]
            found.append(
                Entry(
                    measure,
                    use,
                    method,
                    {start: row.mean_test_error for start, row in best.items()},
                    {start: error_label(comparison, row) for start, row in best.items()},
                    None if largest is None else largest == 0.0,
                    finite(largest),
                    round(1e3 * statistics.median(steps), 3) if steps else 0.0,
                )
            )
    return found


def _table(comparison: Comparison, found: Sequence[Entry]) -> RichTable:
    starts = comparison.settings.starts
    text = RichTable(
        title=f"Test {comparison.metric}, by measure and use", title_justify="left", box=box.SIMPLE_HEAD
    )
    text.add_column("measure")
    text.add_column("method")
    for title in (*starts, "same curve", "ms a step"):
        text.add_column(title, justify="right", no_wrap=True)
    for use in USES:
        of_use = [entry for entry in found if entry.use == use]
        if not of_use:
            continue
        text.add_section()
        text.add_row(f"[bold]{use}[/]")
        for entry in of_use:
            same = NOTHING if entry.same_curve is None else ("yes" if entry.same_curve else "no")
            text.add_row(
                entry.measure,
                METHODS[entry.method].label,
                *(entry.labels[start] for start in starts),
                same,
                f"{entry.milliseconds:.2f}",
            )
    return text


def _draw(comparison: Comparison, found: Sequence[Entry]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    measures = [measure for measure in MEASURES if any(entry.measure == measure for entry in found)]
    with own_style():
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        axes = figure.subplots(1, len(USES), sharey=True, squeeze=False)[0]
        for axis, use in zip(axes, USES, strict=True):
            cells = {entry.measure: entry for entry in found if entry.use == use}
            for number, start in enumerate(comparison.settings.starts):
                errors = [cells[m].errors[start] if m in cells else None for m in measures]
                values = [math.nan if error is None else error for error in errors]
                style = {
                    "marker": "o" if number == 0 else "x",
                    "markersize": 11 - 3 * number,
                    "linestyle": "",
                }
                axis.plot(range(len(measures)), values, color=f"C{number}", label=start, **style)
            axis.set_xticks(
                range(len(measures)), [m.replace(", ", ",\n").replace(" /", "\n/") for m in measures]
            )
            axis.set(title=use, xlabel="measure", xlim=(-0.6, len(measures) - 0.4))
            if any(error for entry in found for error in entry.errors.values()):  # one is above zero
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.25, which="both")
        axes[0].set_ylabel(f"test {comparison.metric}")
        axes[-1].legend(frameon=False, title="start")
        return as_png(figure)
