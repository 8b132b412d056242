"""A report of any command: its tables, figures and numbers, and one function for each place where they are shown.

`print_report` shows it on a terminal, `write_report` writes its files: a page that needs nothing
else, figures, tables as CSV and numbers as JSON. Which files these are follows from the report;
`REPORT_FILES` keeps their names in the folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from pathspace.experiments.context import PAGE, REPORT_FILES
from pathspace.experiments.recipes import Published
from pathspace.experiments.storage import as_csv, as_json, write_bytes
from pathspace.experiments.terminal import output_console, print_json, print_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


# Colours that differ to colour-blind eyes too (Okabe and Ito), and as many more as the recipe with
# most methods needs.
LINE_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31", "#7f7f7f", "#5e3c99",
    "#7fbc41", "#a50026", "#01665e", "#b7a7e0", "#d6c600",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "pathspace",
    "svg.fonttype": "path",
}


def saved(draw: Callable[[], Drawing]) -> tuple[bytes, str]:
    """Draw a figure; returns it as a PNG file, and as an SVG element to stand in a page.

    It is drawn with Matplotlib's defaults and `STYLE`, whatever `matplotlibrc` says: LaTeX may be
    missing there.
    """
    import matplotlib as mpl

    png = io.BytesIO()
    svg = io.StringIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = draw()
        figure.savefig(png, format="png", dpi=160)
        # Both have the places that the PNG's layout found: to look for them takes as long as to
        # draw.
        figure.set_layout_engine("none")
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]


def panels(size: tuple[float, float], columns: int, **options: Any) -> tuple[Drawing, Any]:
    """Return a figure of a size in inches, and the axes of its one row."""
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window, and no state that outlives the call.
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def set_rate_axis(axis: Axes, rates: Collection[float], most: int = 6) -> None:
    """Make the horizontal axis one of learning rates, with ticks at those that were tried.

    Of more than `most` rates every second, third ... has one.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    # The limits first: a grid of one rate leaves nothing for the scale to adapt to.
    axis.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(sorted(set(rates)), nbins=most))
    axis.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axis.xaxis.set_minor_locator(NullLocator())


def set_log_axis(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers as they are written where it spans less than two decades."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:  # by default 2 is written as 2 x 10^0, and there may be one tick or none
        axis.yaxis.set_major_locator(
            AutoLocator() if high < 5 * low else LogLocator(subs=(1.0, 2.0, 5.0))
        )
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def mark_lost(axis: Axes, places: Sequence[float], number: int, mark: str, colour: Any) -> None:
    """Mark what has no error to be drawn at, as it diverged, at the upper edge; the first number is above."""
    height = [0.98 - 0.025 * number] * len(places)
    edge = axis.get_xaxis_transform()
    axis.plot(places, height, mark, markersize=5, transform=edge, color=colour)


# Columns that hold no numbers.
WORDS = {
    "optimizer", "start", "metric", "method", "model", "variant", "pair", "text", "verdict", "reason", "measure", "use",
}  # fmt: skip
REASON = 40  # columns of a sentence, at least
NOTHING = "–"  # noqa: RUF001 (an en dash marks an empty cell)
COLOURS = {"same": "cyan", "differs": "magenta", "good": "green", "bad": "red"}
LEGEND = {
    "same": "the same curve as from the first start, to the last bit",
    "differs": "another curve",
    "good": "error not told apart from the best, or below the best baseline",
    "bad": "error above it, intervals apart, or diverged",
}


@dataclass(frozen=True)
class TableRow:
    """One row in words.

    Attributes:
        cells: One for each column.
        marks: By the number of a cell, what its colour says: `"same"` or `"differs"`, of a curve;
            `"good"` or `"bad"`, of an error. The two are told apart: a curve that is the same from
            every start may be a bad one.
        begins_method: Whether the name of the method is shown.
    """

    cells: tuple[str, ...]
    marks: Mapping[int, str] = field(default_factory=dict)
    begins_method: bool = True


@dataclass(frozen=True)
class Table:
    """Column titles, rows, and the sentences that belong below them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lines:
    """Numbers for a CSV file, with the names of their columns."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]


@dataclass(frozen=True)
class Figure:
    """The name of a PNG file, and the function that draws it."""

    file: str
    draw: Callable[[], Drawing]


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        heading: The title of the section on the page.
        table: Its table.
        file: The CSV file of the table, in the words that are shown; empty for none.
        figure: A figure below the table.
        samples: Texts below the figure, each with its heading.
        numbers: By name of a CSV or JSON file, more numbers.
        printed: Whether the table is shown on a terminal, too.
    """

    heading: str
    table: Table
    file: str = ""
    figure: Figure | None = None
    samples: tuple[tuple[str, str], ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    printed: bool = True


@dataclass(frozen=True)
class Report:
    """The findings of a command, to be printed and written.

    Attributes:
        title: The headline of the page.
        sections: The most important first.
        configuration: The exact configuration, printed at the end of the page.
        results: The numbers for `results.json` and `--json`; None for a report that only brings
            others together.
        notes: The findings in sentences, on top of the page and below the tables of a terminal.
    """

    title: str
    sections: Sequence[Section]
    configuration: Mapping[str, Any]
    results: Mapping[str, Any] | None
    notes: Sequence[str] = ()


def grouped_rows(rows: Iterable[Iterable[str]], *, once: bool = False) -> tuple[TableRow, ...]:
    """Return rows of a table whose first cell names a group.

    A terminal shows the name in the first row of the group alone; files, too, if it stands there `once`.
    """
    found = []
    before = None
    for group, *cells in rows:
        begins = group != before
        before = group
        shown = group if begins or not once else ""
        found.append(TableRow((shown, *cells), begins_method=begins))
    return tuple(found)


def titled_table(
    title: str,
    rows: Sequence[Mapping[str, str]],
    notes: Iterable[str] = (),
    marks: Sequence[Mapping[str, str]] = (),
) -> Table:
    """Return a table of groups, from the cells of each row by the titles of the columns, and marks of some of them."""
    columns = tuple(rows[0]) if rows else ()
    cells = grouped_rows(row.values() for row in rows)
    if marks:
        by_place = [{columns.index(t): m for t, m in of.items() if t in columns} for of in marks]
        cells = tuple(replace(row, marks=of) for row, of in zip(cells, by_place, strict=True))
    return Table(title, columns, cells, tuple(notes))


def number_label(value: float | None, digits: str, spread: float | None = None) -> str:
    """Print a number, ± its spread where that is known; None as an empty cell."""
    if value is None:
        return NOTHING
    words = f"{value:{digits}}"
    return words if spread is None else f"{words} ± {spread:{digits.removeprefix('+')}}"


def lines_of(rows: Sequence[DataclassInstance]) -> Lines:
    """Return dataclasses of one kind as lines with the names of their fields."""
    names = [item.name for item in fields(rows[0])]
    return Lines(names, [[getattr(row, name) for name in names] for row in rows])


def published_section(published: Published) -> Section:
    """Return the numbers of a paper as a section of a report."""
    there = any(result.value is not None for result in published.results)
    rows = [TableRow((result.label, result.words)) for result in published.rows] if there else []
    title = "Published numbers"
    note = f"{published.source} {published.setting}"
    return Section(title, Table(title, ("method", "value"), tuple(rows), (note,)))


def write_report(report: Report, folder: Path) -> Path:
    """Write the files of a report into a folder, each of them complete or absent; returns the page.

    The page is the last one: a folder that has it has the other files.

    Raises:
        StorageError: A file cannot be written.
    """
    contents: dict[str, bytes] = {}
    drawings: list[str] = []
    for section in report.sections:
        if section.file:
            titles = [title.replace("\n", " ") for title in section.table.columns]
            contents[section.file] = as_csv(titles, (row.cells for row in section.table.rows))
        drawing = ""
        if section.figure is not None:
            contents[section.figure.file], drawing = saved(section.figure.draw)
        drawings.append(drawing)
        for name, numbers in section.numbers.items():
            lines = isinstance(numbers, Lines)
            contents[name] = as_csv(numbers.columns, numbers.rows) if lines else as_json(numbers)
    if report.results is not None:
        contents["results.json"] = as_json(report.results)
    contents[PAGE] = _page(report, drawings).encode()
    write_bytes(folder / REPORT_FILES, as_json(list(contents)))
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return folder / PAGE


def _page(report: Report, drawings: Sequence[str]) -> str:
    """Return the page: no font, picture or script but those within it, and no use of the network."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files("pathspace.experiments.report").joinpath("page.html.jinja")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        report=report,
        sections=[
            (section, drawing, _legend(section.table))
            for section, drawing in zip(report.sections, drawings, strict=True)
        ],
        safe=Markup,
        configuration=json.dumps(report.configuration, indent=2),
    )


def _legend(table: Table) -> dict[str, str]:
    used = {mark for row in table.rows for mark in row.marks.values()}
    return {mark: words for mark, words in LEGEND.items() if mark in used}


def print_report(report: Report, folder: Path, *, as_json: bool = False) -> None:
    """Show a report on standard output: its numbers as JSON, or its tables and where the page is."""
    if as_json:
        print_json(report.results)
        return
    console = output_console()
    for section in report.sections:
        if section.printed:
            print_table(section.table, console)
    for sentence in report.notes:
        console.print(sentence, highlight=False, markup=False)
    print_line(console, f"Report: {folder / PAGE}")


def print_table(table: Table, console: Console) -> None:
    """Print a table and its notes to a terminal or a pipe."""
    if table.rows:
        console.print(_rich_table(table, console.width), crop=False)
    else:
        console.print(table.title, highlight=False, markup=False)
    for sentence in table.notes:
        console.print(sentence, style="dim", highlight=False, markup=False)


def _rich_table(table: Table, room: int) -> RichTable:
    """Return a table for a terminal of so many columns; where that is too narrow, a wider one."""
    # Fewer lines than the default box, so that the table fits a narrow terminal.
    text = RichTable(
        title=escape(table.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index, title in enumerate(table.columns):
        text.add_column(
            title, justify="left" if title in WORDS else "right", no_wrap=not _wraps(index, title)
        )
    grouped = not all(row.begins_method for row in table.rows)
    for row in table.rows:
        if grouped and row.begins_method and row is not table.rows[0]:
            text.add_section()
        first, *others = _coloured(row)
        text.add_row(first if row.begins_method else "", *others)
    least = [_least_width(table, index) for index in range(len(table.columns))]
    whole = sum(least) + 2 * len(least) + 1  # a blank on either side of each, and the edge
    if room < whole:  # else columns would lose their ends, and names vanish
        text.width = whole
        for column, width in zip(text.columns, least, strict=True):
            column.width = width
    return text


def _coloured(row: TableRow) -> list[str]:
    cells = [escape(cell) for cell in row.cells]
    for place, mark in row.marks.items():
        cells[place] = f"[{COLOURS[mark]}]{cells[place]}[/]"
    return cells


def _wraps(index: int, title: str) -> bool:
    return index < 2 or title == "reason"


def _least_width(table: Table, index: int) -> int:
    """Return the width that a column must have: of its longest word if it wraps, or else of its longest line."""
    title = table.columns[index]
    text = "\n".join([title, *(row.cells[index] for row in table.rows)])
    parts = text.split() if _wraps(index, title) else text.splitlines()
    return max([REASON if title == "reason" else 0, *map(cell_len, parts)])
