import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.conftest import write_sections
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.jobs import Runs
from pathspace.experiments.models import build_model
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import run_study
from pathspace.experiments.studies.second_term import ratios

SETTINGS: dict[str, Any] = {
    "task": "words",
    "task_options": {
        "length": 2,
        "context": 1,
        "train_size": 0,
        "validation_size": 0,
        "test_size": 0,
    },
    "model_options": {"hidden": 5, "embedding": 4},
    "starts": ["default"],
    "methods": ["path-sgd-short", "irnn-path-sgd-short"],
    "learning_rates": [0.1],
    "seeds": 1,
    "batch_size": 2,
    "epochs": 2,
}


@pytest.fixture
def comparison(tiny_corpora: Path, tmp_path: Path) -> Comparison:
    return compare(
        settings_from(("a test", SETTINGS)), Runs(tmp_path / "runs", data_dir=tiny_corpora)
    )


@pytest.mark.parametrize("length", [2, 3, 7, 50])
def test_one_identity_unit_has_the_ratio_that_a_count_of_pairs_gives(length: int) -> None:
    # The state that enters transition t (of T - 1 with a state before them) is t times the input's
    # mass: G is a sum over s of w^(T-s), kappa1 = sum of n = T(T-1)/2, kappa2 = 2 sum of n (n-1), n
    # = 0 .. T-1; the ratio is 4(T-2)/3.
    model = build_model("relu-rnn", 1, 1, {"hidden": 1, "start": "identity"})
    assert ratios(model, [length]) == [pytest.approx(4 * (length - 2) / 3, rel=1e-6)]


def test_the_study_writes_what_it_prints(
    comparison: Comparison, tiny_corpora: Path, tmp_path: Path
) -> None:
    options = {"lengths": [3, 6], "hidden": [4, 8]}
    sections = run_study("second-term", options, comparison, tiny_corpora)
    write_sections(sections, tmp_path)
    assert len(sections) == 2
    rows = json.loads((tmp_path / "second-term.json").read_text())["ratios"]
    assert [(row["start"], row["hidden"], row["length"]) for row in rows] == [
        (start, hidden, length)
        for start in ("default", "identity")
        for hidden in (4, 8)
        for length in (3, 6)
    ]
    # longer paths meet the matrix in more pairs; training changes the weights, hence the ratio
    for short, long in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < short["before"] < long["before"]
        assert short["after"] != short["before"]
    with (tmp_path / "second-term.csv").open(newline="") as file:
        assert [float(row["before"]) for row in csv.DictReader(file)] == [
            row["before"] for row in rows
        ]
    assert (tmp_path / "second-term.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_that_are_not_finite_are_none() -> None:
    model = build_model("relu-rnn", 2, 2, {"hidden": 3})
    with torch.no_grad():
        dict(model.named_parameters())["rnn.weight_hh_l0"].fill_(1e10)
    # entries of 1e20 in the squared matrix: 1e20^99 exceeds float64
    short, long = ratios(model, [3, 100])
    assert short is not None
    assert long is None


def test_training_that_diverges_leaves_a_gap(
    comparison: Comparison, tiny_corpora: Path, tmp_path: Path
) -> None:
    settings = replace(comparison.settings, learning_rates=(1e30,))
    choices = {
        key: replace(choice, learning_rate=1e30) for key, choice in comparison.choices.items()
    }
    lost = replace(comparison, settings=settings, choices=choices)
    sections = run_study("second-term", {"lengths": [3], "hidden": [4]}, lost, tiny_corpora)
    write_sections(sections, tmp_path)
    rows = json.loads((tmp_path / "second-term.json").read_text())["ratios"]
    assert [row["after"] for row in rows] == [None, None]
    cells = [cell for section in sections for row in section.table.rows for cell in row.cells]
    assert sum(cell.endswith("> not finite") for cell in cells) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lengths": [1]}, "'lengths' of the study is .1.: give 2 or more each"),
        ({"hidden": []}, "'hidden' of the study"),
        ({"widths": [3]}, "Unknown option 'widths'"),
    ],
)
def test_impossible_studies_are_refused(
    comparison: Comparison, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run_study("second-term", options, comparison, None)


@pytest.mark.parametrize(("method", "start"), [("irnn-path-sgd-short", "identity"), ("sgd", None)])
def test_a_start_that_was_not_compared_is_left_out(
    tiny_corpora: Path, tmp_path: Path, method: str, start: str | None
) -> None:
    settings = settings_from(("a test", {**SETTINGS, "methods": [method], "seeds": 1}))
    one = compare(settings, Runs(tmp_path / "runs", data_dir=tiny_corpora))
    sections = run_study("second-term", {"lengths": [3], "hidden": [4]}, one, tiny_corpora)
    if start is None:
        assert "needs one of the methods path-sgd-short, irnn-path-sgd-short" in str(sections)
        return
    write_sections(sections, tmp_path)
    rows = json.loads((tmp_path / "second-term.json").read_text())["ratios"]
    assert [row["start"] for row in rows] == [start]
    assert len(sections) == 1
