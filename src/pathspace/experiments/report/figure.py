"""The figure of a comparison: per method its loss curves, its errors over epochs, and its choice of learning rate.

Where there is but one start, `methods_figure` shows the methods in one panel instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.curves import (
    draw_errors,
    draw_losses,
    kinds_of_error,
    limit_losses,
    name_errors,
)
from pathspace.experiments.report.log_axis import set_rate_axis
from pathspace.experiments.report.methods_figure import draw_methods
from pathspace.experiments.report.saved_figure import own_style, saved
from pathspace.experiments.report.table import start_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first start is drawn wide and pale, the others thin and dark on top of it: where two curves are one,
# both show.
FIRST = {"color": "#8ab6e6", "linewidth": 5.0}
OTHERS = (
    {"color": "#b3400e", "linewidth": 1.6, "linestyle": (0, (3, 1.5))},
    {"color": "#55752f", "linewidth": 1.4, "linestyle": (0, (1, 1))},
    {"color": "#6a4c93", "linewidth": 1.4, "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#8c6d31", "linewidth": 1.4, "linestyle": (0, (7, 2))},
)


def draw(comparison: Comparison) -> tuple[bytes, str]:
    """Draw the figure.

    Returns:
        The figure as PNG, and as an SVG element to stand in a page.
    """
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window, and no state that outlives the call.
    with own_style():
        figure = Figure(layout="constrained")
        if len(comparison.settings.starts) == 1 and len(comparison.settings.methods) > 1:
            draw_methods(figure, comparison)
        else:
            _draw_starts(figure, comparison)
        return saved(figure)


def _draw_starts(figure: Figure, comparison: Comparison) -> None:
    methods, kinds = comparison.settings.methods, kinds_of_error(comparison)
    rows = 1 + len(kinds) + bool(comparison.tuning)
    figure.set_size_inches(1.2 + 2.9 * len(methods), 0.9 + 2.6 * rows)
    axes = figure.subplots(rows, len(methods), sharey="row", squeeze=False)
    for column, name in enumerate(methods):
        _losses(axes[0, column], comparison, name)
        for place, kind in enumerate(kinds, 1):
            _errors(axes[place, column], comparison, name, kind)
        if comparison.tuning:
            _rates(axes[-1, column], comparison, name)
    axes[0, 0].set_ylabel("training loss")
    for below, kind in zip(axes[1:, 0], [*kinds, "validation"], strict=False):
        below.set_ylabel(f"{kind} {comparison.metric}")
    limit_losses(axes[0, 0], comparison)
    _legend(figure, axes)


def _style(comparison: Comparison, label: str) -> dict[str, Any]:
    """Return how a start is drawn, the same in every panel: of some methods only it has a rate of its own."""
    labels = [*comparison.settings.starts, *(start_label(comparison, row) for row in comparison.rows)]
    number = list(dict.fromkeys(labels)).index(label)
    return FIRST if number == 0 else OTHERS[(number - 1) % len(OTHERS)]


def _errors(axis: Axes, comparison: Comparison, method: str, kind: str) -> None:
    rows = [row for row in comparison.rows if row.method == method]
    for number, row in enumerate(rows):
        style = _style(comparison, start_label(comparison, row))
        draw_errors(axis, row, comparison.settings.epochs, kind, zorder=2 + number, **style)
    name_errors(axis, comparison, kind)
    axis.grid(alpha=0.25)


def _losses(axis: Axes, comparison: Comparison, method: str) -> None:
    rows = [row for row in comparison.rows if row.method == method]
    for number, row in enumerate(rows):
        label = start_label(comparison, row)
        draw_losses(axis, row.runs, label=label, zorder=2 + number, **_style(comparison, label))
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.set_title(METHODS[method].label, fontweight="bold", fontsize=10, pad=18)
    axis.text(
        0.5,
        1.02,
        _verdict(rows, comparison.differences.get(method)),
        transform=axis.transAxes,
        ha="center",
        va="bottom",
    )


def _verdict(rows: Sequence[Row], largest: float | None) -> str:
    if largest is None:
        return ""
    if largest == 0.0:
        return "every start: one curve, difference 0.0"
    if math.isinf(largest):
        names = dict.fromkeys(row.start for row in rows if row.diverged)
        return f"diverged from the {' and the '.join(names)} start"
    return f"the curves differ by up to {largest:.2g}"


def _rates(axis: Axes, comparison: Comparison, method: str) -> None:
    for number, start in enumerate(comparison.settings.starts):
        choice, style = comparison.choices[method, start], _style(comparison, start)
        rates, errors = zip(*sorted(choice.scores.items()), strict=True)
        shown = [error if math.isfinite(error) else math.nan for error in errors]
        axis.plot(rates, shown, marker="o", markersize=7 if number == 0 else 3.5, zorder=2 + number, **style)
        lost = [rate for rate, error in zip(rates, errors, strict=True) if not math.isfinite(error)]
        # At the upper edge, first start above: a rate that diverged has no error to be drawn at.
        height = [0.97 - 0.05 * number] * len(lost)
        axis.plot(lost, height, "x", color=style["color"], transform=axis.get_xaxis_transform())
        if not choice.all_diverged:
            axis.axvline(choice.learning_rate, color=style["color"], linewidth=1, alpha=0.6, zorder=1)
    set_rate_axis(axis, comparison.settings.rates_of(method), most=4)
    axis.set_xlabel("learning rate (cross: diverged)")
    axis.grid(alpha=0.25)


def _legend(figure: Figure, axes: np.ndarray) -> None:
    entries = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        entries |= {
            label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries
        }
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, frameon=False)
