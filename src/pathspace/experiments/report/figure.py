"""The figure of a comparison: per method its loss curves above, its choice of learning rate below."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.table import start_label
from pathspace.experiments.run import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOWS = 60  # points per curve: single batches are too noisy to read
# The first start is drawn wide and pale, the others thin and dark on top of it: where two curves are one,
# both show.
FIRST = {"color": "#8ab6e6", "linewidth": 5.0}
OTHERS = (
    {"color": "#b3400e", "linewidth": 1.6, "linestyle": (0, (3, 1.5))},
    {"color": "#55752f", "linewidth": 1.4, "linestyle": (0, (1, 1))},
    {"color": "#6a4c93", "linewidth": 1.4, "linestyle": (0, (5, 1, 1, 1))},
)


def draw(comparison: Comparison) -> tuple[bytes, str]:
    """Draw the figure.

    Returns:
        The figure as PNG, and as an SVG element to stand in a page.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window, and no state that outlives the call.
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "pathspace", "svg.fonttype": "path"}):
        methods = comparison.settings.methods
        rows = 2 if comparison.choices else 1
        figure = Figure(figsize=(1.2 + 2.9 * len(methods), 0.9 + 2.6 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, len(methods), sharey="row", squeeze=False)
        for column, name in enumerate(methods):
            _losses(axes[0, column], comparison, name)
            if comparison.choices:
                _rates(axes[1, column], comparison, name)
        axes[0, 0].set_ylabel("training loss")
        if comparison.choices:
            axes[1, 0].set_ylabel(f"validation {comparison.metric}")
        _limit_losses(axes[0, 0], comparison)
        _legend(figure, axes)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=160)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]


def _losses(axis: Axes, comparison: Comparison, method: str) -> None:
    rows = [row for row in comparison.rows if row.method == method]
    for number, row in enumerate(rows):
        style: dict[str, Any] = FIRST if number == 0 else OTHERS[(number - 1) % len(OTHERS)]
        steps, curves = averaged(row.runs)
        # A mean of logarithms over seeds, too: one diverging seed must not hide the others.
        middle = np.exp(np.nanmean(np.log(curves), axis=0)) if len(steps) else steps
        axis.plot(steps, middle, label=start_label(comparison, row), zorder=2 + number, **style)
        if len(row.runs) > 1 and len(steps):
            axis.fill_between(
                steps, np.nanmin(curves, axis=0), np.nanmax(curves, axis=0), color=style["color"], alpha=0.15
            )
        for run in row.runs:
            if run.diverged_at is not None and run.losses:
                axis.plot(run.diverged_at, run.losses[0], "x", color=style["color"], markersize=8, zorder=9)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.set_title(METHODS[method].label, fontweight="bold", fontsize=10, pad=18)
    axis.text(0.5, 1.02, _verdict(rows), transform=axis.transAxes, ha="center", va="bottom")


def averaged(runs: Sequence[RunResult]) -> tuple[np.ndarray, np.ndarray]:
    """Average loss curves over windows of steps.

    Args:
        runs: Runs of the same length, except for those that diverged.

    Returns:
        The middle step of each window, shape (W,), and the means, shape (number of runs, W), NaN in windows
        that a run did not reach. At least one run reaches each window; W is 0 if no run made a step.
    """
    length = max(len(run.losses) for run in runs)
    width = max(1, math.ceil(length / WINDOWS))
    windows = math.ceil(length / width)
    means = np.full((len(runs), windows), np.nan)
    for curve, run in zip(means, runs, strict=True):
        for window in range(math.ceil(len(run.losses) / width)):
            # A mean of logarithms: one batch of a diverging run must not fill the window.
            values = np.asarray(run.losses[window * width : (window + 1) * width])
            curve[window] = np.exp(np.mean(np.log(np.maximum(values, np.finfo(float).tiny))))
    steps = np.minimum((np.arange(windows) + 0.5) * width, length)
    return steps, means


def _verdict(rows: Sequence[Row]) -> str:
    differences = [row.difference for row in rows if row.difference is not None]
    if not differences:
        return ""
    largest = max(differences)
    if largest == 0.0:
        return "both starts: one curve, difference 0.0"
    if math.isinf(largest):
        names = dict.fromkeys(row.start for row in rows if row.diverged)
        return f"diverged from the {' and the '.join(names)} start"
    return f"the curves differ by up to {largest:.2g}"


def _rates(axis: Axes, comparison: Comparison, method: str) -> None:
    for number, start in enumerate(comparison.settings.starts):
        choice = comparison.choices[method, start]
        style: dict[str, Any] = FIRST if number == 0 else OTHERS[(number - 1) % len(OTHERS)]
        rates, errors = zip(*sorted(choice.scores.items()), strict=True)
        shown = [error if math.isfinite(error) else math.nan for error in errors]
        axis.plot(rates, shown, marker="o", markersize=7 if number == 0 else 3.5, zorder=2 + number, **style)
        lost = [rate for rate, error in zip(rates, errors, strict=True) if not math.isfinite(error)]
        # At the upper edge, first start above: a rate that diverged has no error to be drawn at.
        height = [0.97 - 0.05 * number] * len(lost)
        axis.plot(lost, height, "x", color=style["color"], transform=axis.get_xaxis_transform())
        if not choice.all_diverged:
            axis.axvline(choice.learning_rate, color=style["color"], linewidth=1, alpha=0.6, zorder=1)
    # The limits first: a grid of one rate leaves nothing for the scale to adapt to.
    rates = comparison.settings.learning_rates
    axis.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
    axis.set_xscale("log")
    axis.set_xlabel("learning rate (cross: diverged)")
    axis.grid(alpha=0.25)


def _limit_losses(axis: Axes, comparison: Comparison) -> None:
    # Diverging runs pass through enormous values: show up to ten times the loss of the start, where all runs
    # begin.
    values = [
        loss for row in comparison.rows for run in row.runs for loss in averaged([run])[1][0] if run.losses
    ]
    begin = [run.losses[0] for row in comparison.rows for run in row.runs if run.losses]
    finite = [value for value in values if math.isfinite(value)]
    if begin and finite:
        low, high = min(finite), min(max(finite), 10 * max(begin))
        axis.set_ylim(low / 1.3, max(high * 1.3, low * 2))


def _legend(figure: Figure, axes: np.ndarray) -> None:
    entries = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        entries |= {
            label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries
        }
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, frameon=False)
