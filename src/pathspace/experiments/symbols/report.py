"""The table of symbol sequences in words, its picture, and its files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from pathspace.experiments.report.page import Section, render
from pathspace.experiments.report.table import Published, Table, TableRow
from pathspace.experiments.storage import write_atomically, write_json, write_text
from pathspace.experiments.symbols.cells import Score, best
from pathspace.experiments.symbols.protocol import BASELINES, Protocol

PAGE, FIGURE = "report.html", "symbols.png"
NOTHING = "–"  # noqa: RUF001 (an en dash marks an empty cell)
BROKEN = "†"


def build_table(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> Table:
    """Put the scores into words.

    Args:
        protocol: How they were made.
        scores: Of all sizes.
        published: The numbers of the paper for each text, under the text's name: the best, and those of one row, named
            as the method.
    """
    chosen = best(scores)
    rows: list[TableRow] = []
    before = ""
    for row in protocol.rows:
        group, variant = ("baseline", row) if row in BASELINES else row.split(", ")
        found = [chosen[row, text] for text in protocol.texts]
        regrets = [f"{score.test:,.1f}{BROKEN * score.broke_off}" for score in found]
        sizes = "/".join(str(score.cell.size or NOTHING) for score in found)
        seconds = sum(score.seconds for score in scores if score.cell.row == row)
        shown = "" if group == before else group
        rows.append(TableRow((shown, variant, *regrets, sizes, f"{seconds:.0f}"), {}, bool(shown)))
        before = group
    broken = any(BROKEN in cell for row in rows for cell in row.cells)
    if published is not None:
        for name in dict.fromkeys(result.method for result in published.results):
            values = {
                result.label: f"{result.value:,.1f}"
                for result in published.results
                if result.method == name and result.value is not None
            }
            cells = (values.get(text, NOTHING) for text in protocol.texts)
            rows.append(
                TableRow(("" if name else "published", name or "the best", *cells, "", ""), {}, not name)
            )
    title = "Regret on a fresh text: bits beyond the true code length"
    columns = ("model", "variant", *protocol.texts, "size", "seconds")
    return Table(title, columns, tuple(rows), notes(protocol, published, broken=broken))


def notes(protocol: Protocol, published: Published | None, *, broken: bool = False) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the table."""
    passes = ", ".join(f"{text} {protocol.passes[text]}" for text in protocol.texts)
    units, states, depths = (
        ", ".join(map(str, v)) for v in (protocol.units, protocol.states, protocol.depths)
    )
    found = [
        "A training, a validation and a test text of the same length were drawn for each column. The validation text "
        f"stopped the training and chose the size (networks {units} units, HMM {states} states, contexts {depths}), "
        "and the test text was scored once. All rows have seen the training text.",
        f"Networks: {protocol.connectivity} edges leave a unit; at most so many passes: {passes}; "
        f"{_starts(protocol)}. The RNN takes the quasi-diagonal form of its metrics. Seconds: processor time of all "
        "sizes.",
    ]
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


def _starts(protocol: Protocol) -> str:
    starts = [protocol.restarts.get(text, 1) for text in protocol.texts]
    if max(starts) == 1:
        return "1 start of each size"
    told = ", ".join(f"{text} {count}" for text, count in zip(protocol.texts, starts, strict=True))
    heat = f", of which the better quarter went on after {protocol.heat} passes" if protocol.heat else ""
    return f"starts of each size: {told}{heat}"


def print_table(table: Table, console: Console) -> None:
    """Print the table and its notes."""
    text = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(table.columns):
        text.add_column(title, justify="left" if index < 2 else "right", no_wrap=True)
    for row in table.rows:
        if row.begins_method and row is not table.rows[0]:
            text.add_section()
        text.add_row(*row.cells)
    console.print(text)
    for sentence in table.notes:
        console.print(sentence, style="dim", highlight=False)


def draw(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> tuple[bytes, str]:
    """Draw the regrets, one panel for each text; as PNG and as an SVG element."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    chosen = best(scores)
    colours = {"DH+FB": "#b3400e", "QDH+RUTSD": "#8ab6e6", "QDH+RBP": "#1f5f9e"}
    colours |= dict.fromkeys(BASELINES, "#9aa5b1")
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "pathspace", "svg.fonttype": "path"}):
        figure = Figure(
            figsize=(1.6 + 3.2 * len(protocol.texts), 0.9 + 0.28 * len(protocol.rows)), layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(protocol.texts), sharey=True, squeeze=False)[0]
        places = range(len(protocol.rows))[::-1]
        for axis, text in zip(axes, protocol.texts, strict=True):
            values = [max(chosen[row, text].test, 1.0) for row in protocol.rows]
            axis.barh(
                places, values, color=[colours[row.split(", ")[-1]] for row in protocol.rows], height=0.7
            )
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
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=160)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    drawn = svg.getvalue()
    return png.getvalue(), drawn[drawn.index("<svg") :]


def as_json(
    protocol: Protocol, scores: Sequence[Score], configuration: dict[str, Any], published: Published | None
) -> dict[str, Any]:
    """Return all numbers as plain values."""
    chosen = best(scores)
    return {
        "unit": "bits beyond the true code length",
        "rows": [
            {
                "row": row,
                "text": text,
                "size": chosen[row, text].cell.size,
                "test": chosen[row, text].test,
                "validation": chosen[row, text].validation,
            }
            for row in protocol.rows
            for text in protocol.texts
        ],
        "scores": [score.as_dict() for score in scores],
        "published": None
        if published is None
        else {
            "source": published.source,
            "results": [{"text": r.label, "row": r.method, "value": r.value} for r in published.results],
        },
        "configuration": configuration,
    }


def write_report(
    protocol: Protocol,
    scores: Sequence[Score],
    output: Path,
    *,
    title: str,
    configuration: dict[str, Any],
    published: Published | None,
) -> Table:
    """Write `symbols.png`, `table.csv`, `results.json` and `report.html`; returns the table."""
    table = build_table(protocol, scores, published)
    png, svg = draw(protocol, scores, published)
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(row.cells for row in table.rows)
    write_atomically(output / FIGURE, lambda file: file.write(png))
    write_text(output / "table.csv", lines.getvalue())
    write_json(output / "results.json", as_json(protocol, scores, configuration, published))
    # The page last: who finds it finds the rest.
    write_text(output / PAGE, render(title, [Section("Results", table, svg)], configuration, None))
    return table
