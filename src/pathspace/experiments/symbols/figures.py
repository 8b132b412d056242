"""The pictures of the table of symbol sequences: regrets of all rows, and of the networks over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pathspace.experiments.published import Published
from pathspace.experiments.symbols.cells import Score, best
from pathspace.experiments.symbols.protocol import BASELINES, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_SECONDS = 1e-3  # as curves are rounded


def draw(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> Figure:
    """Draw the regrets, one panel for each text."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    chosen = best(scores)
    draws = range(protocol.seeds)
    colours = {"DH+FB": "#b3400e", "QDH+RUTSD": "#8ab6e6", "QDH+RBP": "#1f5f9e", "merged": "#55752f"}
    colours |= dict.fromkeys(BASELINES, "#9aa5b1")
    size = (1.6 + 3.2 * len(protocol.texts), 0.9 + 0.28 * len(protocol.rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(protocol.texts), sharey=True, squeeze=False)[0]
    places = range(len(protocol.rows))[::-1]
    for axis, text in zip(axes, protocol.texts, strict=True):
        regrets = [[max(chosen[row, text, draw].test, 1.0) for draw in draws] for row in protocol.rows]
        values = [fmean(bits) for bits in regrets]
        axis.barh(places, values, color=[colours[row.split(", ")[-1]] for row in protocol.rows], height=0.7)
        if len(draws) > 1:  # each draw, as few of them are hardly normal
            for place, bits in zip(places, regrets, strict=True):
                axis.plot(bits, len(bits) * [place], "o", color="black", alpha=0.6, markersize=2.5)
                values += bits
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(text)
        axis.set_xlabel("bits beyond the truth")
        for result in published.results if published is not None else ():
            if result.label == text and not result.method and result.value is not None:
                values.append(result.value)
                axis.axvline(result.value, color="black", linewidth=1, linestyle=(0, (3, 2)))
        axis.set_xlim(left=10 ** math.floor(math.log10(min(values))))
    axes[0].set_yticks(places, protocol.rows)
    if published is not None:
        figure.supxlabel("dashed: the best number of the paper", fontsize=8)
    return figure


def draw_over_time(protocol: Protocol, scores: Sequence[Score]) -> Figure:
    """Draw the regret on the validation text over processor time, a line for each size that has a curve.

    As Figs. 1, 2 and 4 of the paper; a column for each text, a row for each network and step.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    curves = [score for score in scores if score.curve]
    rows = [row for row in protocol.rows if any(score.cell.row == row for score in curves)]
    sizes = sorted({score.cell.size for score in curves})
    shades = mpl.colormaps["viridis"]([0.9 * place / max(1, len(sizes) - 1) for place in range(len(sizes))])
    colours = dict(zip(sizes, shades, strict=True))
    size = (1.4 + 3.2 * len(protocol.texts), 0.6 + 1.7 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(protocol.texts), sharex="col", sharey="col", squeeze=False)
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.25)
    lines = {}
    for score in curves:
        _, seconds, regrets = zip(*score.curve, strict=True)
        # logarithms: no pass takes less than the clock tells, and luck can beat the generator
        at = [max(second, LEAST_SECONDS) for second in seconds]
        floored = [max(regret, 1.0) for regret in regrets]
        axis = axes[rows.index(score.cell.row), protocol.texts.index(score.cell.text)]
        (lines[score.cell.size],) = axis.plot(at, floored, color=colours[score.cell.size], linewidth=1)
    for row, axis in zip(rows, axes[:, 0], strict=True):
        axis.set_ylabel(row, fontsize=8)
    for text, top, bottom in zip(protocol.texts, axes[0], axes[-1], strict=True):
        top.set_title(text)
        bottom.set_xlabel("processor seconds")
    figure.legend([lines[size] for size in sizes], map(str, sizes), loc="outside right upper", title="units")
    figure.supylabel("bits beyond the truth, validation text")
    return figure
