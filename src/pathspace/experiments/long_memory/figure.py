"""The picture of the comparison: how many runs have learned the problem by which step, and at which rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pathspace.experiments.long_memory.cells import Row, Setting, learned
from pathspace.experiments.long_memory.methods import METHODS
from pathspace.experiments.long_memory.protocol import Protocol
from pathspace.experiments.report.figures import set_rate_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"muon": "#0072b2", "muon-hidden": "#cc79a7", "soap": "#d55e00", "adamw": "#009e73"}
CONTROLS = ("#000000", "#7f7f7f", "#cc79a7", "#e69f00", "#56b4e9")
LINES = {"path": "-", "balanced once": (0, (4, 1.5)), "the weights": (0, (1, 1.5)), "control": "-"}


def draw(protocol: Protocol, rows: Mapping[Setting, Sequence[Row]]) -> Figure:
    """Draw a line of two panels for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.6 + 3.4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for (setting, found), (left, right) in zip(rows.items(), axes, strict=True):
        most = protocol.steps_per_length * setting.length
        for row in found:
            style = _style(protocol, row.method)
            _curve(left, row, most, style)
            shares = [learned(outcomes) / len(outcomes) for outcomes in row.tuning.values()]
            right.plot(list(row.tuning), shares, marker="o", markersize=3, **style)
        left.set_title(f"{setting.problem}, T = {setting.length}, H = {setting.hidden}")
        left.set(xlabel="step", ylabel="reported runs that have learned it", xlim=(0, most))
        set_rate_axis(right, {rate for row in found for rate in row.tuning})
        right.set(xlabel="learning rate", ylabel="tuning runs that learned it")
        for axis in (left, right):
            axis.set_ylim(-0.03, 1.03)
            axis.grid(alpha=0.25)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _curve(axis: Axes, row: Row, most: int, style: dict[str, Any]) -> None:
    steps = sorted(outcome.steps for outcome in row.reported if outcome.steps is not None)
    shares = [k / len(row.reported) for k in range(len(steps) + 1)]
    axis.step(
        [0, *steps, most], [*shares, shares[-1]], where="post", label=METHODS[row.method].label, **style
    )


def _style(protocol: Protocol, name: str) -> dict[str, Any]:
    method = METHODS[name]
    if method.group == "control":
        controls = [other for other in protocol.methods if METHODS[other].group == "control"]
        return {"color": CONTROLS[controls.index(name)], "linewidth": 1.0, "linestyle": LINES["control"]}
    thick = 2.2 if name == protocol.reference else 1.4
    alpha = 0.5 if 0 < method.power < 1 else 1.0
    return {
        "color": COLOURS[method.rule],
        "linewidth": thick,
        "linestyle": LINES[method.group],
        "alpha": alpha,
    }
