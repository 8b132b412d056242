"""A comparison as the table of D16: what measures a node, times what the measure is used for.

Each measure R of a node's incoming weights can normalize the node (SGD on w~, w = w~ / gamma~) or
give the metric of steepest descent. For both uses: the test error from the first start and, at a
rate of its own, from the others; whether the training curves from all starts are the same; the time
of a step.

Source: B. Neyshabur, R. Tomioka, R. Salakhutdinov and N. Srebro (2016), Data-Dependent Path
Normalization in Neural Networks, Table 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.monitor import UNHEARD, Monitor
from pathspace.experiments.report.document import NOTHING, Figure, Lines, Section, Table
from pathspace.experiments.report.figures import set_log_axis
from pathspace.experiments.report.table import error_label
from pathspace.experiments.storage import finite
from pathspace.experiments.tables import grouped_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

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
        same_curve: Whether two training curves from different starts at one rate are the same to
            the last bit; None where none were compared.
        difference: The largest difference of two such curves; None if one of them diverged and the
            other did not, or none were compared.
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


def study(
    comparison: Comparison, monitor: Monitor = UNHEARD, *, data_dir: Path | None = None
) -> list[Section]:
    """Arrange a comparison by measure and use.

    Args:
        comparison: With some of the methods in `MEASURES`.
        monitor: Not needed: nothing is computed.
        data_dir: Not needed.
    """
    del monitor, data_dir
    found = entries(comparison)
    heading = "By measure and use"
    if not found:
        known = ", ".join(name for pair in MEASURES.values() for name in pair if name)
        why = f"It arranges the methods {known}, and none of them was compared."
        return [Section(heading, Table("No table by measure and use", (), (), (why,)))]
    starts = comparison.settings.starts
    lines = [
        (e.measure, e.use, e.method, *e.errors.values(), e.difference, e.milliseconds)
        for e in found
    ]
    columns = ("measure", "use", "method", *starts, "difference", "milliseconds")
    numbers = {
        "unification.csv": Lines(columns, lines),
        "unification.json": {"metric": comparison.metric, "cells": [asdict(e) for e in found]},
    }
    figure = Figure("unification.png", partial(_draw, comparison, found))
    return [Section(heading, _table(comparison, found), figure=figure, numbers=numbers)]


def entries(comparison: Comparison) -> list[Entry]:
    """Return the cells that the comparison has methods for."""
    found = []
    for measure, methods in MEASURES.items():
        for use, method in zip(USES, methods, strict=True):
            if method in comparison.settings.methods:
                found.append(_entry(comparison, measure, use, method))
    return found


def _entry(comparison: Comparison, measure: str, use: str, method: str) -> Entry:
    best = {start: comparison.own_row(method, start) for start in comparison.settings.starts}
    largest = comparison.differences.get(method)
    runs = [run for row in comparison.rows if row.method == method for run in row.runs]
    steps = [run.step_seconds for run in runs if run.step_seconds is not None]
    return Entry(
        measure,
        use,
        method,
        errors={start: row.mean_test_error for start, row in best.items()},
        labels={start: error_label(comparison, row) for start, row in best.items()},
        same_curve=None if largest is None else largest == 0.0,
        difference=finite(largest),
        milliseconds=round(1e3 * statistics.median(steps), 3) if steps else 0.0,
    )


def _table(comparison: Comparison, found: Sequence[Entry]) -> Table:
    rows = []
    for entry in sorted(found, key=lambda entry: USES.index(entry.use)):
        same = {None: NOTHING, True: "yes", False: "no"}[entry.same_curve]
        label = METHODS[entry.method].label
        cells = (entry.use, entry.measure, label, *entry.labels.values(), same)
        rows.append((*cells, f"{entry.milliseconds:.2f}"))
    note = (
        "D: paths; M: second moment; C: covariance of what enters a node. Errors: each start at the rate that is best "
        "from it. Same curve: whether the training losses from all starts agree to the last bit at one rate."
    )
    starts = comparison.settings.starts
    columns = ("use", "measure", "method", *starts, "same curve", "ms a step")
    title = f"Test {comparison.metric}, by measure and use"
    return Table(title, columns, grouped_rows(rows), (note,))


def _draw(comparison: Comparison, found: Sequence[Entry]) -> Drawing:
    from matplotlib.figure import Figure

    measures = sorted({entry.measure for entry in found}, key=[*MEASURES].index)
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    axes = figure.subplots(1, len(USES), sharey=True, squeeze=False)[0]
    names = [measure.replace(", ", ",\n").replace(" /", "\n/") for measure in measures]
    for axis, use in zip(axes, USES, strict=True):
        cells = {entry.measure: entry for entry in found if entry.use == use}
        for number, start in enumerate(comparison.settings.starts):
            _draw_errors(axis, [cells.get(m) for m in measures], start, number)
        axis.set_xticks(range(len(measures)), names)
        axis.set(title=use, xlabel="measure", xlim=(-0.6, len(measures) - 0.4))
        axis.grid(alpha=0.25, which="both")
    if any(error for entry in found for error in entry.errors.values()):  # one is above zero
        set_log_axis(axes[0])
    axes[0].set_ylabel(f"test {comparison.metric}")
    axes[-1].legend(title="start")
    return figure


def _draw_errors(axis: Axes, cells: Sequence[Entry | None], start: str, number: int) -> None:
    """Draw the errors from a start, which is the first one or another; none where a cell is missing."""
    errors = [None if cell is None else cell.errors[start] for cell in cells]
    values = [math.nan if error is None else error for error in errors]
    style: dict[str, Any] = {"marker": "o" if number == 0 else "x", "markersize": 11 - 3 * number}
    axis.plot(range(len(cells)), values, linestyle="", color=f"C{number}", label=start, **style)
