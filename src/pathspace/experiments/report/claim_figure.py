"""The picture of who wins: test errors with their intervals, one panel per task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.claim import standings
from pathspace.experiments.report.saved_figure import own_style, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = (
    {"color": "#1f5fa8", "marker": "o"},
    {"color": "#b3400e", "marker": "D", "markerfacecolor": "white"},
    {"color": "#55752f", "marker": "s", "markerfacecolor": "white"},
)
WIDE = 20  # errors further apart than this factor are drawn on a logarithmic axis


def draw_claim(parts: Sequence[Comparison]) -> tuple[bytes, str]:
    """Draw the figure.

    Args:
        parts: One comparison per panel.

    Returns:
        The figure as PNG, and as an SVG element to stand in a page.
    """
    from matplotlib.figure import Figure

    with own_style():
        most = max(len(part.settings.methods) for part in parts)
        figure = Figure(figsize=(2.2 + 4.2 * len(parts), 1.3 + 0.33 * most), layout="constrained")
        axes = figure.subplots(1, len(parts), squeeze=False)[0]
        for axis, part in zip(axes, parts, strict=True):
            _panel(axis, part)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return saved(figure)


def _panel(axis: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    methods, starts = comparison.settings.methods, comparison.settings.starts
    found = standings(comparison)
    values = []
    for number, start in enumerate(starts):
        style: dict[str, Any] = STYLES[number % len(STYLES)]
        here = [s for s in found if s.row.start == start and s.error is not None]
        heights = [methods.index(s.row.method) + 0.28 * (number - (len(starts) - 1) / 2) for s in here]
        means = [s.error.mean for s in here if s.error]
        halves = [s.error.half if s.error and math.isfinite(s.error.half) else 0.0 for s in here]
        values += means
        axis.errorbar(
            means, heights, xerr=halves, linestyle="", markersize=5, label=f"{start} start", **style
        )
        for s in found:
            if s.row.start == start and s.error is None:
                place = methods.index(s.row.method) + 0.28 * (number - (len(starts) - 1) / 2)
                axis.text(0.99, place, s.failure, transform=axis.get_yaxis_transform(), ha="right", va="center",
                          color=style["color"], fontsize=7)  # fmt: skip
    if values and min(values) > 0 and max(values) > WIDE * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(methods)), [METHODS[name].label for name in methods])
    axis.set_ylim(len(methods) - 0.5, -0.5)
    axis.set_xlabel(f"test {comparison.metric}, mean and 95 % interval")
    axis.set_title(comparison.task_description.split(" (")[0], fontsize=9)
    axis.grid(alpha=0.25, axis="x")
