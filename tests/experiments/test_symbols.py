"""The table of symbol sequences: who chooses, and what is scored."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pathspace.experiments.layers import laid_over
from pathspace.experiments.recipes import load_published, load_recipe
from pathspace.experiments.report import Report, Section, print_table, saved, write_report
from pathspace.experiments.symbols import (
    build_table,
    draw_over_time,
    pairs_of,
    pairs_table,
    samples,
    sections_of,
    sizes_table,
)
from pathspace.experiments.symbols.cells import (
    LOOKS,
    MERGED,
    ROWS,
    TEXTS,
    Cell,
    Protocol,
    Score,
    best,
    cells,
    compute,
    shown,
    texts,
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


def tiny(**changes: Any) -> Protocol:
    return laid_over(Protocol, [("a test", {**TINY, **changes})])


def sections(protocol: Protocol, scores: list[Score], folder: Path) -> list[Section]:
    """The sections of a report, which are written to a folder."""
    found, numbers = sections_of(protocol, scores, None)
    write_report(Report("t", found, CONFIGURATION, numbers), folder)
    return found


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
        protocol = laid_over(Protocol, recipe.layers(size))
        assert (protocol.texts, protocol.rows) == part
        assert not protocol.lengths  # the paper's
    paper = laid_over(Protocol, recipe.layers("paper"))
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
    few = {"alphabet-9": 3}
    protocol = tiny(texts=["alphabet-9"], lengths=few, passes=few)
    assert {cell.text for cell in cells(protocol)} == {"alphabet-9"}
    text = texts("alphabet-9", protocol)[0]
    assert text.count("\n") == 3
    assert text != texts("alphabet", protocol)[0]


def test_every_size_is_a_cell_and_the_validation_text_chooses() -> None:
    protocol = tiny()
    wanted = cells(protocol)
    assert len(wanted) == len({cell.key for cell in wanted}) == 2 * (1 + 2 + 2 + 1 + 2 + 2)
    assert wanted[0].text == "music"  # the longer ones first
    two = Score(Cell("CTW", "music", 2), 5.0, 1.0, 0.0, 0)
    three = Score(Cell("CTW", "music", 3), 4.0, 9.0, 0.0, 0)
    assert best([two, three])["CTW", "music", 0] == three  # not the better test text


def test_the_hidden_markov_model_of_the_paper_has_the_sizes_of_the_networks_and_a_graph() -> None:
    protocol = tiny(units=[3, 40], iterations=1)
    assert {c.size for c in cells(protocol) if c.row == "HMM"} == {3, 40}
    assert {c.size for c in cells(protocol) if c.row == "dense HMM"} == {2}
    small, large = (compute(Cell("HMM", "music", size), protocol) for size in (3, 40))
    assert small.test != large.test
    assert small.passes == large.passes == 0
    assert Cell("dense HMM", "music", 40).key == "dense-hmm-music-40"


def test_a_cell_is_the_same_each_time_and_is_scored_against_the_generator() -> None:
    protocol = tiny()
    cell = Cell("PCNN, DH+FB", "anbn", 4)
    one, other = compute(cell, protocol), compute(cell, protocol)
    assert (one.validation, one.test, one.passes) == (other.validation, other.test, 3)
    assert one.sample == other.sample != ""
    assert one.test > 0  # no code is shorter than the generator's, but by luck
    assert compute(Cell("PCNN, DH+FB", "anbn", 3), protocol).test != one.test
    assert compute(Cell("PCNN, QDH+RBP", "anbn", 4), protocol).test != one.test


def test_draws_are_tables_of_other_texts_and_starts() -> None:
    protocol = tiny(texts=["anbn"], rows=["CTW", "PCNN, DH+FB"], seeds=2)
    wanted = cells(protocol)
    assert len({cell.key for cell in wanted}) == 8
    assert [cell.draw for cell in wanted] == 4 * [0] + 4 * [1]  # what is broken off has whole draws
    for cell in wanted[::3]:
        seeds = {"data_seed": 21 + cell.draw, "seed": 1000 + 1000 * cell.draw}
        alone = compute(replace(cell, draw=0), tiny(**seeds))
        drawn = compute(cell, protocol)
        same = replace(alone, cell=cell, seconds=drawn.seconds, curve=drawn.curve)
        assert drawn == same
    first, second = (compute(Cell("CTW", "anbn", 2, draw), protocol) for draw in (0, 1))
    assert first.test != second.test


def test_rows_are_compared_over_draws(tmp_path: Path) -> None:
    rows = ["CTW", "CNN, QDH+RBP", "PCNN, DH+FB", "PCNN, QDH+RBP"]
    protocol = tiny(texts=["music"], rows=rows, units=[3], seeds=3)
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
    found = sections(protocol, scores, tmp_path)
    table, pairs = (section.table for section in found if section.printed)
    assert table.rows[0].cells == ("baseline", "CTW", "50.0 ± 10.0", "3", "6")
    assert any(note.startswith("Mean ± standard deviation of 3 draws") for note in table.notes)
    # three times the same difference
    first = ("PCNN, QDH+RBP against CTW", "music", "-30.0 ± 0.0", "3 of 3", "fewer")
    assert pairs.rows[2].cells == first
    content = json.loads((tmp_path / "results.json").read_text())
    own, cnn, trees = content["pairs"]
    assert trees == {
        "first": "PCNN, QDH+RBP", "second": "CTW", "text": "music", "difference": -30.0, "half_interval": 0.0,
        "fewer": 3, "verdict": "fewer",
    }  # fmt: skip
    # 9, 18, 27, and Student with two degrees of freedom
    assert own["difference"] == pytest.approx(18)
    assert own["half_interval"] == pytest.approx(4.302653 * 9 / 3**0.5)
    assert (own["second"], own["fewer"], own["verdict"]) == ("PCNN, DH+FB", 0, "not decided")
    assert (cnn["second"], cnn["fewer"]) == ("CNN, QDH+RBP", 2)
    assert len(content["rows"]) == 12
    assert (tmp_path / "pairs.csv").read_text().startswith("pair,text,difference,fewer in,verdict")
    assert "What the paper compares" in (tmp_path / "report.html").read_text()
    assert sizes_table(protocol, scores).columns[-1] == "draw"
    assert pairs_of(replace(protocol, seeds=1), scores) == []


def test_no_cell_loses_its_end_in_a_narrow_terminal() -> None:
    protocol = tiny(rows=["PCNN, DH+FB", "PCNN, QDH+RBP"], units=[3], seeds=2)
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
    alone = [compute(cell, tiny(seed=1000 + k)) for k in range(3)]
    together = compute(cell, tiny(restarts={"music": 3}))
    assert together.test == min(alone, key=lambda score: score.validation).test


def test_after_a_heat_the_better_quarter_goes_on_as_if_it_had_been_alone() -> None:
    cell, few, more = Cell("CNN, QDH+RBP", "music", 4), {"music": 2}, {"music": 6}
    short = [
        compute(cell, tiny(texts=["music"], passes=few, seed=1000 + k)).validation for k in range(3)
    ]
    leader = short.index(min(short))
    alone = compute(cell, tiny(texts=["music"], passes=more, seed=1000 + leader))
    heated = compute(cell, tiny(texts=["music"], passes=more, restarts={"music": 3}, heat=2))
    assert (heated.test, heated.validation, heated.passes) == (alone.test, alone.validation, 6)


@pytest.mark.filterwarnings("error")  # the table tells
@pytest.mark.parametrize(
    ("row", "text", "last"), [("PCNN, DH+FB", "anbn", 2), (MERGED, "music", 3)]
)
def test_a_training_whose_gradient_overflows_counts_until_then(
    row: str, text: str, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathspace.sequences import training

    advance = training.advance

    def breaks(before: Any, *rest: Any) -> Any:
        if before.passes == last:
            raise FloatingPointError(f"the direction of pass {last} is not finite")
        return advance(before, *rest)

    protocol = tiny(
        rows=[row], texts=[text], units=[3], merged={text: {**SOME, "prior_writing": 0}}
    )
    (cell,) = cells(protocol)
    whole = compute(cell, protocol)
    monkeypatch.setattr(training, "advance", breaks)
    score = compute(cell, protocol)
    assert (score.broke_off, whole.broke_off) == (True, False)
    assert score.passes < whole.passes
    table = build_table(protocol, [score], None)
    assert table.rows[0].cells[2].endswith("†")
    assert any(note.startswith("† the gradient overflowed") for note in table.notes)


def test_the_table_sets_the_published_numbers_below() -> None:
    protocol = tiny(rows=["bzip2"], texts=["alphabet", "anbn"], passes={"alphabet": 1, "anbn": 1})
    scores = [Score(Cell("bzip2", text, 0), 1.0, 260.25, 0.0, 0) for text in protocol.texts]
    table = build_table(protocol, scores, load_published("symbols"))
    assert table.rows[0].cells[:4] == ("baseline", "bzip2", "260.2", "260.2")
    assert table.rows[1].cells[:4] == ("published", "the best", "644.2", "29.7")
    assert table.rows[2].cells[:4] == ("", "bzip2", "27,206.1", "244.0")
    # twelve rows, of which the dense HMM is none, below the best
    assert len(table.rows) == 2 + 12


def test_the_curve_of_a_network_ends_at_what_is_chosen() -> None:
    longer = tiny(passes={"music": 500, "anbn": 3}, patience=500)
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
    cell, many = Cell("CNN, QDH+RBP", "music", 3), {"music": 10**6, "anbn": 3}
    score = compute(cell, tiny(passes=many, patience=10**6, seconds={"music": 0.2}))
    assert 0 < score.passes < 10**5
    assert not score.broke_off
    assert score.curve[-1][1] < 1.0
    # the same network as one that was to make as many passes
    passes = {"music": score.passes, "anbn": 3}
    bounded = compute(cell, tiny(passes=passes, patience=10**6))
    assert (bounded.test, bounded.validation) == (score.test, score.validation)


def test_merged_networks_are_those_of_two_folds(tmp_path: Path) -> None:
    import numpy as np

    from pathspace import sequences
    from pathspace.sequences.tasks import regret

    protocol = tiny(texts=["music"], rows=[MERGED], merged={"music": SOME})
    (cell,) = cells(protocol)
    score = compute(cell, protocol)
    text, held, test = texts("music", protocol)
    model = sequences.PCNN(connectivity=3, folds=2, seed=1000, **SOME)
    model.fit([text, held], alphabet=test)
    assert cell.size == 3
    assert score.test == regret("music", test, model.bits(test))
    both = regret("music", text, 0.0) + regret("music", held, 0.0)
    assert np.isclose(score.validation, model.training_.result_bits + both)
    table = build_table(protocol, [score], None)
    assert table.rows[0].cells[:2] == ("PCNN", "merged")
    assert any("it has learned two texts" in note for note in table.notes)
    found = sections(protocol, [score], tmp_path)
    assert [section.table for section in found if section.printed] == [table]
    assert "PCNN, merged, 3 units" in (tmp_path / "report.html").read_text()
    assert [heading for heading, _ in samples(protocol, [score])] == [
        "music: the generator",
        "music: PCNN, merged, 3 units",
    ]


def test_the_page_has_all_sizes_over_time_and_what_the_best_one_writes() -> None:
    protocol = tiny(texts=["anbn"], rows=["CTW", "PCNN, DH+FB"])
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
    assert sections_of(one, without, None)[0][-1].figure is None
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
