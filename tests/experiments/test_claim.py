import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as Drawing
from scipy import stats

from command_line import call
from pathspace.experiments import execution
from pathspace.experiments.compare import Choice, Comparison, Row, compare
from pathspace.experiments.report import saved
from pathspace.experiments.report.claim import (
    as_json,
    best_baseline,
    claim_sentences,
    claim_table,
    draw_claim,
    standings,
)
from pathspace.experiments.report.statistics import t_interval
from pathspace.experiments.run import RunResult, Validation
from pathspace.experiments.runner import Runs
from pathspace.experiments.settings import Settings

METHODS = ("sgd", "balanced-sgd", "path-sgd")
BASELINES = ("sgd", "balanced-sgd")


def test_the_interval_is_students() -> None:
    # from the tables: the 97.5 % quantile of t is 2.776 for 4 degrees of freedom and 12.706 for 1
    five = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.mean == 3.0
    assert five.half == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert t_interval([0.0, 2.0]).half == pytest.approx(
        12.706 * math.sqrt(2) / math.sqrt(2), rel=1e-3
    )
    assert t_interval([4.0]).half == math.inf
    assert t_interval([1e200, 3e200]).half == pytest.approx(12.706e200, rel=1e-3)  # perplexities
    values = [1.3, 0.2, 5.0, 2.2]
    low, high = stats.t.interval(0.9, 3, loc=sum(values) / 4, scale=stats.sem(values))
    found = t_interval(values, 0.9)
    assert (found.low, found.high) == pytest.approx((low, high))


@pytest.fixture
def comparison(tiny_settings: Callable[..., Settings]) -> Comparison:
    """Made up: test errors 3, 4, 5 for SGD; half of that, paired, for Path-SGD; balanced SGD in between."""
    settings = tiny_settings(
        methods=list(METHODS),
        baselines=list(BASELINES),
        starts=["balanced"],
        seeds=3,
        target_error=20.0,
    )

    def result(method: str, seed: int, error: float, validation: float) -> RunResult:
        config = settings.run_config(method, "balanced", 0.1, seed, evaluate_test=True)
        entries = (
            Validation(0, 2.0, 90.0),
            Validation(4, 1.0, 20.0),
            Validation(8, 0.5, validation),
        )
        return RunResult(config, (1.0,) * 8, entries, error, None, 1.0, step_seconds=0.5)

    errors = {"sgd": (3.0, 4.0, 5.0), "balanced-sgd": (2.0, 2.1, 6.0), "path-sgd": (1.5, 2.0, 2.5)}
    validation = {"sgd": 10.0, "balanced-sgd": 11.0, "path-sgd": 1.0}
    rows = tuple(
        Row(
            method,
            "balanced",
            0.1,
            "balanced",
            tuple(
                result(method, seed, error, validation[method])
                for seed, error in enumerate(errors[method])
            ),
            None,
        )
        for method in METHODS
    )
    choice = Choice(0.1, {0.01: 2.0, 0.1: 1.0}, at_edge=True, all_diverged=False, tried=7, failed=2)
    choices = {(method, "balanced"): choice for method in METHODS}
    return Comparison(settings, "a made-up task (3 images)", "error, %", choices, rows, ())


def test_differences_are_paired_and_against_the_baseline_that_validation_prefers(
    comparison: Comparison,
) -> None:
    sgd, balanced, path = standings(comparison)
    assert sgd.against is None
    assert sgd.difference is None
    # although balanced SGD has the smaller test error
    assert balanced.against == path.against == "sgd"
    assert path.difference is not None
    assert path.difference.mean == pytest.approx(-2.0)
    assert path.difference.half == pytest.approx(t_interval([-1.5, -2.0, -2.5]).half)
    assert (path.verdict, balanced.verdict, sgd.verdict) == ("better", "", "")
    assert path.steps is not None
    assert path.steps.mean == 4.0  # the first validation at the target, not an interpolation
    assert path.seconds is not None
    assert path.seconds.mean == 2.0
    assert path.milliseconds is not None
    assert path.milliseconds.mean == 500.0


def test_the_table_says_who_is_better(comparison: Comparison) -> None:
    table = claim_table(comparison)
    cells = {row.cells[0]: row.cells for row in table.rows}
    assert cells["SGD"][4:] == ("4.00 ± 2.48", "best", "2/7", "500.00 ± 0.00", "4 ± 0", "2.0 ± 0.0")
    assert cells["Path-SGD"][5] == "-2.00 ± 1.24"
    assert cells["Path-SGD"][2] == "0.1*"
    assert [row.marks for row in table.rows] == [{}, {}, {4: "good", 5: "good"}]
    text = " ".join(claim_sentences(comparison))
    assert (
        "against SGD (the best baseline): better: Path-SGD; worse: none; no difference shown: balanced"
        in text
    )


@pytest.mark.parametrize("how", ["diverged", "failed"])
def test_a_run_that_was_lost_or_missed_the_target_leaves_no_mean(
    comparison: Comparison, how: str
) -> None:
    row = comparison.rows[2]
    begin = row.runs[0].validations[0]
    gone = (
        replace(row.runs[0], test_error=None, diverged_at=5, validations=(begin,))
        if how == "diverged"
        else replace(row.runs[0], test_error=1e34, validations=(begin, Validation(8, 1e34, 1e34)))
    )
    changed = replace(
        comparison, rows=(*comparison.rows[:2], replace(row, runs=(gone, *row.runs[1:])))
    )
    given = {name: replace(choice, tried=0, failed=0) for name, choice in changed.choices.items()}
    for tuned in (changed, replace(changed, choices=given)):
        defined = (
            "A run failed if it diverged, or ended with no less validation loss than it began with."
        )
        assert defined in claim_table(tuned).notes
    standing = standings(changed)[2]
    assert (standing.error, standing.difference, standing.steps, standing.seconds) == (None,) * 4
    assert (standing.verdict, standing.reached) == ("failed", 2)
    cells = claim_table(changed).rows[2].cells
    assert cells[4] == f"{how} (1 of 3)"
    assert cells[8] == "2 of 3"
    (said,) = claim_sentences(changed)
    assert said.endswith(
        "no difference shown: balanced once, then SGD; not compared, a run failed: Path-SGD."
    )
    assert saved(lambda: draw_claim([changed]))[0].startswith(b"\x89PNG")
    json.dumps(as_json(changed), allow_nan=False)


def test_a_curve_is_the_same_if_it_is_so_from_every_start(comparison: Comparison) -> None:
    def rows(method: str, *differences: float) -> list[Row]:
        (first,) = (row for row in comparison.rows if row.method == method)
        starts = ("balanced", "rescaled", "default")
        return [
            replace(first, start=start, difference=difference)
            for start, difference in zip(starts, (None, *differences), strict=True)
        ]

    changed = replace(
        comparison, rows=(*rows("balanced-sgd", 0.0, 0.0), *rows("path-sgd", 0.0, 0.47))
    )
    changed = replace(changed, rows=(*changed.rows, *rows("sgd", 3.0, 1.4)))
    (note,) = (note for note in claim_table(changed).notes if "The same training curve" in note)
    assert note.endswith("(on 3 seeds): balanced once, then SGD.")


def test_a_baseline_that_failed_once_is_not_the_best(comparison: Comparison) -> None:
    sgd, balanced, _ = comparison.rows
    chance = replace(sgd.runs[0], validations=(Validation(0, 2.0, 90.0), Validation(8, 2.0, 5.0)))
    found = best_baseline([replace(sgd, runs=(chance, *sgd.runs[1:])), balanced])
    assert found is balanced


def test_without_a_baseline_that_came_through_nothing_is_claimed(comparison: Comparison) -> None:
    def without(row: Row) -> Row:
        return replace(
            row, runs=tuple(replace(run, test_error=None, diverged_at=1) for run in row.runs)
        )

    rows = tuple(without(row) if row.method in BASELINES else row for row in comparison.rows)
    changed = replace(comparison, rows=rows)
    assert best_baseline(rows[:2]) is None
    assert [standing.against for standing in standings(changed)] == [None] * 3
    table = claim_table(changed)
    assert "every baseline has a run that failed" in " ".join(claim_sentences(changed))
    assert "best" not in [row.cells[5] for row in table.rows]


SMALL: dict[str, Any] = {
    "task_options": {"length": 6, "train_size": 64, "validation_size": 32, "test_size": 32},
    "model_options": {"hidden": 6},
    "learning_rates": [0.01, 0.1],
}


def test_another_start_can_run_at_its_own_rate_alone(
    tiny_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    options = {
        "methods": ["adam", "path-adam", "balanced-adam"],
        "baselines": ["adam"],
        "weight_decays": [0.0, 0.1],
        "tuning": "in turn",
        "rescale_exponent": 8,
        "epochs": 1,
        "seeds": 1,
        "verified_seeds": 1,
    }
    comparison = compare(tiny_settings(**options, shared_rates=False), Runs(tmp_path))
    found = standings(comparison)
    assert len(comparison.rows) == len(found) == 6
    assert {run.config.weight_decay for run in comparison.tuning} == {0.0, 0.1}
    assert all(choice.tried == 3 for choice in comparison.choices.values())
    by_name = {(s.row.method, s.row.start): s for s in found}
    for start in ("balanced", "rescaled"):
        # balanced once is the method itself from the balanced start, whatever start it is given
        assert by_name["balanced-adam", start].error == by_name["adam", "balanced"].error
        assert by_name["path-adam", start].error == by_name["path-adam", "balanced"].error
    assert by_name["adam", "rescaled"].error != by_name["adam", "balanced"].error
    notes = " ".join(claim_table(comparison).notes)
    assert "to the last bit (checked on 1 seed in runs of 1 epoch; one run stands for all)" in notes


PARTS = """
title = "Both"
parts = ["one", "other"] # two will do
"""
PART = """
title = "One of them"
[settings]
task = "adding"
methods = ["sgd", "path-sgd"]
baselines = ["sgd"]
learning_rates = [0.01]
epochs = 1
seeds = 2
batch_size = 16
model_options = { hidden = 6 }
[sizes.small]
task_options = { length = 6, train_size = 64, validation_size = 32, test_size = 32 }
[sizes.paper]
"""
ONE_START = ["--set", "starts=['balanced']"]


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "package" / "recipes"
    folder.mkdir(parents=True)
    (folder / "both.toml").write_text(PARTS)
    (folder / "one.toml").write_text(PART)
    (folder / "other.toml").write_text(
        PART.replace("[0.01]", "[0.03]").replace("[sizes.paper]", "[sizes.huge]")
    )
    monkeypatch.setattr("pathspace.experiments.recipes.files", lambda _: folder.parent)
    # pictures take a second each; test_report draws this one
    monkeypatch.setattr("pathspace.experiments.report.comparison.draw_curves", lambda _: Drawing())
    return tmp_path


@contextmanager
def stopped_at_the_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Press Ctrl-C where the second part begins."""
    execute = execution.execute

    def stopped(asked: Any, context: Any, **given: Any) -> Any:
        if asked.recipe == "other":
            raise KeyboardInterrupt
        return execute(asked, context, **given)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(execution, "execute", stopped)
        yield


def test_a_recipe_of_parts_gives_one_table_each_one_page_and_one_picture(recipes: Path) -> None:
    from pathspace.experiments.recipes import load_recipe

    assert list(load_recipe("both").sizes) == ["small"]  # what both parts have
    output = recipes / "runs"
    command = ["reproduce", "both", "--size", "small", "--workers", "1", "--output", str(output)]
    result = call(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("against best") == 2
    assert (output / "claim.png").read_bytes().startswith(b"\x89PNG")
    page = (output / "report.html").read_text()
    assert page.count('id="figure_1"') == 1  # Matplotlib's
    for part in ("one", "other"):
        assert (output / part / "report.html").exists()
        with (output / part / "claim.csv").open(newline="") as file:
            assert len(list(csv.reader(file))) == 1 + 2 * 2
        claim = json.loads((output / part / "results.json").read_text())["claim"]
        assert [entry["against"] for entry in claim if entry["method"] == "path-sgd"] == [
            "sgd",
            "sgd",
        ]
    again = call("reproduce", "both", "--resume", "--json", "--output", str(output))
    assert again.exit_code == 0, again.output
    assert [part["configuration"]["recipe"] for part in json.loads(again.stdout)] == [
        "one",
        "other",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_parts_that_are_done_are_kept_until_the_whole_is(recipes: Path) -> None:
    output = recipes / "runs"
    command = ["reproduce", "both", "--workers", "1", *ONE_START, "--output", str(output)]
    assert call(*command).exit_code == 0
    done = {path: path.stat().st_mtime_ns for path in output.glob("*/runs/*/result.json")}
    assert done
    (output / "report.html").unlink()  # as after a stop in the last part
    lost = sorted(path for path in done if "other" in path.parts)[0]
    lost.unlink()
    assert call(*command).exit_code == 0
    assert lost.exists()
    assert all(path.stat().st_mtime_ns == when for path, when in done.items() if path != lost)
    # with other settings the runs that are there are neither used nor lost
    (output / "report.html").unlink()
    refused = call(*command, "--epochs", "2")
    assert refused.exit_code == 2
    assert "holds unfinished runs with other settings" in refused.stderr
    assert call(*command).exit_code == 0
    done = {path: path.stat().st_mtime_ns for path in done}
    same = call(*command)
    assert same.stderr.count("was finished already") == 1
    assert "All parts: " in same.stdout
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert call(*command, "--fresh").exit_code == 0
    assert all(path.stat().st_mtime_ns > when for path, when in done.items())


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_parts_are_resumed_with_the_settings_that_were_given(
    recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = recipes / "runs"

    command = ["reproduce", "both", "--workers", "1", "--output", str(output)]
    with stopped_at_the_other(monkeypatch):
        assert call(*command, *ONE_START, "--epochs", "2").exit_code == 130
    refused = call(*command, "--resume", "--epochs", "3")
    assert "holds unfinished runs with other settings" in refused.stderr
    assert call(*command, "--resume").exit_code == 0
    stored = [json.loads((output / part / "config.json").read_text()) for part in ("one", "other")]
    assert [content["settings"]["epochs"] for content in stored] == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_starting_over_had_not_come_to_does_not_stand_in_the_way(
    recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = recipes / "runs"
    command = ["reproduce", "both", "--workers", "1", "--output", str(output)]
    assert call(*command, *ONE_START).exit_code == 0

    with stopped_at_the_other(monkeypatch):
        assert call(*command, *ONE_START, "--fresh", "--seeds", "1").exit_code == 130
    resumed = call(*command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    stored = [json.loads((output / part / "config.json").read_text()) for part in ("one", "other")]
    assert [content["settings"]["seeds"] for content in stored] == [1, 1]
    assert len(list(output.glob("other/runs/*/result.json"))) == 2  # methods


def test_what_one_part_refuses_is_refused_before_another_begins(recipes: Path) -> None:
    command = ["reproduce", "both", "--size", "paper", "--output", str(recipes / "runs")]
    refused = call(*command)
    assert refused.exit_code == 2
    assert "Unknown size 'paper'" in refused.stderr
    assert not (recipes / "runs").exists()


def test_missing_data_of_one_part_is_told_before_another_begins(recipes: Path) -> None:
    file = recipes / "package" / "recipes" / "other.toml"
    file.write_text(re.sub("task_options.*", "", PART.replace('"adding"', '"mnist"')))
    command = ["reproduce", "both", "--output", str(recipes / "runs"), "--data-dir", str(recipes)]
    refused = call(*command)
    assert refused.exit_code == 2
    assert "MNIST was not found" in refused.stderr
    assert not (recipes / "runs").exists()


def test_nothing_to_resume_is_said_so(recipes: Path) -> None:
    result = call("reproduce", "both", "--resume", "--output", str(recipes / "nothing"))
    assert result.exit_code == 2
    assert "nothing to resume" in result.stderr


def test_one_method_alone_is_compared_with_nothing(comparison: Comparison) -> None:
    settings = replace(comparison.settings, methods=("sgd",), baselines=("sgd",))
    alone = replace(comparison, settings=settings, rows=comparison.rows[:1])
    none = replace(alone, settings=replace(settings, baselines=()))
    assert "no baseline was run" in " ".join(claim_sentences(none))
    assert "nothing to compare it with" in " ".join(claim_sentences(alone))
