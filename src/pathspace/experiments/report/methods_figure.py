"""The figure of a comparison from a single start: the methods' curves, and their choices of learning rate, together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pathspace.experiments.compare import Comparison
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.curves import (
    draw_errors,
    draw_losses,
    kinds_of_error,
    limit_losses,
    name_errors,
)
from pathspace.experiments.report.log_axis import set_log_axis, set_rate_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ to colour-blind eyes too (Okabe and Ito), and as many more as the recipe with most methods needs.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31", "#7f7f7f", "#5e3c99",
    "#7fbc41", "#a50026", "#01665e", "#b7a7e0", "#d6c600",
)  # fmt: skip


def draw_methods(figure: Figure, comparison: Comparison) -> None:
    """Draw one line per method, solid for those that are invariant: losses, and errors over epochs and learning rates.

    Args:
        figure: Empty; its size is set.
        comparison: From one start.
    """
    kinds = kinds_of_error(comparison)
    below = [
        kind for kind in kinds for _ in range(6 // len(kinds))
    ]  # six columns: one to three kinds share them
    above = ["losses"] * 4 + ["rates"] * 2 if comparison.tuning else ["losses"] * 6
    figure.set_size_inches(12.0, 7.6)
    panels: Any = [above, below]
    axes: dict[str, Axes] = figure.subplot_mosaic(panels)
    for number, row in enumerate(comparison.rows):
        style = _style(number, row.method)
        draw_losses(axes["losses"], row.runs, label=METHODS[row.method].label, **style)
        for kind in kinds:
            draw_errors(axes[kind], row, comparison.settings.epochs, kind, **style)
        if comparison.tuning:
            _rates(axes["rates"], comparison, number, row.method)
    axes["losses"].set(xlabel="step", ylabel="training loss")
    limit_losses(axes["losses"], comparison)
    set_log_axis(axes["losses"])
    for kind in kinds:
        axes[kind].set_ylabel(f"{kind} {comparison.metric}")
        name_errors(axes[kind], comparison, kind)
    if comparison.tuning:
        set_rate_axis(axes["rates"], [rate for c in comparison.choices.values() for rate in c.scores])
        axes["rates"].set_xlabel("learning rate (ring: chosen; cross: diverged)")
        axes["rates"].set_ylabel(f"validation {comparison.metric}")
        if comparison.metric != "error, %":  # perplexities and squared errors span decades
            set_log_axis(axes["rates"])
    for axis in axes.values():
        axis.grid(alpha=0.25, which="both")
    figure.legend(*axes["losses"].get_legend_handles_labels(), loc="outside right upper", frameon=False)


def _style(number: int, method: str) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linewidth": 2.0 if METHODS[method].invariant else 1.4,
        "linestyle": "-" if METHODS[method].invariant else (0, (4, 1.5)),
    }


def _rates(axis: Axes, comparison: Comparison, number: int, method: str) -> None:
    (start,) = comparison.settings.starts
    choice, style = comparison.choices[method, start], _style(number, method)
    rates, errors = zip(*sorted(choice.scores.items()), strict=True)
    shown = [error if math.isfinite(error) else math.nan for error in errors]
    axis.plot(rates, shown, marker="o", markersize=3, **style)
    lost = [rate for rate, error in zip(rates, errors, strict=True) if not math.isfinite(error)]
    # At the upper edge, first method above: a rate that diverged has no error to be drawn at.
    height = [0.98 - 0.025 * number] * len(lost)
    axis.plot(lost, height, "x", markersize=5, color=style["color"], transform=axis.get_xaxis_transform())
    if not choice.all_diverged:
        chosen = choice.learning_rate, choice.scores[choice.learning_rate]
        axis.plot(*chosen, "o", markersize=8, color=style["color"], fillstyle="none")
