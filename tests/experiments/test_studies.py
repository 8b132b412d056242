"""The studies of recipes: what each measures, writes and prints, and that impossible options are refused."""

import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pathspace
from command_line import call
from experiments.conftest import TINY, asked, write_sections
from pathspace.experiments import execution, methods, studies
from pathspace.experiments.compare import Comparison, compare
from pathspace.experiments.context import EngineContext
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import build_model
from pathspace.experiments.recipes import Recipe, load_recipe
from pathspace.experiments.report import Section, saved
from pathspace.experiments.runner import Runs
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import MEASURES, USES, entries, ratios, run_study
from pathspace.experiments.tasks import build_task

TIMED: dict[str, Any] = {
    **TINY,
    "starts": ["default"],
    "methods": ["sgd", "path-sgd"],
    "learning_rates": [0.01],
    "seeds": 1,
    "epochs": 1,
}
OF_WORDS: dict[str, Any] = {
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
ARRANGED: dict[str, Any] = {
    **TINY,
    "methods": ["sgd", "path-norm", "batch-norm", "path-sgd"],
    "model": "mlp",
    "learning_rates": [0.01, 0.3],
    "tuning_seeds": 1,
}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(asked(TIMED), Runs(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def of_words(tiny_corpora: Path, tmp_path: Path) -> Comparison:
    runs = Runs(tmp_path / "runs", data_dir=tiny_corpora)
    return compare(asked(OF_WORDS), runs)


@pytest.fixture(scope="module")
def arranged(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(asked(ARRANGED), Runs(tmp_path_factory.mktemp("runs")))


def studied(
    name: str, options: dict[str, Any], comparison: Comparison, folder: Path, number: str
) -> tuple[list[Section], list[dict[str, Any]]]:
    """The sections of a study and the records that it writes, a number of which is the same in its CSV file."""
    sections = run_study(name, options, comparison, folder)
    write_sections(sections, folder)
    content = folder / f"{name}.json"
    (records,) = (v for v in json.loads(content.read_text()).values() if isinstance(v, list))
    with content.with_suffix(".csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    given = [record.get(number, record.get("errors", {}).get(number)) for record in records]
    assert [float(line[number]) if line[number] else None for line in lines] == given
    for section in sections:
        if section.figure is not None:
            assert (folder / section.figure.file).read_bytes().startswith(b"\x89PNG")
    return sections, records


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cost", {"rounds": 0}, "give 1 or more"),
        ("cost", {"steps": 1.5}, "give a whole number"),
        ("second-term", {"lengths": [1]}, "'lengths' of the study is .1.: give 2 or more each"),
        ("second-term", {"hidden": []}, "'hidden' of the study"),
        ("second-term", {"widths": [3]}, "Unknown option 'widths'"),
    ],
)
def test_impossible_studies_are_refused(
    timed: Comparison, name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run_study(name, options, timed, None)


# -- cost ------------------------------------------------------------------------------------------

RECIPE = """
title = "One that is timed"
[settings]
task = "adding"
task_options = { length = 6, train_size = 64, validation_size = 32, test_size = 32 }
model_options = { hidden = 6 }
starts = ["default"]
methods = ["sgd"]
learning_rates = [0.01]
seeds = 1
epochs = 1
batch_size = 16
[sizes.small]
[study]
name = "cost" # what is tested
[study.small]
rounds = 1 # the least
steps = 1 # the least
"""
FEW = {"rounds": 3, "steps": 2}


def test_costs_are_ratios_to_the_first_method(timed: Comparison, tmp_path: Path) -> None:
    _, costs = studied("cost", FEW, timed, tmp_path, "ratio")
    assert [one["method"] for one in costs] == ["sgd", "path-sgd"]
    assert (costs[0]["ratio"], costs[0]["lower"], costs[0]["upper"]) == (1.0, 1.0, 1.0)
    for one in costs:
        assert one["seconds"] > 0
        assert one["lower"] <= one["ratio"] <= one["upper"]


def test_a_slow_method_is_seen(
    timed: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = methods.METHODS["sgd"]

    def slow(*arguments: Any) -> Any:
        optimizer = plain.build(*arguments)
        step = optimizer.step

        def delayed() -> None:
            begin = time.thread_time()
            while time.thread_time() < begin + 0.02:
                pass
            step()

        optimizer.step = delayed  # type: ignore[method-assign, assignment]
        return optimizer

    monkeypatch.setitem(methods.METHODS, "path-sgd", replace(plain, build=slow))
    slowed = studied("cost", FEW, timed, tmp_path, "ratio")[1][1]
    assert slowed["ratio"] > 2
    # 4 steps an epoch, each of at least the pause
    assert slowed["seconds"] > 4 * 0.02


@pytest.mark.parametrize("count", [1, 4, 5, 20])
def test_quartiles_leave_as_many_rounds_on_either_side(
    count: int, timed: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four rounds the upper one was the greatest, and the lower one the second."""
    rounds = [float(value) for value in range(count, 0, -1)]

    def turn(_settings: Any, _task: Any, name: str, _steps: int) -> Callable[[], float]:
        # the first one warms up
        seconds = iter([9.0, *(rounds if name == "path-sgd" else [1.0] * count)])
        return lambda: next(seconds)

    monkeypatch.setattr(studies, "_turn", turn)
    task = build_task(timed.settings.task, timed.settings.task_options)
    _, path = studies.measure_costs(timed.settings, task, count, 1)
    expected = np.percentile(rounds, [25, 50, 75])
    assert [path.lower, path.ratio, path.upper] == pytest.approx(list(expected))


@pytest.mark.parametrize("plain", [False, True])
def test_recurrent_layers_are_those_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    settings = asked({**TIMED, "methods": ["sgd"], "plain_rnn": plain})
    comparison = compare(settings, Runs(tmp_path / "runs"))
    layers, build = [], methods.METHODS["sgd"].build

    def noted(model: Any, *others: Any) -> Any:
        layers.append(type(model.rnn))
        return build(model, *others)

    monkeypatch.setitem(methods.METHODS, "sgd", replace(methods.METHODS["sgd"], build=noted))
    run_study("cost", {"rounds": 1, "steps": 1}, comparison, None)
    assert layers == [torch.nn.RNN if plain else pathspace.nn.RNN]


@pytest.mark.usefixtures("no_pictures")
def test_a_study_that_was_stopped_is_done_without_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "package" / "recipes"
    folder.mkdir(parents=True)
    (folder / "timed.toml").write_text(RECIPE)
    monkeypatch.setattr("pathspace.experiments.recipes.files", lambda _: folder.parent)
    command = ["reproduce", "timed", "--workers", "1", "--output", str(tmp_path / "out")]

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr("pathspace.experiments.execution.run_study", stopped)
        assert call(*command).exit_code == 130
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("runs/*/result.json")}
    assert done
    result = call(*command)
    assert result.exit_code == 0, result.output
    assert "Continuing the unfinished runs" in result.stderr
    assert "Cost of an epoch" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_runs_on_the_gpus_of_a_cluster_do_not_lose_their_study_here(
    timed: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = Recipe(
        "timed", "Timed", {}, {"": {}}, study={"name": "cost", "": {"rounds": 1, "steps": 1}}
    )
    context = EngineContext(device="cuda", engine="ray", address="10.0.0.1:6379", quiet=True)
    (section,) = execution._study(recipe, timed, "", context)
    assert {"cost.csv", "cost.json"} == set(section.numbers)


# -- the second term -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 7, 50])
def test_one_identity_unit_has_the_ratio_that_a_count_of_pairs_gives(length: int) -> None:
    # The state that enters transition t (of T - 1 with a state before them) is t times the input's
    # mass: G is a sum over s of w^(T-s), kappa1 = sum of n = T(T-1)/2, kappa2 = 2 sum of n (n-1), n
    # = 0 .. T-1; the ratio is 4(T-2)/3.
    model = build_model("relu-rnn", 1, 1, {"hidden": 1, "start": "identity"})
    assert ratios(model, [length]) == [pytest.approx(4 * (length - 2) / 3, rel=1e-6)]


def test_ratios_grow_with_the_length_and_change_by_training(
    of_words: Comparison, tiny_corpora: Path
) -> None:
    options = {"lengths": [3, 6], "hidden": [4, 8]}
    sections, rows = studied("second-term", options, of_words, tiny_corpora, "before")
    assert len(sections) == 2
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


def test_ratios_that_are_not_finite_are_none() -> None:
    model = build_model("relu-rnn", 2, 2, {"hidden": 3})
    with torch.no_grad():
        dict(model.named_parameters())["rnn.weight_hh_l0"].fill_(1e10)
    # entries of 1e20 in the squared matrix: 1e20^99 exceeds float64
    short, long = ratios(model, [3, 100])
    assert short is not None
    assert long is None


def test_training_that_diverges_leaves_a_gap(of_words: Comparison, tiny_corpora: Path) -> None:
    choices = {key: replace(choice, learning_rate=1e30) for key, choice in of_words.choices.items()}
    lost = replace(of_words, choices=choices)
    options = {"lengths": [3], "hidden": [4]}
    sections, rows = studied("second-term", options, lost, tiny_corpora, "after")
    assert [row["after"] for row in rows] == [None, None]
    cells = [cell for section in sections for row in section.table.rows for cell in row.cells]
    assert sum(cell.endswith("> not finite") for cell in cells) == 2


def test_a_start_that_was_not_compared_is_left_out(
    of_words: Comparison, timed: Comparison, tiny_corpora: Path
) -> None:
    options = {"lengths": [3], "hidden": [4]}
    settings = replace(of_words.settings, methods=("irnn-path-sgd-short",))
    one = replace(of_words, settings=settings)
    sections, rows = studied("second-term", options, one, tiny_corpora, "before")
    assert [row["start"] for row in rows] == ["identity"]
    assert len(sections) == 1
    none = run_study("second-term", options, timed, tiny_corpora)
    assert "needs one of the methods path-sgd-short, irnn-path-sgd-short" in str(none)


# -- measures and uses -----------------------------------------------------------------------------


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


def test_cells_have_the_errors_of_each_start_at_its_own_rate(arranged: Comparison) -> None:
    found = {entry.method: entry for entry in entries(arranged)}
    assert set(found) == set(ARRANGED["methods"])
    assert [found[name].use for name in ARRANGED["methods"]] == [USES[1], USES[0], USES[0], USES[1]]
    assert found["path-sgd"].difference == 0.0
    assert found["batch-norm"].difference != 0.0
    for entry in found.values():
        for start in ("balanced", "rescaled"):
            rate = arranged.choices[entry.method, start].learning_rate
            row = next(
                r
                for r in arranged.rows
                if (r.method, r.start, r.learning_rate) == (entry.method, start, rate)
            )
            assert entry.errors[start] == row.mean_test_error
        assert entry.milliseconds > 0


def test_every_compared_method_has_a_row(arranged: Comparison, tmp_path: Path) -> None:
    (section,), cells = studied("unification", {}, arranged, tmp_path, "balanced")
    assert len(section.table.rows) == len(cells) == len(ARRANGED["methods"])
    assert "D: paths" in section.table.notes[0]


def test_where_all_methods_diverged_there_is_an_empty_picture(arranged: Comparison) -> None:
    diverged = [replace(entry, errors=dict.fromkeys(entry.errors)) for entry in entries(arranged)]
    assert saved(lambda: studies._draw_measures(arranged, diverged))[0].startswith(b"\x89PNG")


def test_curves_that_were_not_compared_are_not_called_the_same(arranged: Comparison) -> None:
    alone = replace(arranged, rows=tuple(replace(row, difference=None) for row in arranged.rows))
    assert {(entry.same_curve, entry.difference) for entry in entries(alone)} == {(None, None)}
    assert [entry.same_curve for entry in entries(arranged) if entry.method == "path-sgd"] == [True]


def test_a_comparison_of_other_methods_has_no_table(timed: Comparison) -> None:
    other = replace(timed, settings=replace(timed.settings, methods=("adam",)))
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
