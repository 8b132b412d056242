"""The figure of a comparison: loss curves, errors over epochs, and the choices of learning rates.

From a single start all methods share the panels, else each method has a column of its own. Losses
are averaged over windows. Errors are of three kinds: on the training batches of an epoch, each
before its step, and after it on the validation and on the test split. Diverging runs do not set the
limits of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathspace.experiments.compare import Choice, Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report import LINE_COLOURS, mark_lost, set_log_axis, set_rate_axis
from pathspace.experiments.report.table import start_label
from pathspace.experiments.run import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOWS = 60  # points per curve: single batches are too noisy to read
KINDS = ("training", "validation", "test")
# The first start is drawn wide and pale, the others thin and dark on top of it: where two curves
# are one, both show.
FIRST = {"color": "#8ab6e6", "linewidth": 5.0}
OTHERS = (
    {"color": "#b3400e", "linewidth": 1.6, "linestyle": (0, (3, 1.5))},
    {"color": "#55752f", "linewidth": 1.4, "linestyle": (0, (1, 1))},
    {"color": "#6a4c93", "linewidth": 1.4, "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#8c6d31", "linewidth": 1.4, "linestyle": (0, (7, 2))},
)
Panels = dict[str, "Axes"]
"""Axes by what they show: `"losses"`, `"rates"`, and the kinds of errors."""


def draw_curves(comparison: Comparison) -> Figure:
    """Draw the figure of a comparison."""
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window, and no state that outlives the call.
    figure = Figure(layout="constrained")
    if len(comparison.settings.starts) == 1 and len(comparison.settings.methods) > 1:
        _draw_methods(figure, comparison)
    else:
        _draw_starts(figure, comparison)
    return figure


def _draw_methods(figure: Figure, comparison: Comparison) -> None:
    """Draw one line per method, solid for those that are invariant."""
    kinds = kinds_of_error(comparison)
    above = ["losses"] * 4 + ["rates"] * 2 if comparison.tuning else ["losses"] * 6
    # six columns: one to three kinds share them
    below = [kind for kind in kinds for _ in range(6 // len(kinds))]
    figure.set_size_inches(12.0, 7.6)
    mosaic: Any = [above, below]
    axes: Panels = figure.subplot_mosaic(mosaic)
    (start,) = comparison.settings.starts
    for number, row in enumerate(comparison.rows):
        invariant = METHODS[row.method].invariant
        style = {
            "color": LINE_COLOURS[number % len(LINE_COLOURS)],
            "linewidth": 2.0 if invariant else 1.4,
            "linestyle": "-" if invariant else (0, (4, 1.5)),
        }
        _draw_row(axes, comparison, row, label=METHODS[row.method].label, **style)
        if comparison.tuning:
            _draw_rates(axes["rates"], comparison.choices[row.method, start], number, **style)
    rates = [rate for choice in comparison.choices.values() for rate in choice.scores]
    _name_axes(axes, rates, most=6)
    _scale([axes], comparison)
    figure.legend(*axes["losses"].get_legend_handles_labels(), loc="outside right upper")


def _draw_starts(figure: Figure, comparison: Comparison) -> None:
    """Draw a column for each method, and in it one line per start."""
    methods = comparison.settings.methods
    names = ["losses", *kinds_of_error(comparison), *(["rates"] if comparison.tuning else [])]
    figure.set_size_inches(1.2 + 2.9 * len(methods), 0.9 + 2.6 * len(names))
    grid = figure.subplots(len(names), len(methods), sharey="row", squeeze=False)
    columns = [dict(zip(names, column, strict=True)) for column in grid.T]
    for name, axes in zip(methods, columns, strict=True):
        rows = [row for row in comparison.rows if row.method == name]
        for number, row in enumerate(rows):
            label = start_label(comparison, row)
            style = _style_of_start(comparison, label)
            _draw_row(axes, comparison, row, label=label, zorder=2 + number, **style)
        for number, start in enumerate(comparison.settings.starts if comparison.tuning else ()):
            style = _style_of_start(comparison, start)
            _draw_rates(axes["rates"], comparison.choices[name, start], number, **style)
        _name_axes(axes, comparison.settings.rates_of(name), most=4)
        title = axes["losses"]
        title.set_title(METHODS[name].label, fontweight="bold", fontsize=10, pad=18)
        said = _verdict(rows, comparison.differences.get(name))
        title.text(0.5, 1.02, said, transform=title.transAxes, ha="center", va="bottom")
    _scale(columns, comparison)
    entries = {}
    for axes in columns:
        handles, labels = axes["losses"].get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4)


def _style_of_start(comparison: Comparison, label: str) -> dict[str, Any]:
    """Return how a start is drawn, the same in every panel: of some methods only it has a rate of its own."""
    labels = [
        *comparison.settings.starts,
        *(start_label(comparison, row) for row in comparison.rows),
    ]
    number = list(dict.fromkeys(labels)).index(label)
    return FIRST if number == 0 else OTHERS[(number - 1) % len(OTHERS)]


def _verdict(rows: Sequence[Row], largest: float | None) -> str:
    if largest is None:
        return ""
    if largest == 0.0:
        return "every start: one curve, difference 0.0"
    if math.isinf(largest):
        names = dict.fromkeys(row.start for row in rows if row.diverged)
        return f"diverged from the {' and the '.join(names)} start"
    return f"the curves differ by up to {largest:.2g}"


def _draw_row(axes: Panels, comparison: Comparison, row: Row, *, label: str, **style: Any) -> None:
    draw_losses(axes["losses"], row.runs, label=label, **style)
    for kind in kinds_of_error(comparison):
        draw_errors(axes[kind], row, steps_per_epoch(comparison), kind, **style)


def _draw_rates(axis: Axes, choice: Choice, number: int, **style: Any) -> None:
    rates, errors = zip(*sorted(choice.scores.items()), strict=True)
    shown = [error if math.isfinite(error) else math.nan for error in errors]
    axis.plot(rates, shown, marker="o", markersize=3, zorder=2 + number, **style)
    lost = [rate for rate, error in zip(rates, errors, strict=True) if not math.isfinite(error)]
    mark_lost(axis, lost, number, "x", style["color"])
    if not choice.all_diverged:
        chosen = choice.learning_rate, choice.scores[choice.learning_rate]
        # rings of several starts at one place are seen all
        size = 7 + 2 * (number % 4)
        axis.plot(*chosen, "o", markersize=size, color=style["color"], fillstyle="none")


def _name_axes(axes: Panels, rates: Sequence[float], *, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, axis in axes.items():
        axis.grid(alpha=0.25, which="both")
        if name == "losses":
            axis.set_xlabel("step")
        elif name == "rates":
            set_rate_axis(axis, rates, most=most)
            axis.set_xlabel("learning rate (ring: chosen; cross: diverged)")
        else:
            axis.set_xlabel("epoch (dot: test)" if name == "validation" else "epoch")
            axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _scale(columns: Sequence[Panels], comparison: Comparison) -> None:
    """Name and scale the vertical axes, which all columns share: no more than ten times the worst start is shown."""
    for name, axis in columns[0].items():
        axes = [panels[name] for panels in columns]
        split = "validation" if name == "rates" else name
        axis.set_ylabel("training loss" if name == "losses" else f"{split} {comparison.metric}")
        if name == "losses" or comparison.metric != "error, %":  # which spans decades
            for each in axes:
                set_log_axis(each)
        top = 10 * _worst_start(axes)
        # Diverging runs pass through enormous values.
        if name != "rates" and axis.get_ylim()[1] > top:
            axis.set_ylim(top=top)


def _worst_start(axes: Sequence[Axes]) -> float:
    """Return the largest first value of a curve; infinite where there is none."""
    curves = [np.asarray(line.get_ydata()) for axis in axes for line in axis.lines]
    return max((float(curve[0]) for curve in curves if len(curve) > 1), default=math.inf)


def draw_losses(axis: Axes, runs: Sequence[RunResult], **style: Any) -> None:
    """Draw the mean curve of some runs, a band from the least to the greatest, and a cross where one diverged."""
    steps, curves = averaged(runs)
    # A mean of logarithms over seeds, too: one diverging seed must not hide the others.
    middle = np.exp(np.nanmean(np.log(curves), axis=0)) if len(steps) else steps
    axis.plot(steps, middle, **style)
    colour = style["color"]
    if len(runs) > 1 and len(steps):
        least = np.nanmin(curves, axis=0)
        greatest = np.nanmax(curves, axis=0)
        axis.fill_between(steps, least, greatest, color=colour, alpha=0.15)
    for run in runs:
        if run.diverged_at is not None and run.losses:
            place = run.diverged_at, run.losses[0]
            axis.plot(*place, "x", color=colour, markersize=8, zorder=9)


def kinds_of_error(comparison: Comparison) -> list[str]:
    """Return the names in `KINDS` of errors that were written down; validation alone where no epoch was ended."""
    epochs = [epoch for run in comparison.runs for epoch in run.epochs]
    written = {
        "training": any(epoch.training is not None for epoch in epochs),
        "validation": True,
        "test": any(epoch.test is not None for epoch in epochs),
    }
    return [kind for kind in KINDS if written[kind]]


def errors_of(run: RunResult, kind: str) -> list[tuple[int, float]]:
    """Return (step, error) as far as a run got; what is not finite is left out."""
    if kind == "validation":
        entries = [(entry.step, entry.error) for entry in run.validations]
    else:
        entries = [(entry.step, getattr(entry, kind)) for entry in run.epochs]
    return [(step, error) for step, error in entries if error is not None and math.isfinite(error)]


def draw_errors(
    axis: Axes, row: Row, per_epoch: float, kind: str = "validation", **style: Any
) -> None:
    """Draw the mean error over epochs, its band over seeds, and beside validation the mean test error as a dot.

    Errors that a diverged run did not reach are those of the others.
    """
    by_step: dict[int, list[float]] = {}
    for run in row.runs:
        for step, error in errors_of(run, kind):
            by_step.setdefault(step, []).append(error)
    places = [step / per_epoch for step in sorted(by_step)]
    errors = [by_step[step] for step in sorted(by_step)]
    alone = {"marker": "o", "markersize": 4} if len(places) == 1 else {}  # one epoch makes no line
    axis.plot(places, [math.fsum(column) / len(column) for column in errors], **style, **alone)
    if len(row.runs) > 1:
        least, greatest = list(map(min, errors)), list(map(max, errors))
        axis.fill_between(places, least, greatest, color=style["color"], alpha=0.15)
    if kind == "validation" and row.mean_test_error is not None:
        place = max(places), row.mean_test_error
        axis.plot(*place, "o", markersize=4, color=style["color"], zorder=9)


def steps_per_epoch(comparison: Comparison) -> float:
    """Return where the first epoch of a run ended; where none did, the longest run over the epochs asked for."""
    ends = [run.epochs[0].step for run in comparison.runs if run.epochs]
    longest = max(len(run.losses) for run in comparison.runs)
    return max(1.0, ends[0] if ends else longest / comparison.settings.epochs)


def averaged(runs: Sequence[RunResult]) -> tuple[np.ndarray, np.ndarray]:
    """Average loss curves over windows of steps.

    Args:
        runs: Runs of the same length, except for those that diverged.

    Returns:
        The middle step of each window, shape (W,), and the means, shape (number of runs, W), NaN in
        windows that a run did not reach. At least one run reaches each window; W is 0 if no run
        made a step.
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
