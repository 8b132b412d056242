import csv
import html
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from pydantic import TypeAdapter
from rich.console import Console

from experiments.conftest import asked
from pathspace.experiments.compare import Comparison, Row, compare
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.recipes import PaperProtocol, Published, PublishedResult
from pathspace.experiments.report import (
    Table,
    TableRow,
    print_report,
    print_table,
    published_section,
    saved,
    set_log_axis,
    set_rate_axis,
    write_report,
)
from pathspace.experiments.report.claim import draw_claim
from pathspace.experiments.report.comparison import (
    as_json,
    comparison_report,
    conclusion,
    pairs_of,
    pairs_table,
)
from pathspace.experiments.report.curves import (
    KINDS,
    WINDOWS,
    _draw_starts,
    averaged,
    draw_curves,
    draw_errors,
    kinds_of_error,
    steps_per_epoch,
)
from pathspace.experiments.report.table import build_table, difference_label, error_label, notes
from pathspace.experiments.run import Epoch, RunResult, Validation
from pathspace.experiments.runner import Runs
from pathspace.experiments.settings import Settings

PUBLISHED = Published(
    "A paper <2016>.",
    "After 400 epochs.",
    (
        PublishedResult("theirs", 0.125, "path-sgd", {"length": 6}),
        PublishedResult("theirs, longer", 0.5, "path-sgd", {"length": 60}),
        PublishedResult("another's", 0.25, printed="0.250"),
        PublishedResult("a third one's", None),
    ),
    (
        PaperProtocol(seeds=9, task_options={"length": 60}),
        PaperProtocol(train_size=256, epochs=400),
    ),
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    from experiments.conftest import TINY

    settings = asked({**TINY, "learning_rates": [0.03, 1e9]})
    return compare(settings, Runs(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def output(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write(comparison, folder, title="Two <starts>", published=PUBLISHED)
    return folder


def write(
    comparison: Comparison, folder: Path, title: str = "", published: Published | None = None
) -> Path:
    configuration = Configuration("compare", title, comparison.settings).as_dict()
    report = comparison_report(
        comparison, title=title, configuration=configuration, published=published
    )
    return write_report(report, folder)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_says_what_the_runs_gave(comparison: Comparison) -> None:
    table = build_table(comparison)
    assert table.columns[:4] == ("optimizer", "start", "rate", "test mean squared error")
    for words, row in zip(table.rows, comparison.rows, strict=True):
        assert words.cells[1].startswith(row.start)
        assert words.cells[2].rstrip("*") == f"{row.learning_rate:g}"
        if row.mean_test_error is not None:
            assert float(words.cells[3].split(" ± ")[0]) == pytest.approx(
                row.mean_test_error, rel=0.01
            )
    path = next(
        words
        for words, row in zip(table.rows, comparison.rows, strict=True)
        if row.difference == 0.0
    )
    assert path.cells[-2:] == ("yes", "0.0")
    assert path.marks[5] == path.marks[6] == "same"
    text = " ".join(table.notes)
    assert "validation split" in text
    assert "0.03, 1e+09" in text
    assert "between 2^-5 and 2^5" in text
    assert "* at the edge of the grid" in text


def test_published_numbers_stand_beside_the_same_method_and_options(comparison: Comparison) -> None:
    table = build_table(comparison, PUBLISHED)
    beside = {(row.cells[0], row.cells[1]): row.cells[-1] for row in table.rows}
    assert beside["Path-SGD", "balanced"] == "0.125"
    assert beside["Path-SGD", "rescaled"] == "–"  # noqa: RUF001
    assert beside["SGD", "balanced"] == "–"  # noqa: RUF001


def test_the_published_column_says_how_much_of_the_paper_s_protocol_ours_has(
    comparison: Comparison,
) -> None:
    # 64 of 256 sequences, two of 400 epochs; the first protocol is for another length, and seeds
    # are not given
    title = build_table(comparison, PUBLISHED).columns[-1]
    assert title.split("\n") == [
        "published;",
        "ours has",
        "25 % of its data",
        "2 of 400 epochs",
        "2 of ? seeds",
    ]
    unknown = build_table(comparison, replace(PUBLISHED, protocols=())).columns[-1]
    assert unknown.split("\n")[2:4] == ["its data: not given", "2 of ? epochs"]


@pytest.mark.usefixtures("no_pictures")
def test_pairs_of_a_paper_have_differences_paired_by_seeds(
    comparison: Comparison, tmp_path: Path
) -> None:
    def row(method: str, errors: Sequence[float]) -> Row:
        own = next(r for r in comparison.rows if (r.method, r.start) == (method, "balanced"))
        runs = tuple(replace(own.runs[0], test_error=error) for error in errors)
        return replace(own, runs=runs)

    both = replace(
        comparison, rows=(row("path-sgd", (0.1, 0.5, 0.3)), row("sgd", (0.2, 0.7, 0.35)))
    )
    numbers = (
        PublishedResult("theirs", 1.75, "path-sgd", printed="1.75"),
        PublishedResult("plain", 1.80, "sgd", printed="1.80"),
    )
    protocols = (PaperProtocol(epochs=8),)  # a quarter of which are the two of ours
    paper = Published("A paper.", "", numbers, protocols, (("path-sgd", "sgd"), ("g-sgd", "sgd")))
    (pair,) = pairs_of(both, paper)  # G-SGD did not run
    # -0.1, -0.2, -0.05: deviation 0.07638; 4.30265 is the quantile of Student's t, two degrees of
    # freedom
    assert pair.difference is not None
    assert pair.difference.mean == pytest.approx(-0.35 / 3)
    assert pair.difference.half == pytest.approx(4.30265 * 0.0763763 / 3**0.5, rel=1e-5)
    assert str(pair.published) == "-0.05"
    assert pair.verdict == "not decided"  # the interval reaches from -0.31 to 0.07

    apart = replace(
        comparison, rows=(row("path-sgd", (0.1, 0.5, 0.3)), row("sgd", (0.2, 0.61, 0.41)))
    )
    assert [pair.verdict for pair in pairs_of(apart, paper)] == ["confirmed"]
    other_way = replace(paper, results=(numbers[0], replace(numbers[1], value=1.7, printed="1.70")))
    assert [pair.verdict for pair in pairs_of(apart, other_way)] == ["refuted"]
    for longer in (PaperProtocol(epochs=9), PaperProtocol()):
        assert [p.verdict for p in pairs_of(apart, replace(paper, protocols=(longer,)))] == [
            "not decided"
        ]
    (unknown,) = pairs_of(apart, replace(paper, results=numbers[:1]))
    assert (unknown.published, unknown.verdict) == (None, None)
    lost = replace(apart.rows[1].runs[1], diverged_at=1, test_error=None)
    gone = replace(apart.rows[1], runs=(apart.rows[1].runs[0], lost, apart.rows[1].runs[2]))
    (failed,) = pairs_of(replace(apart, rows=(apart.rows[0], gone)), paper)
    assert (failed.difference, failed.verdict) == (None, "not decided")
    assert pairs_of(apart, None) == []
    printed = replace(apart.rows[0], method="path-sgd-published")
    (raw,) = pairs_of(replace(apart, rows=(printed, apart.rows[1])), paper)
    assert (raw.first.method, str(raw.published), raw.verdict) == (
        "path-sgd-published",
        "-0.05",
        "confirmed",
    )

    (words,) = pairs_table(both, [pair]).rows
    assert words.cells == ("Path-SGD against SGD", "-1.17e-01 ± 1.90e-01", "-0.05", "not decided")
    page = write(both, tmp_path, published=paper)
    assert "What the paper compares" in page.read_text(encoding="utf-8")
    (line,) = read_csv(tmp_path / "pairs.csv")
    assert line["verdict"] == "not decided"
    (value,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["pairs"]
    assert value["difference"] == pair.difference.mean
    assert (value["first"], value["seeds"], value["published"]) == ("path-sgd", 3, -0.05)


def test_divergence_and_differences_in_words(comparison: Comparison) -> None:
    row = comparison.rows[0]
    gone = replace(row.runs[0], diverged_at=1, test_error=None)
    assert error_label(comparison, replace(row, runs=(gone, gone))) == "diverged"
    assert error_label(comparison, replace(row, runs=(gone, row.runs[1]))) == "diverged (1 of 2)"
    labels = [difference_label(value) for value in (None, 0.0, 1e-300, 0.1234, float("inf"))]
    assert labels == ["–", "0.0", "1e-300", "0.12", "one diverged"]  # noqa: RUF001


@pytest.mark.parametrize("columns", [40, 120])
def test_a_table_wider_than_its_console_keeps_names_and_numbers(columns: int) -> None:
    names = (
        "optimizer",
        "start",
        *(f"model_options.number_{index}" for index in range(8)),
        "reason",
    )
    row = TableRow(
        ("Path-SGD", "balanced", *map(str, range(1000, 1008)), "so it was " * 30), {}, True
    )
    stream = io.StringIO()
    print_table(Table("Many columns", names, (row,), ()), Console(file=stream, width=columns))
    for word in (*names, *row.cells[:-1]):
        assert word in stream.getvalue()
    assert stream.getvalue().split().count("was") == 30


def test_the_terminal_shows_every_row_and_note(comparison: Comparison) -> None:
    console = Console(width=200, file=io.StringIO())
    print_table(build_table(comparison, PUBLISHED), console)
    print_table(published_section(PUBLISHED).table, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in (
        "SGD",
        "Path-SGD",
        "balanced once, then Adam",
        "rescaled",
        "validation split",
        "another's",
        "0.250",
        "a third one's",
        "not given",
        "25 % of its data",
    ):
        assert word in text


class Links(HTMLParser):
    """Collects what a page would load and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if (
                name in ("src", "href", "xlink:href")
                and value
                and not value.startswith(("#", "data:"))
            ):
                self.loads.append(value)


def script_and_style(page: str) -> str:
    return " ".join(re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.S))


def test_the_page_is_complete_and_needs_nothing_else(output: Path, comparison: Comparison) -> None:
    page = (output / "report.html").read_text(encoding="utf-8")
    parser = Links()
    parser.feed(page)
    assert parser.loads == []
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(parser.tags)
    assert parser.tags.count("script") == parser.tags.count("link") == 1
    # nothing may be fetched, whatever the rest of the page says
    assert "default-src 'none'" in page
    assert not re.search(
        r"fetch\(|XMLHttpRequest|import\b|WebSocket|sendBeacon|@import|url\(",
        script_and_style(page),
    )
    assert {"svg", "table"} <= set(parser.tags)
    assert "Two &lt;starts&gt;" in page
    assert "A paper &lt;2016&gt;." in page
    text = html.unescape(page)
    for row in build_table(comparison, PUBLISHED).rows:
        for cell in row.cells:
            assert cell in text
    for note in build_table(comparison, PUBLISHED).notes:
        assert note in text
    assert '"learning_rates": [' in text


def test_the_page_begins_with_the_conclusion_and_folds_the_configuration(
    output: Path, comparison: Comparison
) -> None:
    text = html.unescape((output / "report.html").read_text(encoding="utf-8"))
    sentences = conclusion(comparison)
    assert sentences
    for sentence in sentences:
        assert f"<p>{sentence}</p>" in text
        assert text.index(sentence) < text.index("<h2>Results</h2>")
    assert "<details><summary>" in text
    assert "<details open" not in text
    assert json.loads((output / "results.json").read_text())["conclusion"] == list(sentences)


def test_what_is_printed_is_what_is_written(
    output: Path, comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    report = comparison_report(
        comparison, title="", configuration={"versions": {}}, published=PUBLISHED
    )
    print_report(report, output)
    printed = " ".join(capsys.readouterr().out.split())
    for sentence in (*report.notes, f"Report: {output / 'report.html'}"):
        assert sentence in printed
    for section in report.sections:
        for note in section.table.notes:
            assert note in printed
    print_report(report, output, as_json=True)
    assert (
        json.loads(capsys.readouterr().out)["rows"]
        == json.loads((output / "results.json").read_text())["rows"]
    )
    known = set(json.loads((output / ".report.json").read_text()))
    assert known == {path.name for path in output.iterdir()} - {".report.json"}


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_columns_sort_by_number_with_failures_last(output: Path) -> None:
    page = (output / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    functions = script[: script.index("for (const table")]
    code = (
        functions
        + """
        const cells = ["10.00 ± 1", "diverged", "9.5", "\u2013", "1e-3", "yes", "no", "4.6e+03"];
        const sorted = sign => cells.slice().sort((a, b) => compareKeys(sortKey(a), sortKey(b), sign));
        console.log(JSON.stringify([sorted(1), sorted(-1)]));
        new Function(process.argv[1]);
        """
    )
    done = subprocess.run(["node", "-e", code, script], capture_output=True, text=True, check=True)
    rising, falling = json.loads(done.stdout)
    assert rising[:6] == ["1e-3", "9.5", "10.00 ± 1", "4.6e+03", "no", "yes"]
    assert falling[:6] == rising[:6][::-1]
    assert set(rising[6:]) == set(falling[6:]) == {"diverged", "–"}  # noqa: RUF001


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_clicks_sort_the_table(output: Path) -> None:
    page = (output / "report.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    program = Path(__file__).with_name("page.js")
    done = subprocess.run(
        ["node", program], input=script, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [
        ["ascending", ["Path-SGD", "SGD", "Muon", "Adam"], True],
        ["descending", ["Muon", "SGD", "Path-SGD", "Adam"], True],
        ["none", ["SGD", "Adam", "Path-SGD", "Muon"], False],
    ]


def with_errors(row: Row, *errors: float | None) -> Row:
    runs = tuple(
        replace(row.runs[0], test_error=error, diverged_at=3 if error is None else None)
        for error in errors
    )
    return replace(row, runs=runs)


def test_nothing_is_better_where_intervals_overlap(comparison: Comparison) -> None:
    settings = replace(
        comparison.settings,
        starts=("balanced",),
        methods=("sgd", "path-sgd", "balanced-adam"),
        seeds=3,
    )
    first = comparison.rows[0]
    named = [replace(first, method=name, difference=None) for name in settings.methods]

    def of(*errors: tuple[float | None, ...]) -> Comparison:
        rows = tuple(with_errors(row, *values) for row, values in zip(named, errors, strict=True))
        return replace(comparison, settings=settings, rows=rows)

    near = of((1.0, 1.1, 1.2), (1.1, 1.2, 1.3), (1.0, 1.2, 1.3))
    (sentence,) = conclusion(near)
    assert "SGD has the least mean test error" in sentence
    assert (
        "not told apart from it (the 95 % intervals overlap): Path-SGD, balanced once, then Adam"
        in sentence
    )
    assert "worse" not in sentence
    assert all(not row.marks for row in build_table(near).rows)

    apart = of((9.0, 9.1, 9.2), (1.0, 1.1, 1.2), (None, 1.0, 1.0))
    (sentence,) = conclusion(apart)
    assert "Path-SGD has the least mean test error" in sentence
    assert "worse (the intervals lie apart): SGD; diverged: balanced once, then Adam." in sentence
    assert [row.marks[2] for row in build_table(apart).rows] == ["bad", "good", "bad"]
    assert "better" not in sentence

    (sentence,) = conclusion(of((None,) * 3, (None,) * 3, (None,) * 3))
    assert sentence == "From the balanced start every method has a run that diverged."


def test_a_single_seed_has_no_interval_that_overlaps(comparison: Comparison) -> None:
    settings = replace(
        comparison.settings, starts=("balanced",), methods=("sgd", "path-sgd"), seeds=1
    )
    first = comparison.rows[0]
    rows = tuple(
        with_errors(replace(first, method=name, difference=None), error)
        for name, error in (("sgd", 1.0), ("path-sgd", 2.0))
    )
    (sentence,) = conclusion(replace(comparison, settings=settings, rows=rows))
    assert sentence.endswith(
        "; a single seed has no interval, so the others are not told apart from it."
    )
    assert "overlap" not in sentence


def test_same_and_good_are_told_apart(comparison: Comparison) -> None:
    """The worst row of all may be the same from every start."""
    rows = []
    for row in comparison.rows:
        errors = (9.0, 9.1) if row.method == "path-sgd" else (1.0, 1.1)
        rows.append(with_errors(row, *errors))
    table = build_table(replace(comparison, rows=tuple(rows)))
    (path,) = (row for row in table.rows if row.cells[:2] == ("Path-SGD", "rescaled"))
    assert path.marks[3] == "bad"
    assert path.marks[5] == path.marks[6] == "same"
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system="standard")
    print_table(table, console)
    (line,) = (
        line
        for line in console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        if "9.05" in line and "yes" in line
    )
    assert "\x1b[31m9.05" in line
    assert "\x1b[36myes" in line


def test_the_figure_is_a_png_of_readable_size(output: Path) -> None:
    content = (output / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 500


@pytest.mark.slow
def test_a_matplotlibrc_that_asks_for_latex_changes_no_figure(comparison: Comparison) -> None:
    with mpl.rc_context({"text.usetex": True, "font.size": 30}):
        png, _ = saved(lambda: draw_claim([comparison]))
        assert mpl.rcParams["text.usetex"]
    assert png == saved(lambda: draw_claim([comparison]))[0]
    file = Path(saved.__code__.co_filename)
    sources = file.parents[1].rglob("*.py")
    assert [path for path in sources if "rc_context" in path.read_text("utf-8")] == [file]


def test_a_start_is_drawn_alike_whether_another_one_has_a_rate_of_its_own_or_not(
    comparison: Comparison,
) -> None:
    starts = ("balanced", "rescaled", "default")
    rows, choices = [], {}
    for method, own in (("sgd", True), ("path-sgd", False)):
        first = next(row for row in comparison.rows if row.method == method)
        one = {start: replace(first, start=start) for start in starts}
        rows += [one["balanced"], one["rescaled"]]
        rows += [replace(one["rescaled"], rate_chosen_from="rescaled")] * own
        rows += [one["default"]]
        choices |= {(method, start): comparison.choices[method, "balanced"] for start in starts}
    settings = replace(comparison.settings, methods=("sgd", "path-sgd"), starts=starts)
    figure = Figure()
    _draw_starts(figure, replace(comparison, settings=settings, rows=tuple(rows), choices=choices))
    drawn = {
        (line.get_label(), line.get_color()) for axis in figure.axes[:2] for line in axis.lines
    }
    named = {label: colour for label, colour in drawn if not str(label).startswith("_")}
    assert set(named) == {*starts, "rescaled, own rate"}
    assert (
        len(set(named.values()))
        == len([1 for label, _ in drawn if not str(label).startswith("_")])
        == 4
    )


@pytest.mark.slow
def test_one_start_puts_all_methods_into_one_panel(comparison: Comparison) -> None:
    settings = replace(comparison.settings, starts=("balanced",))
    rows = tuple(row for row in comparison.rows if row.start == "balanced")
    choices = {key: choice for key, choice in comparison.choices.items() if key[1] == "balanced"}
    single = replace(comparison, settings=settings, rows=rows, choices=choices)
    content, element = saved(lambda: draw_curves(single))
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert 1000 < width < 3 * height
    assert element.startswith("<svg")
    # losses over steps, errors over rates, training, validation and test errors over epochs
    assert len(re.findall(r'id="axes_\d+"', element)) == 5
    assert len(re.findall(r'id="legend_1"', element)) == 1


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ((0.001, 0.0003, 0.003), ["0.0003", "0.001", "0.003"]),
        ([0.1], ["0.1"]),
        ([1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0], ["1e-05", "0.001", "0.1", "10"]),
    ],
)
def test_an_axis_of_rates_names_rates_of_the_grid(rates: Sequence[float], shown: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axis = figure.subplots()
    axis.plot(rates, rates)
    set_rate_axis(axis, rates)
    figure.draw_without_rendering()
    labels = [tick.label1 for tick in axis.xaxis.get_major_ticks()]
    assert [label.get_text() for label in labels] == shown
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert not axis.xaxis.get_minor_ticks()
    low, high = axis.get_xlim()
    assert low < min(rates) <= max(rates) < high


@pytest.mark.parametrize(
    ("values", "some"),
    [
        ((1.38, 2.1), "1.8"),
        ((284.0, 402.0), "300"),
        ((0.6, 4.0), "1"),
        ((0.3, 9.0), "0.5"),
        ((1e-4, 0.2), "$\\mathdefault{10^{-3}}$"),
    ],
)
@pytest.mark.sample(3)
def test_an_axis_of_errors_has_numbers_as_they_are_written(
    values: tuple[float, float], some: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axis = figure.subplots()
    axis.plot(values)
    set_log_axis(axis)
    figure.draw_without_rendering()
    low, high = axis.get_ylim()
    ticks = [tick for tick in axis.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    labels = [tick.label1.get_text() for tick in ticks]
    assert some in labels
    assert len(set(labels)) == len(labels) > 1
    small = [tick.label1.get_text() for tick in axis.yaxis.get_minor_ticks()]
    assert not any(small)


def test_errors_are_drawn_over_epochs_with_the_test_error_at_the_end(
    comparison: Comparison,
) -> None:
    from matplotlib.figure import Figure

    row = next(row for row in comparison.rows if not row.diverged)
    axis = Figure().subplots()
    epoch = steps_per_epoch(comparison)
    draw_errors(axis, row, epoch, color="black")
    line, dot = (np.asarray(drawn.get_xydata()) for drawn in axis.get_lines())
    # before training, and after each of two epochs
    assert line[:, 0].tolist() == [0.0, 1.0, 2.0]
    means = [np.mean([run.validations[i].error for run in row.runs]) for i in range(3)]
    assert line[:, 1].tolist() == pytest.approx(means)
    assert dot.tolist() == [[2.0, row.mean_test_error]]
    for kind in ("training", "test"):
        other = Figure().subplots()
        draw_errors(other, row, epoch, kind, color="black")
        (drawn,) = (np.asarray(one.get_xydata()) for one in other.get_lines())
        assert drawn[:, 0].tolist() == [1.0, 2.0]
        means = [np.mean([getattr(run.epochs[i], kind) for run in row.runs]) for i in range(2)]
        assert drawn[:, 1].tolist() == pytest.approx(means)
    gone = replace(
        row, runs=tuple(replace(run, diverged_at=1, test_error=None) for run in row.runs)
    )
    without = Figure().subplots()
    draw_errors(without, gone, epoch, color="black")
    assert len(without.get_lines()) == 1  # no dot
    once = replace(row, runs=tuple(replace(run, epochs=run.epochs[:1]) for run in row.runs))
    single = Figure().subplots()
    draw_errors(single, once, epoch, "test", color="black")
    assert single.get_lines()[0].get_marker() == "o"  # a line of one point shows nothing


def test_a_diverging_run_does_not_set_the_limits(comparison: Comparison) -> None:
    row = comparison.rows[0]
    wild = replace(row.runs[0], losses=(1.0, *row.runs[0].losses[1:-1], 1e20))
    changed = replace(
        comparison, rows=(replace(row, runs=(wild, *row.runs[1:])), *comparison.rows[1:])
    )
    figure = Figure()
    _draw_starts(figure, changed)
    assert 1.0 < figure.axes[0].get_ylim()[1] < 100


def test_the_curves_are_written_to_the_last_bit(output: Path, comparison: Comparison) -> None:
    lines = read_csv(output / "curves.csv")
    runs = [run for row in comparison.rows for run in row.runs]
    assert [float(line["training_loss"]) for line in lines] == [
        loss for run in runs for loss in run.losses
    ]
    validation = read_csv(output / "validation.csv")
    assert [float(line["validation_error"]) for line in validation] == [
        entry.error for run in runs for entry in run.validations
    ]
    epochs = read_csv(output / "epochs.csv")
    for column, name in (("training_error", "training"), ("test_error", "test")):
        written = [getattr(entry, name) for run in runs for entry in run.epochs]
        assert [line[column] for line in epochs] == [
            "" if value is None else str(value) for value in written
        ]


def test_runs_that_ended_in_their_first_epoch_show_validation_alone(comparison: Comparison) -> None:
    rows = [
        replace(row, runs=tuple(replace(run, epochs=()) for run in row.runs))
        for row in comparison.rows
        if row.method == "sgd"
    ]
    settings = replace(comparison.settings, methods=("sgd",))
    ended = replace(comparison, settings=settings, rows=tuple(rows))
    assert (kinds_of_error(comparison), kinds_of_error(ended)) == (list(KINDS), ["validation"])
    figure = Figure()
    _draw_starts(figure, ended)
    assert len(figure.axes) == 3  # its losses, its errors, its choice of a rate


def test_all_runs_are_listed_with_their_purpose(output: Path, comparison: Comparison) -> None:
    lines = read_csv(output / "runs.csv")
    tuning = [line for line in lines if line["purpose"] == "validation"]
    final = [line for line in lines if line["purpose"] == "result"]
    assert len(tuning) == len(comparison.tuning)
    assert len(final) == sum(len(row.runs) for row in comparison.rows)
    assert all(line["test_error"] == "" for line in tuning)
    assert any(line["diverged_at"] for line in tuning)


@pytest.mark.usefixtures("no_pictures")
def test_errors_that_are_not_finite_are_empty_cells_as_they_are_after_a_resume(
    comparison: Comparison, tmp_path: Path
) -> None:
    validations, epochs = (Validation(0, math.inf, math.nan),), (Epoch(4, math.inf, math.inf),)
    run = replace(comparison.rows[0].runs[0], validations=validations, epochs=epochs, diverged_at=4)
    for name, each in (
        ("new", run),
        ("resumed", TypeAdapter(RunResult).validate_python(run.as_dict())),
    ):
        row = replace(comparison.rows[0], runs=(each,) * 2)
        (tmp_path / name).mkdir()
        write(replace(comparison, rows=(row,)), tmp_path / name)
    for file in "runs.csv", "validation.csv", "epochs.csv":
        assert (tmp_path / "new" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()
    assert read_csv(tmp_path / "new" / "validation.csv")[0]["validation_loss"] == ""


def test_the_table_is_written_as_it_is_shown(output: Path, comparison: Comparison) -> None:
    with (output / "table.csv").open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    table = build_table(comparison, PUBLISHED)
    assert columns == [title.replace("\n", " ") for title in table.columns]
    assert [tuple(row) for row in rows] == [row.cells for row in table.rows]


def test_json_holds_the_rows_the_choices_and_the_configuration(
    output: Path, comparison: Comparison
) -> None:
    content = json.loads((output / "results.json").read_text())
    assert len(content["rows"]) == len(comparison.rows)
    for values, row in zip(content["rows"], comparison.rows, strict=True):
        assert values["test_error_mean"] == row.mean_test_error
        assert values["same_curve"] == (None if row.difference is None else row.difference == 0.0)
    assert {choice["method"] for choice in content["learning_rates"]} == set(
        comparison.settings.methods
    )
    configuration = content["configuration"]
    assert configuration["settings"]["threads"] == 1
    assert configuration["seeds"] == [0, 1]
    assert re.fullmatch(r"\d+\.\d+.*", configuration["versions"]["torch"])
    assert configuration["versions"]["pathspace"]
    assert content["published"]["results"][0]["value"] == 0.125


def test_an_infinite_difference_is_null_in_json(comparison: Comparison) -> None:
    rows = (comparison.rows[0], replace(comparison.rows[1], difference=float("inf")))
    content = as_json(replace(comparison, rows=rows), {})
    assert content["rows"][1]["largest_difference"] is None
    assert content["rows"][1]["same_curve"] is False
    json.dumps(content, allow_nan=False)


def test_curves_are_averaged_over_windows_and_stop_where_a_run_diverged(
    tiny_settings: Callable[..., Settings],
) -> None:
    config = tiny_settings().run_config("sgd", "balanced", 0.1, 0, evaluate_test=True)
    start = (Validation(0, 1.0, 1.0),)
    whole = RunResult(config, (2.0,) * 600, start, 1.0, None, 1.0)
    short = RunResult(config, (2.0, 8.0), start, None, 2, 1.0)
    steps, means = averaged([whole, short])
    assert means.shape == (2, WINDOWS)
    assert np.allclose(means[0], 2.0)
    assert means[1, 0] == pytest.approx(4.0)  # the geometric mean
    assert np.isnan(means[1, 1:]).all()
    assert steps[0] == 5.0


def test_epochs_are_counted_in_their_steps_where_every_run_diverged(comparison: Comparison) -> None:
    run = comparison.rows[0].runs[0]
    short = replace(
        run, losses=(1.0,) * 90, epochs=(Epoch(37, 1.0, 1.0), Epoch(74, 1.0, 1.0)), diverged_at=90
    )
    lost = replace(comparison, rows=(replace(comparison.rows[0], runs=(short,)),))
    assert steps_per_epoch(lost) == 37


@pytest.mark.slow
def test_a_report_of_runs_that_all_diverged_at_once_can_be_drawn(
    comparison: Comparison, tmp_path: Path
) -> None:
    gone = [
        replace(run, losses=(), diverged_at=0, test_error=None) for run in comparison.rows[0].runs
    ]
    settings = replace(comparison.settings, methods=("sgd",))
    rows = [
        Row("sgd", start, 0.1, "balanced", tuple(gone), None if start == "balanced" else 0.0)
        for start in settings.starts
    ]
    write(replace(comparison, settings=settings, rows=tuple(rows)), tmp_path, "Nothing")
    assert (tmp_path / "report.html").exists()


def test_of_a_single_run_no_decay_is_said_to_be_chosen(comparison: Comparison) -> None:
    decayed = replace(comparison, settings=replace(comparison.settings, weight_decays=(0.1,)))
    assert "Weight decays, chosen along with the rates: 0.1." in notes(decayed)
    assert "Weight decays" not in " ".join(notes(replace(decayed, choices={}, tuning=())))


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_single_tuning_seed_has_no_standard_error(comparison: Comparison, seeds: int) -> None:
    settings = replace(comparison.settings, tuning="one standard error", tuning_seeds=seeds)
    text = " ".join(notes(replace(comparison, settings=settings)))
    assert ("least rate within one standard error" in text) == (seeds > 1)


@pytest.mark.parametrize(
    ("epochs", "told"), [(0, "runs of 2 epochs"), (1, "shorter runs of 1 epoch")]
)
def test_the_runs_that_showed_others_equal_are_as_long_as_is_said(
    comparison: Comparison, epochs: int, told: str
) -> None:
    settings = replace(comparison.settings, verified_seeds=1, tuning_epochs=epochs)
    said = f"Runs that a symmetry makes equal were done once, after {told} had shown that they are equal."
    assert said in notes(replace(comparison, settings=settings))


def test_weights_are_stated_where_methods_train_other_models(comparison: Comparison) -> None:
    assert f"Weights: {6 * (2 + 6 + 2) + 7}." in build_table(comparison).notes
    counts = {"sgd": 1234, "path-sgd": 1234, "lstm-adam": 98765}
    text = " ".join(build_table(replace(comparison, weights=counts)).notes)
    assert "Weights: 1,234. LSTM, Adam: 98,765." in text


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("error, %", "1.23"),
        ("bits per character", "1.235"),
        ("perplexity", "1.2"),
        ("other", "1.23e+00"),
    ],
)
def test_errors_have_the_digits_of_their_metric(
    comparison: Comparison, metric: str, words: str
) -> None:
    row = next(row for row in comparison.rows if not row.diverged)
    one = replace(row, runs=(replace(row.runs[0], test_error=1.2346),))
    assert error_label(replace(comparison, metric=metric), one) == words


def test_a_grid_of_its_own_is_told_and_drawn(
    tiny_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = tiny_settings(
        starts=["balanced"],
        methods=["sgd", "path-sgd-published"],
        method_rates={"path-sgd-published": [1e-9, 1e-8]},
    )
    comparison = compare(settings, Runs(tmp_path))
    assert "A grid of its own, of as many rates, has: Path-SGD, as printed: 1e-09, 1e-08." in notes(
        comparison
    )
    draw_curves(comparison).draw_without_rendering()
    # the number of a rule as printed is the one that the paper prints for the rule
    assert [row.cells[-1] for row in build_table(comparison, PUBLISHED).rows] == ["–", "0.125"]  # noqa: RUF001
