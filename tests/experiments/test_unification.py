"""The table of D16: every method in its cell, with the numbers of the comparison."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.conftest import TINY, write_sections
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.engine import run
from pathspace.experiments.jobs import Runs
from pathspace.experiments.methods import METHODS
from pathspace.experiments.recipes import load_recipe
from pathspace.experiments.report.figures import saved
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import run_study
from pathspace.experiments.studies.unification import MEASURES, USES, _draw, entries

METHODS_HERE = ["sgd", "path-norm", "batch-norm", "path-sgd"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    chosen = {
        "methods": METHODS_HERE,
        "model": "mlp",
        "learning_rates": [0.01, 0.3],
        "tuning_seeds": 1,
    }
    settings = settings_from(("a test", {**TINY, **chosen}))
    return compare(settings, Runs(tmp_path_factory.mktemp("runs")))


def test_the_recipe_has_a_method_for_every_cell() -> None:
    recipe = load_recipe("ddp")
    wanted = {name for pair in MEASURES.values() for name in pair if name}
    assert wanted <= set(METHODS)
    for size in recipe.sizes:
        settings = settings_from(*recipe.layers(size))
        # the whole natural gradient is affordable on a small network
        behind = {"natural", "quasi-diagonal", "moment-norm", "covariance-sgd"}
        left_out = {"small": set(), "long": behind}.get(size, {"natural"})
        assert wanted - left_out == set(settings.methods)
        assert settings.starts == (("balanced",) if size == "long" else ("balanced", "rescaled"))


def test_normalizing_methods_normalize_by_the_measure_of_their_row() -> None:
    expected = {
        "D": (0.0, None),
        "(D + M) / 2": (0.5, "second_moment"),
        "(D + C) / 2": (0.5, "covariance"),
        "M": (1.0, "second_moment"),
        "C": (1.0, "covariance"),
    }
    for measure, (alpha, statistic) in expected.items():
        told = METHODS[MEASURES[measure][0]].normalizes
        assert told["alpha"] == alpha
        assert statistic in (None, told["statistic"])
        assert METHODS[MEASURES[measure][1]].normalizes == {}


def test_cells_have_the_errors_of_each_start_at_its_own_rate(comparison: Comparison) -> None:
    found = {entry.method: entry for entry in entries(comparison)}
    assert set(found) == set(METHODS_HERE)
    assert [found[name].use for name in METHODS_HERE] == [USES[1], USES[0], USES[0], USES[1]]
    assert found["path-sgd"].difference == 0.0
    assert found["batch-norm"].difference != 0.0
    for entry in found.values():
        for start in ("balanced", "rescaled"):
            rate = comparison.choices[entry.method, start].learning_rate
            row = next(
                r
                for r in comparison.rows
                if (r.method, r.start, r.learning_rate) == (entry.method, start, rate)
            )
            assert entry.errors[start] == row.mean_test_error
        assert entry.milliseconds > 0


def test_the_study_writes_what_it_prints(comparison: Comparison, tmp_path: Path) -> None:
    (section,) = run_study("unification", {}, comparison, None)
    write_sections([section], tmp_path)
    assert len(section.table.rows) == len(METHODS_HERE)
    assert "D: paths" in section.table.notes[0]
    cells = json.loads((tmp_path / "unification.json").read_text())["cells"]
    with (tmp_path / "unification.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == [cell["method"] for cell in cells]
    for line, cell in zip(lines, cells, strict=True):
        assert math.isclose(float(line["balanced"]), cell["errors"]["balanced"])
    assert (tmp_path / "unification.png").read_bytes().startswith(b"\x89PNG")


def test_where_all_methods_diverged_there_is_an_empty_picture(comparison: Comparison) -> None:
    diverged = [replace(entry, errors=dict.fromkeys(entry.errors)) for entry in entries(comparison)]
    assert saved(lambda: _draw(comparison, diverged))[0].startswith(b"\x89PNG")


def test_curves_that_were_not_compared_are_not_called_the_same(comparison: Comparison) -> None:
    alone = replace(
        comparison, rows=tuple(replace(row, difference=None) for row in comparison.rows)
    )
    assert {(entry.same_curve, entry.difference) for entry in entries(alone)} == {(None, None)}
    assert [entry.same_curve for entry in entries(comparison) if entry.method == "path-sgd"] == [
        True
    ]


def test_a_comparison_of_other_methods_has_no_table(
    tiny_settings: Callable[..., Any], tmp_path: Path
) -> None:
    other = compare(tiny_settings(methods=["adam"], epochs=1), Runs(tmp_path / "runs"))
    (section,) = run_study("unification", {}, other, None)
    assert "arranges the methods sgd, path-norm" in section.table.notes[0]
    assert not section.numbers


def test_the_measures_of_data_alone_are_always_damped(
    tiny_config: Callable[..., Any], tiny_task: Any
) -> None:
    for method in ("diagonal-natural", "quasi-diagonal", "covariance-sgd"):
        free, least, more = (
            run(tiny_config(method, "balanced", 0.1, epochs=1, damping=d), tiny_task).losses
            for d in (0.0, 0.01, 0.5)
        )
        assert free == least != more
