"""Curves for the page that can be switched on and off: SVG that stands in the page, one group for each row.

The figure of `figure` and `methods_figure` shows the same runs for paper; here every row has a switch, and a reader
compares two of them by hiding the rest. Colours tell methods apart, dashes starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.curves import averaged, errors_of, kinds_of_error
from pathspace.experiments.report.methods_figure import COLOURS
from pathspace.experiments.report.table import start_label

WIDTH, HEIGHT = 640.0, 330.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 12.0, 44.0
DASHES = ("", "7 4", "2 3", "9 3 2 3")
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Switch:
    """A curve's name, and how it is drawn."""

    label: str
    colour: str
    dash: str


@dataclass(frozen=True)
class Panel:
    """One quantity: what it is called, and an `<svg>` element with a group of class `curve` for each switch."""

    title: str
    svg: str


@dataclass(frozen=True)
class Curves:
    """The switches, and the panels that they act on."""

    switches: tuple[Switch, ...]
    panels: tuple[Panel, ...]


def switchable_curves(comparison: Comparison) -> Curves | None:
    """Return the mean errors over epochs and the mean training loss over steps; None where no run got on."""
    rows = [row for row in comparison.rows if any(run.losses for run in row.runs)]
    if not rows:
        return None
    several = len({row.start for row in rows}) > 1
    switches = tuple(_switch(comparison, row, several) for row in rows)
    epoch = steps_per_epoch(comparison)
    panels = []
    for kind in sorted(kinds_of_error(comparison), key=("validation", "training", "test").index):
        name = f"{kind} {comparison.metric}"
        errors = [[(step / epoch, value) for step, value in _errors(row, kind)] for row in rows]
        panels.append(
            Panel(
                f"{name}, over epochs",
                _svg(errors, switches, "epoch", name, comparison.metric != "error, %"),
            )
        )
    losses = _svg([_losses(row) for row in rows], switches, "step", "training loss", True)
    panels.insert(1, Panel("training loss, over steps", losses))
    return Curves(switches, tuple(panels))


def _switch(comparison: Comparison, row: Row, several: bool) -> Switch:
    label = METHODS[row.method].label + (f", {start_label(comparison, row)}" if several else "")
    method = comparison.settings.methods.index(row.method)
    own = [other for other in comparison.rows if other.method == row.method]
    return Switch(label, COLOURS[method % len(COLOURS)], DASHES[own.index(row) % len(DASHES)])


def steps_per_epoch(comparison: Comparison) -> float:
    """Where the first epoch of a run ended; where none did, all steps of the longest one over the epochs asked for."""
    runs = [run for row in comparison.rows for run in row.runs]
    ends = [run.epochs[0].step for run in runs if run.epochs]
    return max(1.0, ends[0] if ends else max(len(run.losses) for run in runs) / comparison.settings.epochs)


def _errors(row: Row, kind: str) -> Curve:
    """Return (step, mean over seeds) where all runs have an error."""
    curves = [dict(errors_of(run, kind)) for run in row.runs]
    shared = sorted(set(curves[0]).intersection(*curves[1:]))
    return [(float(step), math.fsum(curve[step] for curve in curves) / len(curves)) for step in shared]


def _losses(row: Row) -> Curve:
    steps, means = averaged(row.runs)
    values = [[float(value) for value in column if value > 0] for column in means.T]
    return [
        (float(step), math.exp(math.fsum(map(math.log, column)) / len(column)))
        for step, column in zip(steps, values, strict=True)
        if column and all(map(math.isfinite, column))
    ]


def _svg(
    curves: Sequence[Curve], switches: Sequence[Switch], x_name: str, y_name: str, logarithmic: bool
) -> str:
    begin = [curve[0][1] for curve in curves if curve]
    values = [y for curve in curves for _, y in curve if y > 0 or not logarithmic]
    if not values:
        return ""
    # Diverging runs pass through enormous values: no more than ten times the worst start is shown.
    low, high = min(values), min(max(values), 10 * max(begin))
    y_axis = _Axis.of(low if logarithmic else 0.0, high, HEIGHT - BOTTOM, TOP, logarithmic)
    x_axis = _Axis.of(0.0, max(x for curve in curves for x, _ in curve), LEFT, WIDTH - RIGHT, False)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(y_name)} over {x_name}s" '
        'class="chart">'
    ]
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17:g}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 6:g}" text-anchor="middle">{x_name}</text>')
    for number, (curve, switch) in enumerate(zip(curves, switches, strict=True)):
        points = [(x_axis.place(x), y_axis.place(y)) for x, y in curve if y > 0 or not logarithmic]
        if len(points) == 1:  # one epoch makes no line
            points = [(points[0][0] + side, points[0][1]) for side in (-4, 4)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = f' stroke-dasharray="{switch.dash}"' if switch.dash else ""
        parts.append(
            f'<g class="curve" data-curve="{number}"><title>{escape(switch.label)}</title>'
            f'<polyline points="{line}" stroke="{switch.colour}"{dash}/></g>'
        )
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Axis:
    """Values and where they are drawn; what lies outside is drawn at the edge."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, low: float, high: float, first: float, last: float, logarithmic: bool) -> _Axis:
        if logarithmic:
            low, high = low / 1.1, max(high * 1.1, low * 2)
            ticks = _decades(low, high) if high > 10 * low else _multiples(low, high)
        else:
            high = high or 1.0
            ticks = _multiples(low, high)
        shown = tuple(tick for tick in ticks if low <= tick <= high)
        return cls(low, high, first, last, logarithmic, shown)

    def place(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.first + part * (self.last - self.first)


def _decades(low: float, high: float) -> list[float]:
    spread = math.log10(high / low)
    every, digits = max(1, round(spread / 6)), (1, 2, 5) if spread < 3 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades if decade % every == 0 for digit in digits]


def _multiples(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most six steps of them from low to high."""
    unit = 10.0 ** math.floor(math.log10(high - low))
    step = next(unit * part for part in (0.2, 0.5, 1.0, 2.0) if (high - low) / (unit * part) <= 6)
    return [round(step * number, 12) for number in range(math.floor(low / step), math.floor(high / step) + 1)]
