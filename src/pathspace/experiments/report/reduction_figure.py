"""A picture of a reduction graph: unit classes in columns from inputs to outputs, skeleton edges in colour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pathspace.experiments.report import saved
from pathspace.network import Network
from pathspace.network.program import told
from pathspace.paths.space.condensation import condensation
from pathspace.paths.space.reduction import ReductionGraph
from pathspace.paths.space.skeleton import Skeleton

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 40
"""Classes drawn in a column; the rest is left out, and the title of the column says so."""
NARROWEST, TITLE, LEGEND, LINE, CHARACTERS = 5.6, 0.4, 0.55, 0.18, 11
"""Inches: the least width, the heights of title, legend and a line of text; characters of a title in an inch."""
IN, OUT, OTHER, LOOP, CUT = "#1f5fa8", "#b3400e", "#b9bdc4", "#8d78a8", "#3d7a4a"
MOST_CUTS = 4
"""Lines about cuts below the graph."""
Place = tuple[float, float]


def draw_reduction(network: Network, skeleton: Skeleton, title: str) -> bytes:
    """Draw a reduction graph with its skeleton, below a title; returns the picture as PNG."""
    return saved(lambda: reduction_figure(network, skeleton, title))[0]


def reduction_figure(network: Network, skeleton: Skeleton, title: str) -> Figure:
    """Return the picture as a figure of matplotlib's; see `draw_reduction`."""
    from matplotlib.figure import Figure

    columns, cuts = _columns(network, skeleton.graph), told(network.cuts)
    if len(cuts) > MOST_CUTS:
        cuts[MOST_CUTS - 1 :] = [f"{len(cuts) - MOST_CUTS + 1} more"]
    tallest = max([3, *(min(len(column), MOST) for column in columns)])
    below = LEGEND + LINE * (len(cuts) + bool(cuts))
    width, height = (
        max(NARROWEST, 2.6 + 1.6 * len(columns)),
        min(9.0, 1.65 + 0.42 * tallest + below),
    )
    figure = Figure(figsize=(width, height))
    # Places of their own for title, graph and legend: a layout that makes room for the widest of
    # them takes it from the graph.
    axes = figure.add_axes((0.0, below / height, 1.0, 1.0 - (below + TITLE) / height))
    axes.set_axis_off()
    shown = _shortened(title, int(width * CHARACTERS))
    figure.text(0.15 / width, 1.0 - 0.1 / height, shown, va="top", fontsize=11, parse_math=False)
    for number, cut in enumerate(cuts):
        y = (below - LINE * (number + 0.5)) / height
        line = _shortened(f"cut at {cut}", int(width * CHARACTERS * 1.2))
        figure.text(0.5, y, line, ha="center", va="center", fontsize=8, color=CUT, parse_math=False)
    places = _places(columns, tallest)
    recurrent = _draw_edges(axes, skeleton, places, last=len(columns) + 1, height=tallest)
    _draw_nodes(axes, columns, places, tallest)
    if cuts:
        _draw_cut(axes, last=len(columns) + 1, height=tallest)
    _legend(figure, recurrent=recurrent, with_cuts=bool(cuts))
    return figure


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"... {text[4 - most :]}"


def _columns(network: Network, graph: ReductionGraph) -> list[list[int]]:
    """Classes by their level: how many steps, other than within cycles, lead to them."""
    _, level = condensation(network, graph)
    columns: defaultdict[int, list[int]] = defaultdict(list)
    for unit_class, depth in enumerate(level[1 : 1 + network.num_classes].tolist()):
        columns[depth].append(unit_class)
    return [columns[depth] for depth in sorted(columns)]


def _places(columns: list[list[int]], tallest: int) -> dict[int, Place]:
    places = {}
    for x, column in enumerate(columns, start=1):
        shown = column[:MOST]
        for row, unit_class in enumerate(shown):
            places[unit_class] = (float(x), (tallest - 1) * (row + 0.5) / len(shown))
    return places


def _draw_edges(
    axes: Axes, skeleton: Skeleton, places: dict[int, Place], *, last: int, height: int
) -> bool:
    """Draw a line for each two classes between which there are weights; says whether some are drawn as recurrent."""
    from matplotlib.collections import LineCollection

    lines, loops = _lines(skeleton, places, last, height)
    plain = {
        (start, stop)
        for (start, stop), colour in lines.items()
        if colour == OTHER and start[0] != stop[0]
    }
    # thousands of them: one artist draws them in a hundredth of the time; the nodes lie on their
    # ends
    axes.add_collection(
        LineCollection(sorted(plain), colors=OTHER, linewidths=0.5, alpha=0.7, zorder=1)
    )
    for (start, stop), colour in lines.items():
        if (start, stop) not in plain:
            _draw_line(axes, start, stop, colour)
    if loops:
        style = {"facecolors": "none", "edgecolors": LOOP, "lw": 0.8}
        axes.scatter(*zip(*sorted(loops), strict=True), s=190, zorder=2, **style)
    return bool(loops) or LOOP in lines.values()


def _lines(
    skeleton: Skeleton, places: dict[int, Place], last: int, height: int
) -> tuple[dict[tuple[Place, Place], str], set[Place]]:
    """Return the colours of lines by their ends, and the places of classes with weights to themselves."""
    classes = skeleton.graph.num_classes
    into = set(skeleton.edges[1 : 1 + classes].tolist())
    out_of = set(skeleton.edges[1 + classes :].tolist())
    lines: dict[tuple[Place, Place], str] = {}
    loops: set[Place] = set()
    for number, start, stop in _ends(skeleton.graph, places, last, height):
        if start == stop:
            loops.add(start)
            continue
        colour = LOOP if start[0] >= stop[0] else OTHER
        if number in into:
            colour = IN
        elif number in out_of:
            colour = OUT
        # many weights between two classes are one line
        if lines.get((start, stop)) not in (IN, OUT):
            lines[start, stop] = colour
    return lines, loops


def _ends(
    graph: ReductionGraph, places: dict[int, Place], last: int, height: int
) -> Iterator[tuple[int, Place, Place]]:
    """Yield each edge with the places of its ends, where both are drawn."""
    middle = (height - 1) / 2
    bias = (0.0, height - 0.2)
    classes = {unit_class + 1: place for unit_class, place in places.items()}
    starts = {0: (0.0, middle), **classes}
    stops = {0: (float(last), middle), **classes}
    # an edge at a product of activations is drawn from, or to, the first of its factors
    sources, targets = (graph.factors(nodes)[0].tolist() for nodes in (graph.source, graph.target))
    for number, (u, v) in enumerate(zip(sources, targets, strict=True)):
        start = bias if u == 0 and graph.bias[number] else starts.get(abs(u))
        stop = stops.get(abs(v))
        if start is not None and stop is not None:
            yield number, start, stop


def _draw_line(axes: Axes, start: Place, stop: Place, colour: str) -> None:
    chosen = colour in (IN, OUT)
    # an edge within a column, or back to an earlier one, is bent to stand apart from the others
    bend = 0.2 if start[0] > stop[0] else 0.0
    if start[0] == stop[0]:
        bend = 0.35
    style = {
        "arrowstyle": "-|>" if chosen else "-",
        "color": colour,
        "lw": 1.8 if chosen else 0.5,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 6,
        "shrinkB": 6,
        "alpha": 1.0 if chosen else 0.7,
    }
    axes.annotate("", xy=stop, xytext=start, arrowprops=style, zorder=3 if chosen else 1)


def _draw_nodes(
    axes: Axes, columns: list[list[int]], places: dict[int, Place], height: int
) -> None:
    if places:
        axes.scatter(
            *zip(*places.values(), strict=True),
            s=70,
            color="white",
            edgecolors="black",
            lw=0.9,
            zorder=4,
        )
    middle, last = (height - 1) / 2, len(columns) + 1
    for x, y, text in ((0, middle, "inputs"), (0, height - 0.2, "bias"), (last, middle, "outputs")):
        box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": "black", "lw": 0.9}
        axes.text(x, y, text, ha="center", va="center", bbox=box, zorder=5)
    for x, column in enumerate(columns, start=1):
        left_out = f", {MOST} shown" if len(column) > MOST else ""
        classes = "class" if len(column) == 1 else "classes"
        axes.text(x, -0.75, f"{len(column)} {classes}{left_out}", ha="center", va="top", fontsize=8)
    axes.set_xlim(-0.6, last + 0.6)
    axes.set_ylim(-1.3, height + 0.3)


def _draw_cut(axes: Axes, *, last: int, height: int) -> None:
    """Draw a cut: an arrow below the columns, from its outputs back to the inputs behind it."""
    middle, under = (height - 1) / 2, -0.4
    axes.plot(
        [last, last, 0, 0], [middle, under, under, middle], color=CUT, lw=1.2, ls="--", zorder=2
    )
    axes.plot([0], [under + 0.3], marker="^", ms=6, color=CUT, zorder=2)


def _legend(figure: Figure, *, recurrent: bool, with_cuts: bool) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=IN, lw=1.8, label="I(c), into a class"),
        Line2D([], [], color=OUT, lw=1.8, label="O(c), out of a class"),
        Line2D([], [], color=OTHER, lw=0.8, label="other weights"),
    ]
    if recurrent:
        marks.append(Line2D([], [], color=LOOP, lw=0.8, label="recurrent; ring: to itself"))
    if with_cuts:
        marks.append(Line2D([], [], color=CUT, lw=1.2, ls="--", label="through a cut"))
    columns = 2 if len(marks) == 4 else 3
    figure.legend(handles=marks, loc="lower center", ncols=columns, frameon=False, fontsize=8)
