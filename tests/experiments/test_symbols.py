"""The table of symbol sequences: who chooses, what is scored, and that it continues where it stopped."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import laid_over
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import load_recipe, parse_recipe
from pathspace.experiments.report.document import print_table, write_report
from pathspace.experiments.report.figures import saved
from pathspace.experiments.storage import write_checked
from pathspace.experiments.symbols.cells import (
    LOOKS,
    Cell,
    Score,
    best,
    cells,
    compute,
    shown,
    texts,
)
from pathspace.experiments.symbols.protocol import MERGED, ROWS, TEXTS, Protocol
from pathspace.experiments.symbols.report import (
    build_table,
    draw_over_time,
    pairs_of,
    pairs_table,
    report_of,
    samples,
    sizes_table,
)

pytest.importorskip("numba")
pytest.importorskip("hmmlearn")

TINY: dict[str, Any] = {
    "texts": ["music", "anbn"],
    "rows": ["bzip2", "CTW", "HMM", "dense HMM", "RNN, QDH+RBP", "PCNN, DH+FB"],
    "lengths": {"music": 12, "anbn": 1},
    "passes": {"music": 3, "anbn": 3},
    "units": [3, 4],
    "states": [2],
    "iterations": 2,
    "depths": [2, 3],
}
CONFIGURATION = {"versions": {"pathspace": "1", "torch": "2"}}
SOME = {"units": 3, "restarts": 4, "ensemble": 2, "heat": 2, "passes": 4, "patience": 9}
ARGUMENTS = [
    f"{name}={json.dumps(value)}" for name, value in TINY.items() if not isinstance(value, dict)
]
ARGUMENTS += ["lengths={music=12, anbn=1}", "passes={music=3, anbn=3}"]
COMMAND = [
    "reproduce",
    "symbols",
    "--workers",
    "1",
    *(word for a in ARGUMENTS for word in ("--set", a)),
]


def protocol_from(*layers: Any) -> Protocol:
    return laid_over(Protocol, layers)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, [*COMMAND, *words])


def test_the_recipe_fills_the_paper_s_table() -> None:
    recipe = load_recipe("symbols")
    of_paper = tuple(row for row in ROWS if row != "dense HMM")
    assert len(of_paper) == 12
    parts = {
        "small": (TEXTS, ROWS),
        "paper": (TEXTS, (*ROWS, MERGED)),
        "alphabet": (("alphabet",), ROWS[4:]),
    }
    assert set(parts) == set(recipe.sizes)
    for size, part in parts.items():
        protocol = protocol_from(*recipe.layers(size))
        assert (protocol.texts, protocol.rows) == part
        assert not protocol.lengths  # the paper's
    paper = protocol_from(*recipe.layers("paper"))
    # from 4 to 512 by factors of the square root of 2
    assert paper.units == tuple(round(4 * 2 ** (k / 2) - 1e-9) for k in range(15))
    # a twentieth of 30, 10 and 10 minutes for each network, and a single start
    assert paper.seconds == {"alphabet": 90, "music": 30, "anbn": 30}
    assert not paper.restarts
    published = load_published("symbols")
    assert published is not None
    values = {(r.label, r.method): r.value for r in published.results}
    assert set(values) == {(text, row) for text in TEXTS for row in ("", *of_paper)}
    best_of_paper = {text: min(values[text, row] or math.inf for row in of_paper) for text in TEXTS}
    assert best_of_paper == {"alphabet": 644.2, "music": 1055.9, "anbn": 29.7}
    assert best_of_paper == {text: values[text, ""] for text in TEXTS}
    assert [values[text, "HMM"] for text in TEXTS] == [10212.0, 4818.1, 125.7]
    assert [values[text, "RNN, DH+FB"] for text in TEXTS] == [7616.8, 2898.9, 122.4]
    assert [values[text, "PCNN, QDH+RBP"] for text in TEXTS] == [644.2, 1055.9, 30.0]


def test_the_alphabet_without_capitals_after_the_last_digit_can_be_asked_for() -> None:
    settings = {
        **TINY,
        "texts": ["alphabet-9"],
        "lengths": {"alphabet-9": 3},
        "passes": {"alphabet-9": 3},
    }
    protocol = protocol_from(("a test", settings))
    assert {cell.text for cell in cells(protocol)} == {"alphabet-9"}
    text = texts("alphabet-9", protocol)[0]
    assert text.count("\n") == 3
    assert text != texts("alphabet", protocol)[0]


def test_every_size_is_a_cell_and_the_validation_text_chooses() -> None:
    protocol = protocol_from(("a test", TINY))
    wanted = cells(protocol)
    assert len(wanted) == len({cell.key for cell in wanted}) == 2 * (1 + 2 + 2 + 1 + 2 + 2)
    assert wanted[0].text == "music"  # the longer ones first
    scores = [
        Score(Cell("CTW", "music", d), v, t, 0.0, 0) for d, v, t in ((2, 5.0, 1.0), (3, 4.0, 9.0))
    ]
    assert best(scores)["CTW", "music", 0].test == 9.0  # not the better test text


def test_the_hidden_markov_model_of_the_paper_has_the_sizes_of_the_networks_and_a_graph() -> None:
    protocol = protocol_from(("a test", {**TINY, "units": [3, 40], "iterations": 1}))
    assert {c.size for c in cells(protocol) if c.row == "HMM"} == {3, 40}
    assert {c.size for c in cells(protocol) if c.row == "dense HMM"} == {2}
    small, large = (compute(Cell("HMM", "music", size), protocol) for size in (3, 40))
    assert small.test != large.test
    assert small.passes == large.passes == 0
    assert Cell("dense HMM", "music", 40).key == "dense-hmm-music-40"


def test_a_cell_is_the_same_each_time_and_is_scored_against_the_generator() -> None:
    protocol = protocol_from(("a test", TINY))
    cell = Cell("PCNN, DH+FB", "anbn", 4)
    one, other = compute(cell, protocol), compute(cell, protocol)
    assert (one.validation, one.test, one.passes) == (other.validation, other.test, 3)
    assert one.sample == other.sample != ""
    assert one.test > 0  # no code is shorter than the generator's, but by luck
    assert compute(Cell("PCNN, DH+FB", "anbn", 3), protocol).test != one.test
    assert compute(Cell("PCNN, QDH+RBP", "anbn", 4), protocol).test != one.test
    assert TypeAdapter(Score).validate_python(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.slow
def test_the_command_reports_stops_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "table [small]"  # no markup
    result = call("--output", str(folder))
    assert result.exit_code == 0, result.output
    assert f"Report: {folder / 'report.html'}" in result.stdout
    assert "PCNN" in result.stdout
    content = json.loads((folder / "results.json").read_text())
    assert len(content["scores"]) == 20
    assert {row["row"] for row in content["rows"]} == set(TINY["rows"])
    assert (folder / "symbols.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "report.html").read_text()
    assert (folder / "validation.png").read_bytes().startswith(b"\x89PNG")
    assert "music: the generator" in (folder / "report.html").read_text()
    lines = (folder / "table.csv").read_text().splitlines()
    assert lines[0] == "model,variant,music,anbn,size,seconds"

    # the figures were seen above
    monkeypatch.setattr(
        "pathspace.experiments.report.document.saved", lambda _: (b"", "<svg></svg>")
    )

    # broken off: one cell is missing, one was marked so that doing it again would show
    (folder / "report.html").unlink()
    (folder / "cells" / "bzip2-anbn-0.json").unlink()
    marked = folder / "cells" / "ctw-anbn-2.json"
    score = json.loads(marked.read_text())
    write_checked(marked, {**score, "validation": -1.0, "test": 123.25})
    refused = CliRunner().invoke(app, ["reproduce", "symbols", "--output", str(folder)])
    assert refused.exit_code == 2
    assert "other settings" in refused.stderr
    assert call("--output", str(folder)).exit_code == 0
    again = {
        (r["row"], r["text"]): r["test"]
        for r in json.loads((folder / "results.json").read_text())["rows"]
    }
    before = {(r["row"], r["text"]): r["test"] for r in content["rows"]}
    assert again.pop(("CTW", "anbn")) == 123.25
    before.pop(("CTW", "anbn"))
    assert again == before

    taken = call("--output", str(folder), "--json")
    assert "was finished already" in taken.stderr
    assert 123.25 in [row["test"] for row in json.loads(taken.stdout)["rows"]]
    printed = call("--output", str(folder), "--json", "--fresh")
    assert json.loads(printed.stdout)["rows"] == content["rows"]


def test_draws_are_added_to_a_table(tmp_path: Path) -> None:
    words = ("--output", str(tmp_path), "--set", 'rows=["bzip2", "CTW"]', "--set", 'texts=["anbn"]')
    assert call(*words).exit_code == 0
    marked = tmp_path / "cells" / "bzip2-anbn-0.json"
    written = json.loads(marked.read_text())
    marked.write_text(json.dumps({**written, "test": 12.25}))
    (tmp_path / "report.html").unlink()
    damaged = call(*words)
    assert damaged.exit_code == 2
    assert (
        f"The result '{marked}' cannot be read (its checksum does not fit): delete it and"
        in damaged.stderr
    )
    (tmp_path / "report.html").touch()
    write_checked(marked, {**written, "test": 123.25})
    refused = call(*words, "--seeds", "2")
    assert (refused.exit_code, "add to its seeds with --resume" in refused.stderr) == (2, True)
    assert "123.25" in marked.read_text()
    more = call(*words, "--seeds", "2", "--resume")
    assert more.exit_code == 0, more.output
    content = json.loads((tmp_path / "results.json").read_text())
    assert {(row["row"], row["draw"]) for row in content["rows"]} == {
        (row, draw) for row in ("bzip2", "CTW") for draw in (0, 1)
    }
    assert 123.25 in [row["test"] for row in content["rows"]]
    fewer = call(*words, "--seeds", "1", "--resume")
    assert (fewer.exit_code, "other settings" in fewer.stderr) == (2, True)


def test_a_terminal_shows_what_came_out_and_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    result = call("--set", 'rows=["bzip2"]', "--output", str(tmp_path / "table"))
    assert result.exit_code == 0, result.output
    assert "bzip2 on anbn" in result.stderr
    assert "about 0:00 left" in result.stderr


def test_a_training_whose_gradient_overflows_counts_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pathspace.sequences import training

    whole = compute(Cell("PCNN, DH+FB", "anbn", 4), protocol_from(("a test", TINY)))
    advance = training.advance

    def breaks(before: Any, *rest: Any) -> Any:
        if before.passes == 2:
            raise FloatingPointError("the direction of pass 2 is not finite")
        return advance(before, *rest)

    monkeypatch.setattr(training, "advance", breaks)
    protocol = protocol_from(("a test", TINY))
    score = compute(Cell("PCNN, DH+FB", "anbn", 4), protocol)
    assert score.broke_off
    assert (score.passes, whole.passes, whole.broke_off) == (2, 3, False)
    one = protocol_from(("a test", {"rows": ["PCNN, DH+FB"], "texts": ["anbn"]}))
    table = build_table(one, [score], None)
    assert table.rows[0].cells[2].endswith("†")
    assert any(note.startswith("† the gradient overflowed") for note in table.notes)


@pytest.mark.filterwarnings("error")  # the table tells
def test_a_merged_network_whose_gradient_overflows_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pathspace.sequences import training

    advance = training.advance

    def breaks(before: Any, *rest: Any) -> Any:
        if before.passes == 3:
            raise FloatingPointError("the direction of pass 3 is not finite")
        return advance(before, *rest)

    table = {**TINY, "texts": ["music"], "rows": [MERGED], "merged": {"music": SOME}}
    protocol = protocol_from(("a test", table))
    (cell,) = cells(protocol)
    assert not compute(cell, protocol).broke_off
    monkeypatch.setattr(training, "advance", breaks)
    score = compute(cell, protocol)
    assert score.broke_off
    built = build_table(protocol, [score], None)
    assert built.rows[0].cells[2].endswith("†")
    assert any(note.startswith("† the gradient overflowed") for note in built.notes)


def test_draws_are_tables_of_other_texts_and_starts() -> None:
    protocol = protocol_from(
        ("a test", {**TINY, "texts": ["anbn"], "rows": ["CTW", "PCNN, DH+FB"], "seeds": 2})
    )
    wanted = cells(protocol)
    assert len({cell.key for cell in wanted}) == 8
    assert [cell.draw for cell in wanted] == 4 * [0] + 4 * [1]  # what is broken off has whole draws
    for cell in wanted[::3]:
        seeds = {"data_seed": 21 + cell.draw, "seed": 1000 + 1000 * cell.draw}
        alone = compute(replace(cell, draw=0), protocol_from(("a test", {**TINY, **seeds})))
        drawn = compute(cell, protocol)
        assert (drawn.test, drawn.validation, drawn.sample) == (
            alone.test,
            alone.validation,
            alone.sample,
        )
    assert (
        compute(Cell("CTW", "anbn", 2, 1), protocol).test
        != compute(Cell("CTW", "anbn", 2), protocol).test
    )


def test_rows_are_compared_over_draws(tmp_path: Path) -> None:
    rows = ["CTW", "CNN, QDH+RBP", "PCNN, DH+FB", "PCNN, QDH+RBP"]
    protocol = protocol_from(
        ("a test", {**TINY, "texts": ["music"], "rows": rows, "units": [3], "seeds": 3})
    )
    bits = {
        "CTW": (40.0, 50.0, 60.0),
        "CNN, QDH+RBP": (11.0, 19.0, 33.0),
        "PCNN, DH+FB": (1.0, 2.0, 3.0),
        "PCNN, QDH+RBP": (10.0, 20.0, 30.0),
    }
    scores = [
        # of the two sizes of CTW the one with the better validation text counts
        Score(
            Cell(row, "music", size, draw), float(size), bits[row][draw] + 100 * (size == 4), 1.0, 0
        )
        for row in rows
        for size in ((3, 4) if row == "CTW" else (3,))
        for draw in range(3)
    ]
    found = {(pair.first, pair.second): pair for pair in pairs_of(protocol, scores)}
    assert found.keys() == {
        ("PCNN, QDH+RBP", other) for other in ("CTW", "CNN, QDH+RBP", "PCNN, DH+FB")
    }
    trees = found["PCNN, QDH+RBP", "CTW"]  # three times the same difference
    assert (trees.difference.mean, trees.difference.half, trees.fewer, trees.verdict) == (
        -30,
        0,
        3,
        "fewer",
    )
    own = found["PCNN, QDH+RBP", "PCNN, DH+FB"]  # 9, 18, 27
    assert own.difference.mean == pytest.approx(18)
    # Student, two degrees of freedom
    assert own.difference.half == pytest.approx(4.302653 * 9 / 3**0.5)
    assert (own.fewer, own.verdict) == (0, "not decided")
    assert found["PCNN, QDH+RBP", "CNN, QDH+RBP"].fewer == 2

    found = report_of(protocol, scores, title="t", configuration=CONFIGURATION, published=None)
    write_report(found, tmp_path)
    table, pairs = (section.table for section in found.sections if section.printed)
    assert table.rows[0].cells == ("baseline", "CTW", "50.0 ± 10.0", "3", "6")
    assert any(note.startswith("Mean ± standard deviation of 3 draws") for note in table.notes)
    assert pairs.rows[2].cells == (
        "PCNN, QDH+RBP against CTW",
        "music",
        "-30.0 ± 0.0",
        "3 of 3",
        "fewer",
    )
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["pairs"][2] == {
        "first": "PCNN, QDH+RBP", "second": "CTW", "text": "music", "difference": -30.0, "half_interval": 0.0,
        "fewer": 3, "verdict": "fewer",
    }  # fmt: skip
    assert len(content["rows"]) == 12
    assert (tmp_path / "pairs.csv").read_text().startswith("pair,text,difference,fewer in,verdict")
    assert "What the paper compares" in (tmp_path / "report.html").read_text()
    assert sizes_table(protocol, scores).columns[-1] == "draw"
    assert pairs_of(replace(protocol, seeds=1), scores) == []


def test_no_cell_loses_its_end_in_a_narrow_terminal() -> None:
    protocol = protocol_from(("a test", {"rows": ["PCNN, DH+FB", "PCNN, QDH+RBP"], "seeds": 2}))
    scores = [Score(cell, 1.0, 123456.0 * (cell.draw + 1), 1.0, 0) for cell in cells(protocol)]
    tables = build_table(protocol, scores, None), pairs_table(protocol, pairs_of(protocol, scores))
    written = io.StringIO()
    for table in tables:
        print_table(table, Console(width=66, file=written))
    shown = written.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for cell in ("QDH+RBP", "185,184.0 ± 87,296.6", "+0.0 ± 0.0", "not decided"):
        assert cell in shown


def test_the_best_of_several_starts_counts() -> None:
    cell = Cell("CNN, QDH+RBP", "music", 4)
    alone = [compute(cell, protocol_from(("a test", {**TINY, "seed": 1000 + k}))) for k in range(3)]
    together = compute(cell, protocol_from(("a test", {**TINY, "restarts": {"music": 3}})))
    assert together.test == min(alone, key=lambda score: score.validation).test


def test_after_a_heat_the_better_quarter_goes_on_as_if_it_had_been_alone() -> None:
    cell, few, more = Cell("CNN, QDH+RBP", "music", 4), {"music": 2}, {"music": 6}
    short = [
        compute(
            cell,
            protocol_from(
                ("a test", {**TINY, "passes": few, "seed": 1000 + k, "texts": ["music"]})
            ),
        )
        for k in range(3)
    ]
    leader = min(range(3), key=lambda k: short[k].validation)
    settings = {**TINY, "passes": more, "texts": ["music"]}
    alone = compute(cell, protocol_from(("a test", {**settings, "seed": 1000 + leader})))
    heated = compute(
        cell, protocol_from(("a test", {**settings, "restarts": {"music": 3}, "heat": 2}))
    )
    assert (heated.test, heated.validation, heated.passes) == (alone.test, alone.validation, 6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"epochs": 3}, "Unknown setting 'epochs' in a test: choose from texts, rows"),
        ({"texts": ["xor"]}, "Unknown name 'xor' in the setting 'texts'"),
        ({"rows": ["LSTM"]}, "Unknown name 'LSTM' in the setting 'rows'"),
        ({"texts": []}, r"'texts' is \[\]: give at least one"),
        ({"texts": ["anbn", "anbn"]}, "give each one once"),
        ({"units": [2]}, r"'units' is \[2\]: give whole numbers from 3 on"),
        ({"units": 4}, "'units' is 4: give a list"),
        ({"states": []}, r"'states' is \[\]: give at least one"),
        ({"passes": 3}, "'passes' is 3: give a table"),
        ({"passes": {"music": 0}}, "'passes.music' is 0: give 1 or more"),
        ({"restarts": {"anbn": 0}}, "'restarts.anbn' is 0"),
        ({"restarts": 8}, "'restarts' is 8: give a table"),
        ({"heat": -1}, "'heat' is -1: give 0 or more"),
        ({"seeds": 0}, "'seeds' is 0: give 1 or more"),
        ({"seconds": {"anbn": 0}}, "'seconds.anbn' is 0: give more than 0"),
        ({"seconds": {"anbn": 10**400}}, "'seconds.anbn' is 1000+: give a number"),
        ({"seconds": {"xor": 3}}, "Unknown name 'xor' in the setting 'seconds'"),
        ({"rows": ["PCNN, merged"]}, "'merged' lacks 'alphabet'"),
        (
            {"merged": {"anbn": {**SOME, "ensemble": 3}}},
            r"'merged\.anbn\.ensemble' is 3: give an even number",
        ),
        (
            {"merged": {"anbn": {**SOME, "folds": 3}}},
            "Unknown option 'folds' in the setting 'merged.anbn'",
        ),
        ({"merged": {"anbn": {"units": 3}}}, "'merged.anbn' lacks 'restarts'"),
        (
            {"merged": {"anbn": {**SOME, "prior_writing": -1}}},
            r"'merged\.anbn\.prior_writing' is -1",
        ),
        (
            {"merged": {"anbn": {**SOME, "units": 2}}},
            r"'merged\.anbn\.units' is 2: give .* from 3 on",
        ),
        (
            {"merged": {"anbn": {**SOME, "restarts": 2, "ensemble": 4}}},
            r"'merged\.anbn\.ensemble' is 4: give at most the 2 of its restarts",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        protocol_from(("a test", change))


def test_a_prior_of_merged_networks_can_be_left_out() -> None:
    options = {**SOME, "prior_writing": 0}
    assert protocol_from(("a test", {"merged": {"anbn": options}})).merged["anbn"] == options


def test_recipes_with_an_engine_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="Unknown engine 'steam'"):
        parse_recipe("new", {"title": "t", "engine": "steam"})
    with pytest.raises(ConfigurationError, match=r"Unknown setting .epochs. in recipes/new\.toml"):
        parse_recipe("new", {"title": "t", "engine": "symbols", "sizes": {"small": {"epochs": 3}}})
    with pytest.raises(ConfigurationError, match="no place beside 'engine'"):
        parse_recipe("new", {"title": "t", "engine": "symbols", "study": {}})


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    result = call("--output", str(tmp_path), "--resume")
    assert result.exit_code == 2
    assert "nothing to resume" in result.stderr


def test_the_table_sets_the_published_numbers_below() -> None:
    protocol = protocol_from(("a test", {"rows": ["bzip2"], "texts": ["alphabet", "anbn"]}))
    scores = [Score(Cell("bzip2", text, 0), 1.0, 260.25, 0.0, 0) for text in protocol.texts]
    table = build_table(protocol, scores, load_published("symbols"))
    assert table.rows[0].cells[:4] == ("baseline", "bzip2", "260.2", "260.2")
    assert table.rows[1].cells[:4] == ("published", "the best", "644.2", "29.7")
    assert table.rows[2].cells[:4] == ("", "bzip2", "27,206.1", "244.0")
    # twelve rows, of which the dense HMM is none, below the best
    assert len(table.rows) == 2 + 12


def test_the_curve_of_a_network_ends_at_what_is_chosen() -> None:
    longer = protocol_from(
        ("a test", {**TINY, "passes": {"music": 500, "anbn": 3}, "patience": 500})
    )
    score = compute(Cell("CNN, QDH+RBP", "music", 3), longer)
    passes, seconds, regrets = zip(*score.curve, strict=True)
    assert list(passes) == sorted(set(passes))
    assert passes[-1] == score.passes == 500
    assert score.tries >= score.passes
    assert list(seconds) == sorted(seconds)
    assert 100 < len(passes) <= LOOKS
    assert min(regrets) >= score.validation  # thinned: the best look may not be among them
    assert min(regrets) < score.validation + 5


def test_a_budget_of_work_ends_a_training() -> None:
    settings = {**TINY, "passes": {"music": 10**6, "anbn": 3}, "patience": 10**6}
    score = compute(
        Cell("CNN, QDH+RBP", "music", 3),
        protocol_from(("a test", {**settings, "seconds": {"music": 0.2}})),
    )
    assert 0 < score.passes < 10**5
    assert not score.broke_off
    assert score.curve[-1][1] < 1.0
    # the same network as one that was to make as many passes
    passes = {"music": score.passes, "anbn": 3}
    bounded = compute(
        Cell("CNN, QDH+RBP", "music", 3), protocol_from(("a test", {**settings, "passes": passes}))
    )
    assert (bounded.test, bounded.validation) == (score.test, score.validation)


def test_merged_networks_are_those_of_two_folds(tmp_path: Path) -> None:
    import numpy as np

    from pathspace import sequences
    from pathspace.sequences.tasks import regret

    protocol = protocol_from(
        ("a test", {**TINY, "texts": ["music"], "rows": [MERGED], "merged": {"music": SOME}})
    )
    (cell,) = cells(protocol)
    score = compute(cell, protocol)
    text, held, test = texts("music", protocol)
    model = sequences.PCNN(
        units=3,
        connectivity=3,
        restarts=4,
        ensemble=2,
        heat=2,
        passes=4,
        patience=9,
        folds=2,
        seed=1000,
    ).fit([text, held], alphabet=test)
    assert cell.size == 3
    assert score.test == regret("music", test, model.bits(test))
    both = regret("music", text, 0.0) + regret("music", held, 0.0)
    assert np.isclose(score.validation, model.training_.result_bits + both)
    table = build_table(protocol, [score], None)
    assert table.rows[0].cells[:2] == ("PCNN", "merged")
    assert any("it has learned two texts" in note for note in table.notes)
    found = report_of(protocol, [score], title="t", configuration=CONFIGURATION, published=None)
    write_report(found, tmp_path)
    assert [section.table for section in found.sections if section.printed] == [table]
    assert "PCNN, merged, 3 units" in (tmp_path / "report.html").read_text()
    assert [heading for heading, _ in samples(protocol, [score])] == [
        "music: the generator",
        "music: PCNN, merged, 3 units",
    ]


def test_the_page_has_all_sizes_over_time_and_what_the_best_one_writes() -> None:
    protocol = protocol_from(
        ("a test", {**TINY, "texts": ["anbn"], "rows": ["CTW", "PCNN, DH+FB"]})
    )
    scores = [compute(cell, protocol) for cell in cells(protocol)]
    # the clock may not have told anything yet at the first look
    early = [
        replace(score, curve=tuple((k, 0.0, bits) for k, _, bits in score.curve))
        for score in scores
    ]
    for some in (early, scores):
        assert saved(lambda some=some: draw_over_time(protocol, some))[1].startswith("<svg")
    without = [score for score in scores if score.cell.row == "CTW"]
    one = replace(protocol, rows=("CTW",))
    assert (
        report_of(one, without, title="", configuration={}, published=None).sections[-1].figure
        is None
    )
    assert [row.cells[:3] for row in sizes_table(protocol, scores).rows] == [
        ("anbn", "CTW", "2"), ("anbn", "CTW", "3"), ("anbn", "PCNN, DH+FB", "3"), ("anbn", "PCNN, DH+FB", "4"),
    ]  # fmt: skip
    (truth, _), (heading, sample) = samples(protocol, scores)
    networks = [score for score in scores if score.sample]
    winner = min(networks, key=lambda score: score.validation)
    assert truth == "anbn: the generator"
    assert (heading, sample) == (f"anbn: PCNN, DH+FB, {winner.cell.size} units", winner.sample)


def test_runs_of_a_symbol_are_shortened() -> None:
    assert shown("ab" + 9 * "c" + "dddd" + 5 * "\n") == "ab[9 c]dddd" + 5 * "\n"
