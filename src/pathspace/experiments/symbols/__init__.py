"""The table of O13 for symbol sequences: baselines, and three networks in three metrics, on three texts.

Its cells are in `cells`. The report has the table in words, pairs of rows, all sizes, and the
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING, Any

from pathspace.experiments.recipes import Published
from pathspace.experiments.report import (
    NOTHING,
    Figure,
    Section,
    Table,
    TableRow,
    grouped_rows,
    number_label,
    panels,
)
from pathspace.experiments.report.statistics import Interval, interval_label, t_interval
from pathspace.experiments.storage import finite
from pathspace.experiments.symbols.cells import (
    BASELINES,
    COMPARED,
    MERGED,
    Protocol,
    Score,
    best,
    shown,
    texts,
)
from pathspace.experiments.symbols.cells import fill as fill

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

LEAST_SECONDS = 1e-3  # as curves are rounded
COLOURS = {
    "DH+FB": "#b3400e",
    "QDH+RUTSD": "#8ab6e6",
    "QDH+RBP": "#1f5f9e",
    "merged": "#55752f",
    **dict.fromkeys(BASELINES, "#9aa5b1"),
}


BROKEN = "†"


def build_table(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> Table:
    """Put the scores of all sizes into words, and below them the paper's numbers by text and row."""
    chosen = best(scores)
    rows = []
    for row in protocol.rows:
        group, variant = ("baseline", row) if row in BASELINES else row.split(", ")
        draws = [[chosen[row, text, k] for k in range(protocol.seeds)] for text in protocol.texts]
        seconds = sum(score.seconds for score in scores if score.cell.row == row)
        sizes = "/".join(map(_sizes, draws))
        rows.append((group, variant, *map(_regret, draws), sizes, f"{seconds:.0f}"))
    broken = any(BROKEN in cell for row in rows for cell in row)
    if published is not None:
        rows += _published_rows(protocol, published)
    title = "Regret on a fresh text: bits beyond the true code length"
    columns = ("model", "variant", *protocol.texts, "size", "seconds")
    said = notes(protocol, published, broken=broken)
    return Table(title, columns, grouped_rows(rows, once=True), said)


def _regret(draws: Sequence[Score]) -> str:
    bits = [score.test for score in draws]
    broken = BROKEN * any(score.broke_off for score in draws)
    return number_label(mean(bits), ",.1f", stdev(bits) if len(bits) > 1 else None) + broken


def _sizes(draws: Sequence[Score]) -> str:
    """Return the sizes that were chosen."""
    taken = sorted({score.cell.size for score in draws})
    return ",".join(str(size or NOTHING) for size in taken)


def _published_rows(protocol: Protocol, published: Published) -> list[tuple[str, ...]]:
    """Return a row for the best numbers of the paper, and one for each method that it names."""
    rows = []
    for name in dict.fromkeys(result.method for result in published.results):
        values = _published(published, name)
        numbers = (number_label(values.get(text), ",.1f") for text in protocol.texts)
        rows.append(("published", name or "the best", *numbers, "", ""))
    return rows


def _published(published: Published | None, row: str = "") -> dict[str, float]:
    """Return the numbers of the paper for a row by text; for none, the best ones."""
    results = () if published is None else published.results
    return {r.label: r.value for r in results if r.method == row and r.value is not None}


def notes(
    protocol: Protocol, published: Published | None, *, broken: bool = False
) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the table."""
    passes = _by_text(protocol, protocol.passes)
    units, states, depths = (
        ", ".join(map(str, v)) for v in (protocol.units, protocol.states, protocol.depths)
    )
    found = [
        "A training, a validation and a test text of the same length were drawn for each column. The validation text "
        f"stopped the training and chose the size (networks {units} units, HMM as many states, dense HMM "
        f"{states}, contexts {depths}), and the test text was scored once. All rows have seen the training text.",
        f"Networks: {protocol.connectivity} edges leave a unit; at most so many passes: {passes}; "
        f"{_starts(protocol)}. The RNN takes the quasi-diagonal form of its metrics. Seconds: processor time of all "
        "sizes.",
    ]
    if protocol.seeds > 1:
        found.append(
            f"Mean ± standard deviation of {protocol.seeds} draws, each with texts, graphs and start values of its own."
        )
    if protocol.seconds:
        budgets = {text: f"{seconds:g}" for text, seconds in protocol.seconds.items()}
        found.append(
            f"Budget of work: at most so many processor seconds for one network of one size, from its first pass on, "
            f"with the passes that were undone: {_by_text(protocol, budgets)}."
        )
    if MERGED in protocol.rows:
        merged = {t: f"{o['ensemble']} of {o['restarts']}" for t, o in protocol.merged.items()}
        found.append(
            f"Merged: not in the paper. So many networks made one: {_by_text(protocol, merged)}; half of them learned "
            "the training text and stopped on the validation text, the others the reverse, so that it has learned two "
            "texts where all other rows have learned one."
        )
    if broken:
        found.append(
            f"{BROKEN} the gradient overflowed and ended the training; the best parameters until then count."
        )
    if protocol.lengths:
        lengths = ", ".join(f"{text} {length}" for text, length in protocol.lengths.items())
        found.append(f"Shorter texts than the paper's: {lengths}.")
    if published is not None:
        found.append(f"Published: {published.source} {published.setting}")
    return tuple(found)


def _by_text(protocol: Protocol, values: Mapping[str, object]) -> str:
    """Name the values of the columns that have one."""
    return ", ".join(f"{text} {values[text]}" for text in protocol.texts if text in values)


def _starts(protocol: Protocol) -> str:
    starts = {text: protocol.restarts.get(text, 1) for text in protocol.texts}
    if max(starts.values()) == 1:
        return "1 start of each size"
    heat = f", of which the better quarter went on after {protocol.heat} passes"
    return f"starts of each size: {_by_text(protocol, starts)}{heat * (protocol.heat > 0)}"


def sizes_table(protocol: Protocol, scores: Sequence[Score]) -> Table:
    """Return what every size came to."""

    def order(score: Score) -> tuple[int, int, int, int]:
        cell = score.cell
        place = protocol.texts.index(cell.text), protocol.rows.index(cell.row)
        return (*place, cell.draw, cell.size)

    several = protocol.seeds > 1
    rows = []
    for score in sorted(scores, key=order):
        cells = (
            score.cell.text,
            score.cell.row,
            str(score.cell.size or NOTHING),
            f"{score.validation:,.1f}",
            f"{score.test:,.1f}",
            str(score.passes or NOTHING),
            str(score.tries or NOTHING),
            f"{score.seconds:.1f}",
            str(score.cell.draw),
        )
        rows.append(TableRow(cells if several else cells[:-1]))
    columns = ("text", "model", "size", "validation", "test", "passes", "tries", "seconds", "draw")
    note = "Tries: passes with those that were undone. Validation chooses, test decides nothing."
    title = "Bits beyond the true code length, of every size"
    return Table(title, columns if several else columns[:-1], tuple(rows), (note,))


def samples(protocol: Protocol, scores: Sequence[Score]) -> tuple[tuple[str, str], ...]:
    """Return what the generator writes, and what the networks do that the validation text prefers, by text.

    Of the first draw.
    """
    chosen = best([score for score in scores if score.sample and not score.cell.draw]).values()
    if not chosen:
        return ()
    found = []
    for text in protocol.texts:
        found.append((f"{text}: the generator", shown(texts(text, protocol)[2])))
        for score in _preferred([score for score in chosen if score.cell.text == text]):
            found.append((f"{text}: {score.cell.row}, {score.cell.size} units", score.sample))
    return tuple(found)


def _preferred(scores: Sequence[Score]) -> list[Score]:
    """Return the network that the validation text prefers, and the merged ones."""
    single = [score for score in scores if score.cell.row != MERGED]
    merged = [score for score in scores if score.cell.row == MERGED]
    return [*sorted(single, key=lambda score: score.validation)[:1], *merged]


def sections_of(
    protocol: Protocol, scores: Sequence[Score], published: Published | None
) -> tuple[list[Section], dict[str, Any]]:
    """Return the table, of several draws pairs of rows, all sizes, and the numbers; see `execution`."""
    table = build_table(protocol, scores, published)
    figure = Figure("symbols.png", partial(draw, protocol, scores, published))
    sections = [Section("Results", table, "table.csv", figure, samples=samples(protocol, scores))]
    pairs = pairs_of(protocol, scores)
    if pairs:
        compared = pairs_table(protocol, pairs)
        sections.append(Section(compared.title, compared, "pairs.csv"))
    over_time = Figure("validation.png", partial(draw_over_time, protocol, scores))
    if not any(score.curve for score in scores):
        over_time = None
    sizes = sizes_table(protocol, scores)
    sections.append(Section("All sizes", sizes, figure=over_time, printed=False))
    chosen = best(scores)
    rows = []
    for row, text, number in product(protocol.rows, protocol.texts, range(protocol.seeds)):
        score = chosen[row, text, number]
        which = {"row": row, "text": text, "draw": number, "size": score.cell.size}
        rows.append({**which, "test": score.test, "validation": score.validation})
    of_paper = None
    if published is not None:
        results = [{"text": r.label, "row": r.method, "value": r.value} for r in published.results]
        of_paper = {"source": published.source, "results": results}
    return sections, {
        "unit": "bits beyond the true code length",
        "rows": rows,
        "pairs": [pair.as_dict() for pair in pairs],
        "scores": [asdict(score) for score in scores],
        "published": of_paper,
    }


def draw(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> Drawing:
    """Draw the regrets, one panel for each text."""
    chosen = best(scores)
    size = (1.6 + 3.2 * len(protocol.texts), 0.9 + 0.28 * len(protocol.rows))
    figure, axes = panels(size, len(protocol.texts), sharey=True)
    best_ones = _published(published)
    for axis, text in zip(axes, protocol.texts, strict=True):
        regrets = {
            row: [max(chosen[row, text, draw].test, 1.0) for draw in range(protocol.seeds)]
            for row in protocol.rows
        }
        values = _draw_bars(axis, regrets)
        if text in best_ones:
            axis.axvline(best_ones[text], color="black", linewidth=1, linestyle=(0, (3, 2)))
            values.append(best_ones[text])
        axis.set_xlim(left=10 ** math.floor(math.log10(min(values))))
        axis.set_title(text)
        axis.set_xlabel("bits beyond the truth")
    axes[0].set_yticks(range(len(protocol.rows))[::-1], protocol.rows)
    if published is not None:
        figure.supxlabel("dashed: the best number of the paper", fontsize=8)
    return figure


def _draw_bars(axis: Axes, regrets: Mapping[str, Sequence[float]]) -> list[float]:
    """Draw the mean regret of each row, and each of several draws; return all values that are shown."""
    from matplotlib.ticker import NullFormatter

    places = range(len(regrets))[::-1]
    values = [fmean(bits) for bits in regrets.values()]
    colours = [COLOURS[row.split(", ")[-1]] for row in regrets]
    axis.barh(places, values, color=colours, height=0.7)
    for place, bits in zip(places, regrets.values(), strict=True):
        if len(bits) > 1:  # each draw, as few of them are hardly normal
            axis.plot(bits, len(bits) * [place], "o", color="black", alpha=0.6, markersize=2.5)
            values += bits
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    return values


def draw_over_time(protocol: Protocol, scores: Sequence[Score]) -> Drawing:
    """Draw the regret on the validation text over processor time, a line for each size that has a curve.

    As Figs. 1, 2 and 4 of the paper; a column for each text, a row for each network and step.
    """
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    curves = [score for score in scores if score.curve]
    rows = sorted({score.cell.row for score in curves}, key=protocol.rows.index)
    sizes = sorted({score.cell.size for score in curves})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(sizes)))
    colours = dict(zip(sizes, shades, strict=True))
    size = (1.4 + 3.2 * len(protocol.texts), 0.6 + 1.7 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    shared: dict[str, Any] = {"sharex": "col", "sharey": "col", "squeeze": False}
    axes = figure.subplots(len(rows), len(protocol.texts), **shared)
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.25)
    lines = {}
    for score in curves:
        cell = score.cell
        _, seconds, regrets = zip(*score.curve, strict=True)
        # logarithms: no pass takes less than the clock tells, and luck can beat the generator
        at = [max(second, LEAST_SECONDS) for second in seconds]
        floored = [max(regret, 1.0) for regret in regrets]
        axis = axes[rows.index(cell.row), protocol.texts.index(cell.text)]
        (lines[cell.size],) = axis.plot(at, floored, color=colours[cell.size], linewidth=1)
    for row, axis in zip(rows, axes[:, 0], strict=True):
        axis.set_ylabel(row, fontsize=8)
    for text, top, bottom in zip(protocol.texts, axes[0], axes[-1], strict=True):
        top.set_title(text)
        bottom.set_xlabel("processor seconds")
    figure.legend(
        [lines[size] for size in sizes], map(str, sizes), loc="outside right upper", title="units"
    )
    figure.supylabel("bits beyond the truth, validation text")
    return figure


@dataclass(frozen=True)
class Pair:
    """Two rows of the table on one text, the first of which has fewer bits, the paper says.

    Attributes:
        difference: Bits of the first minus bits of the second on the test text, paired by draws.
        fewer: Draws in which the first has fewer.
    """

    first: str
    second: str
    text: str
    difference: Interval
    fewer: int

    @property
    def verdict(self) -> str:
        """The verdict of the interval on the first row's bits."""
        return {-1: "fewer", 0: "not decided", 1: "more"}[self.difference.sign]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for what is not finite."""
        return {
            "first": self.first,
            "second": self.second,
            "text": self.text,
            "difference": finite(self.difference.mean),
            "half_interval": finite(self.difference.half),
            "fewer": self.fewer,
            "verdict": self.verdict,
        }


def pairs_of(protocol: Protocol, scores: Sequence[Score]) -> list[Pair]:
    """Return what can be said of the rows that ran; nothing of a single draw."""
    if protocol.seeds == 1:
        return []
    chosen = best(scores)
    there = [pair for pair in COMPARED if set(pair) <= set(protocol.rows)]
    found = []
    for (first, second), text in product(there, protocol.texts):
        differences = [
            chosen[first, text, draw].test - chosen[second, text, draw].test
            for draw in range(protocol.seeds)
        ]
        fewer = sum(difference < 0 for difference in differences)
        found.append(Pair(first, second, text, t_interval(differences), fewer))
    return found


def pairs_table(protocol: Protocol, pairs: Sequence[Pair]) -> Table:
    """Put pairs into words."""
    rows = [
        (
            f"{pair.first} against {pair.second}",
            pair.text,
            interval_label(pair.difference, "+,.1f"),
            f"{pair.fewer} of {protocol.seeds}",
            pair.verdict,
        )
        for pair in pairs
    ]
    note = (
        "Difference: bits of the first minus bits of the second, paired by draws, ± half of Student's 95 % interval. "
        "Fewer or more: it excludes 0. The paper has fewer throughout."
    )
    columns = ("pair", "text", "difference", "fewer in", "verdict")
    return Table("What the paper compares", columns, grouped_rows(rows, once=True), (note,))
