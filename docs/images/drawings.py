"""Draws rescaling.png, squared-network.png and skeleton.png: python docs/images/drawings.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
BLUE, RED, GREY, BLACK = "#1f5fa8", "#b3400e", "#b9bdc4", "#222222"
Node = tuple[float, float]


def panels(count: int, titles: list[str]) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, without axes."""
    figure = Figure(figsize=(3.4 * count, 2.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, count, 1 + i) for i in range(count)]
    for one, title in zip(axes, titles, strict=True):
        one.set_axis_off()
        one.set_title(title, fontsize=10)
        one.set_xlim(-0.45, 2.45)
        one.set_ylim(-0.45, 2.45)
    return figure, axes


def node(axes: Axes, place: Node, text: str, *, relu: bool = False) -> None:
    """A unit: a circle, drawn bold where it is a ReLU."""
    axes.scatter(*place, s=560, color="white", edgecolors=BLACK, lw=2.0 if relu else 0.9, zorder=3)
    axes.text(*place, text, ha="center", va="center", fontsize=9, zorder=4)


def edge(
    axes: Axes, start: Node, end: Node, text: str = "", *, colour: str = BLACK, at: float = 0.42
) -> None:
    """A weight: an arrow with its value beside it."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.4, "shrinkA": 12, "shrinkB": 12}
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=2)
    x, y = (a + at * (b - a) for a, b in zip(start, end, strict=True))
    box = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none"}
    if text:
        axes.text(
            x, y, text, ha="center", va="center", fontsize=9, color=colour, bbox=box, zorder=5
        )


def rescaling() -> Figure:
    """One unit before and after its scale is multiplied by 4."""
    figure, axes = panels(
        2, ["f(x) = 6 relu(x1 + 2 x2)", "s = 4:  f(x) = 1.5 relu(4 x1 + 8 x2), the same"]
    )
    for one, weights in zip(axes, (("1", "2", "6"), ("4", "8", "1.5")), strict=True):
        for y, name, weight in ((2.0, "x1", weights[0]), (0.0, "x2", weights[1])):
            node(one, (0.0, y), name)
            edge(one, (0.0, y), (1.0, 1.0), weight, colour=BLUE)
        edge(one, (1.0, 1.0), (2.0, 1.0), weights[2], colour=RED)
        node(one, (1.0, 1.0), "h", relu=True)
        node(one, (2.0, 1.0), "f")
    return figure


def squared_network() -> Figure:
    """A network and its squared network, with the masses gamma^2 that it computes."""
    figure, axes = panels(2, ["the network", "squared: no ReLU, ones in, masses out"])
    weights = {(0, 0): -1, (0, 1): 2, (1, 0): 3, (1, 1): 1}  # input, hidden
    out = (2, -1)
    hidden_mass = [sum(weights[i, h] ** 2 for i in (0, 1)) for h in (0, 1)]
    total = sum(m * w**2 for m, w in zip(hidden_mass, out, strict=True))
    for squared, one in enumerate(axes):
        for h in (0, 1):
            place = (1.0, 2.0 - 2.0 * h)
            for i in (0, 1):
                weight = weights[i, h]
                text = f"{weight**2}" if squared else f"{weight}"
                edge(one, (0.0, 2.0 - 2.0 * i), place, text, colour=BLUE, at=0.3)
            edge(one, place, (2.0, 1.0), f"{out[h] ** 2}" if squared else f"{out[h]}", colour=RED)
            node(one, place, f"{hidden_mass[h]}" if squared else f"h{h + 1}", relu=not squared)
        for i in (0, 1):
            node(one, (0.0, 2.0 - 2.0 * i), "1" if squared else f"x{i + 1}")
        node(one, (2.0, 1.0), f"{total}" if squared else "f")
    return figure


def skeleton() -> Figure:
    """The skeleton of a network, and one basis path through a weight outside it."""
    figure, axes = panels(
        2, ["skeleton: I(c) blue, O(c) red", "the basis path of one other weight"]
    )
    inputs, first = [(0.0, 2.0), (0.0, 0.0)], [(1.0, 2.0), (1.0, 1.0), (1.0, 0.0)]
    output = (2.0, 1.0)
    into = {(0, 0), (1, 1), (1, 2)}
    for number, one in enumerate(axes):
        for i, start in enumerate(inputs):
            for h, end in enumerate(first):
                chosen, path = (i, h) in into, (i, h) == (0, 2)
                colour = BLUE if chosen and not number else BLACK if path and number else GREY
                edge(one, start, end, "e" if path and number else "", colour=colour)
        for h, start in enumerate(first):
            edge(one, start, output, colour=RED if not number or h == 2 else GREY)
        for i, place in enumerate(inputs):
            node(one, place, f"x{i + 1}")
        for h, place in enumerate(first):
            node(one, place, f"h{h + 1}", relu=True)
        node(one, output, "f")
    return figure


if __name__ == "__main__":
    for name, figure in (
        ("rescaling", rescaling()),
        ("squared-network", squared_network()),
        ("skeleton", skeleton()),
    ):
        figure.savefig(Path(*sys.argv[1:2] or [FOLDER]) / f"{name}.png", dpi=140)
