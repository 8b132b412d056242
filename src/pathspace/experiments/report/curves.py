"""Curves for the eye: losses averaged over windows, errors over epochs, and limits that diverging runs do not set.

Errors are of three kinds: on the training batches of an epoch, each before its step, and after it on the validation
and on the test split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.report.log_axis import set_log_axis
from pathspace.experiments.run import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOWS = 60  # points per curve: single batches are too noisy to read
KINDS = ("training", "validation", "test")


def draw_losses(axis: Axes, runs: Sequence[RunResult], **style: Any) -> None:
    """Draw the mean curve of some runs, a band from the least to the greatest, and a cross where one diverged."""
    steps, curves = averaged(runs)
    # A mean of logarithms over seeds, too: one diverging seed must not hide the others.
    middle = np.exp(np.nanmean(np.log(curves), axis=0)) if len(steps) else steps
    axis.plot(steps, middle, **style)
    if len(runs) > 1 and len(steps):
        axis.fill_between(
            steps, np.nanmin(curves, axis=0), np.nanmax(curves, axis=0), color=style["color"], alpha=0.15
        )
    for run in runs:
        if run.diverged_at is not None and run.losses:
            axis.plot(run.diverged_at, run.losses[0], "x", color=style["color"], markersize=8, zorder=9)


def kinds_of_error(comparison: Comparison) -> list[str]:
    """Return the names in `KINDS` of errors that were written down; validation alone where no epoch was ended."""
    epochs = [epoch for row in comparison.rows for run in row.runs for epoch in run.epochs]
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


def draw_errors(axis: Axes, row: Row, epochs: int, kind: str = "validation", **style: Any) -> None:
    """Draw the mean error over epochs, its band over seeds, and beside validation the mean test error as a dot.

    Args:
        axis: Where.
        row: Its runs; errors that a diverged run did not reach are those of the others.
        epochs: Passes of a whole run.
        kind: A name in `KINDS`.
        style: Of the line.
    """
    whole = [run.validations[-1].step for run in row.runs if run.diverged_at is None]
    if not whole:
        return
    by_step: dict[int, list[float]] = {}
    for run in row.runs:
        for step, error in errors_of(run, kind):
            by_step.setdefault(step, []).append(error)
    places = [step * epochs / max(whole[0], 1) for step in sorted(by_step)]
    errors = [by_step[step] for step in sorted(by_step)]
    alone = {"marker": "o", "markersize": 4} if len(places) == 1 else {}  # one epoch makes no line
    axis.plot(places, [math.fsum(column) / len(column) for column in errors], **style, **alone)
    if len(row.runs) > 1:
        axis.fill_between(
            places, [min(column) for column in errors], [max(column) for column in errors],
            color=style["color"], alpha=0.15,
        )  # fmt: skip
    if kind == "validation" and row.mean_test_error is not None:
        axis.plot(epochs, row.mean_test_error, "o", markersize=4, color=style["color"], zorder=9)


def name_errors(axis: Axes, comparison: Comparison, kind: str = "validation") -> None:
    """Name the axis of epochs, and scale the errors."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("epoch (dot: test)" if kind == "validation" else "epoch")
    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if comparison.metric != "error, %":  # perplexities and squared errors span decades
        set_log_axis(axis)


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


def limit_losses(axis: Axes, comparison: Comparison) -> None:
    """Show no more than ten times the loss of the start, where all runs begin."""
    # Diverging runs pass through enormous values.
    values = [
        loss for row in comparison.rows for run in row.runs for loss in averaged([run])[1][0] if run.losses
    ]
    begin = [run.losses[0] for row in comparison.rows for run in row.runs if run.losses]
    finite = [value for value in values if math.isfinite(value)]
    if begin and finite:
        low, high = min(finite), min(max(finite), 10 * max(begin))
        axis.set_ylim(low / 1.3, max(high * 1.3, low * 2))
