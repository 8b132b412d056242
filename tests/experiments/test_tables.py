"""Tables that are no comparison: the command of each fills it, stops, goes on, and refuses what is impossible."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from command_line import call
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import laid_over
from pathspace.experiments.recipes import ENGINES
from pathspace.experiments.storage import write_checked

pytest.importorskip("numba")
pytest.importorskip("hmmlearn")

TINY: dict[str, dict[str, Any]] = {
    "symbols": {
        "texts": ["anbn"],
        "rows": ["bzip2", "CTW", "HMM", "dense HMM", "RNN, QDH+RBP", "PCNN, DH+FB"],
        "lengths.anbn": 1,
        "passes.anbn": 3,
        "units": [3, 4],
        "states": [2],
        "iterations": 2,
        "depths": [2, 3],
    },
    "xor": {"lines": 30, "length": 10, "units": 3, "passes": 9, "every": 3, "seeds": [5, 6]},
    "long-memory": {
        "lengths": [5],
        "hidden": [4],
        "problems": ["addition", "subtraction"],
        "methods": ["path-muon", "balanced-adamw", "permuted"],
        "learning_rates": [0.01, 0.1],
        "seeds": 2,
        "tuning_seeds": 1,
        "test_size": 50,
        "steps_per_length": 4,
    },
}
COMMANDS = {
    name: [
        "reproduce", name, "--workers", "1",
        *(word for key, value in tiny.items() for word in ("--set", f"{key}={json.dumps(value)}")),
    ]
    for name, tiny in TINY.items()
}  # fmt: skip
FILES = {
    "symbols": {"symbols.png", "validation.png", "table.csv"},
    "xor": {"xor.png", "looks.csv", "table.csv"},
    "long-memory": {"long-memory.png", "table.csv"},
}
HEADS = {
    "symbols": "model,variant,anbn,size,seconds",
    "xor": "steps,seed,learned after,lines wrong,on the third text,seconds",
    "long-memory": "problem,T,H,metric,method,tuning runs,window,p of the window,rate,learned it,"
    "p of what learned it,median steps,p of the steps,diverged",
}
KEYS = {
    "symbols": {"unit", "rows", "pairs", "scores", "published"},
    "xor": {"learned", "networks"},
    "long-memory": {"settings", "reference"},
}
# A cell that is done again, one that is marked, so that doing it again would show, and its number.
CELLS = {
    "symbols": ("bzip2-anbn-0", "ctw-anbn-2", "test"),
    "xor": ("ours-5", "published-6", "test"),
    "long-memory": ("subtraction-5-4-permuted-at-0.01-seed-1000", "addition-5-4-permuted-at-0.1-seed-1", "error"),
}  # fmt: skip


def timeless(value: Any) -> Any:
    """Return results without the seconds that they took."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "curve")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ENGINES)
def test_the_command_reports_stops_and_continues(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "table [small]"  # no markup
    command = [*COMMANDS[name], "--output", str(folder)]

    def results() -> Any:
        return timeless(json.loads((folder / "results.json").read_text()))

    first = call(*command)
    assert first.exit_code == 0, first.output
    assert f"Report: {folder / 'report.html'}" in first.stdout
    whole = results()
    assert FILES[name] <= {path.name for path in folder.iterdir()}
    assert (folder / "table.csv").read_text().splitlines()[0] == HEADS[name]
    assert set(whole) == KEYS[name] | {"configuration"}
    for figure in folder.glob("*.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "report.html").read_text()
    # seen above
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", "<svg></svg>"))

    # broken off: one cell is missing, and one is marked
    (folder / "report.html").unlink()
    lost, marked, number = CELLS[name]
    (folder / "cells" / f"{lost}.json").unlink()
    cell = folder / "cells" / f"{marked}.json"
    write_checked(cell, {**json.loads(cell.read_text()), number: 0.12345})
    refused = call("reproduce", name, "--output", str(folder))
    assert (refused.exit_code, "other settings" in refused.stderr) == (2, True)
    assert call(*command).exit_code == 0
    again = results()
    assert "0.12345" in json.dumps(again)
    assert (folder / "cells" / f"{lost}.json").exists()

    taken = call(*command, "--json")
    assert "was finished already" in taken.stderr
    assert timeless(json.loads(taken.stdout)) == again
    # what a stopped command says to go on with: its settings are those of the folder
    (folder / "report.html").unlink()
    resumed = call("reproduce", name, "--resume", "--output", str(folder), "--json")
    assert timeless(json.loads(resumed.stdout)) == again
    fresh = call(*command, "--json", "--fresh")
    assert timeless(json.loads(fresh.stdout)) == whole
    nothing = call(*command[:-1], str(tmp_path / "none"), "--resume")
    assert (nothing.exit_code, "nothing to resume" in nothing.stderr) == (2, True)


def test_draws_are_added_to_a_table(tmp_path: Path) -> None:
    command = [*COMMANDS["symbols"], "--set", 'rows=["bzip2", "CTW"]', "--output", str(tmp_path)]
    assert call(*command).exit_code == 0
    marked = tmp_path / "cells" / "bzip2-anbn-0.json"
    written = json.loads(marked.read_text())
    marked.write_text(json.dumps({**written, "test": 12.25}))
    (tmp_path / "report.html").unlink()
    damaged = call(*command)
    assert damaged.exit_code == 2
    assert (
        f"The result '{marked}' cannot be read (its checksum does not fit): delete it and"
        in damaged.stderr
    )
    (tmp_path / "report.html").touch()
    write_checked(marked, {**written, "test": 123.25})
    refused = call(*command, "--seeds", "2")
    assert (refused.exit_code, "add to its seeds with --resume" in refused.stderr) == (2, True)
    more = call(*command, "--seeds", "2", "--resume")
    assert more.exit_code == 0, more.output
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    wanted = {(row, draw) for row in ("bzip2", "CTW") for draw in (0, 1)}
    assert {(row["row"], row["draw"]) for row in rows} == wanted
    assert 123.25 in [row["test"] for row in rows]
    fewer = call(*command, "--seeds", "1", "--resume")
    assert (fewer.exit_code, "other settings" in fewer.stderr) == (2, True)


def test_a_terminal_shows_what_came_out_and_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    result = call(*COMMANDS["symbols"], "--set", 'rows=["bzip2"]', "--output", str(tmp_path / "t"))
    assert result.exit_code == 0, result.output
    assert "bzip2 on anbn" in result.stderr
    assert "about 0:00 left" in result.stderr


MERGED = {"units": 3, "restarts": 4, "ensemble": 2, "heat": 2, "passes": 4, "patience": 9}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "symbols": [
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
        ({"merged": {"anbn": {"units": 3}}}, "'merged.anbn' lacks 'restarts'"),
    ],
    "merged": [
        ({"ensemble": 3}, r"'merged\.anbn\.ensemble' is 3: give an even number"),
        ({"folds": 3}, "Unknown option 'folds' in the setting 'merged.anbn'"),
        ({"prior_writing": -1}, r"'merged\.anbn\.prior_writing' is -1"),
        ({"units": 2}, r"'merged\.anbn\.units' is 2: give .* from 3 on"),
        (
            {"restarts": 2, "ensemble": 4},
            r"'merged\.anbn\.ensemble' is 4: give at most the 2 of its restarts",
        ),
    ],
    "xor": [
        ({"epochs": 3}, "Unknown setting 'epochs' in a test: choose from steps, seeds"),
        ({"steps": ["theirs"]}, "Unknown name 'theirs' in the setting 'steps'"),
        ({"steps": "ours"}, "'steps' is 'ours': give a list"),
        ({"steps": [["ours"]]}, "give a name each"),
        ({"seeds": []}, "give at least one"),
        ({"seeds": [1, 1]}, "give each one once"),
        ({"seeds": [-1]}, r"'seeds' is \[-1\]: give 0 or more each"),
        ({"seeds": [[1]]}, "give a whole number each"),
        ({"length": 9}, "'length' is 9: give 10 or more"),
        ({"passes": 0}, "'passes' is 0"),
        ({"passed": 0}, "'passed' is 0: give more than 0"),
        ({"own_texts": 1}, "'own_texts' is 1: give true or false"),
    ],
    "long-memory": [
        ({"epochs": 3}, "Unknown setting 'epochs' in a test: choose from problems, lengths"),
        ({"problems": ["division"]}, "Unknown name 'division' in the setting 'problems'"),
        ({"methods": ["sgd"]}, "Unknown name 'sgd' in the setting 'methods'"),
        ({"methods": ["muon"]}, "Unknown method 'path-muon' in the setting 'reference'"),
        ({"lengths": []}, "'lengths' is .* give at least one"),
        ({"lengths": [1]}, r"'lengths' is \[1\]: give 2 or more each"),
        ({"hidden": 64}, "'hidden' is 64: give a list"),
        ({"learning_rates": [0.1, 0.1]}, "give each one once"),
        ({"learning_rates": [-1.0]}, r"'learning_rates' is \[-1.0\]: give more than 0 each"),
        ({"learning_rates": [1e300]}, r"'learning_rates' is \[1e.300\]: give at most 1e.30 each"),
        ({"learning_rates": [0.0, 0.1]}, "give more than 0 each"),
        ({"seeds": 1001}, "'seeds' is 1001: give at most 1000"),
        ({"seeds": 0}, "'seeds' is 0: give 1 or more"),
        ({"warmup": 1.0}, "'warmup' is 1.0: give less than 1"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_settings_are_refused_by_name(name: str) -> None:
    for change, says in REFUSED[name]:
        layer = {"merged": {"anbn": {**MERGED, **change}}} if name == "merged" else change
        protocol = import_module(ENGINES["symbols" if name == "merged" else name]).Protocol
        with pytest.raises(ConfigurationError, match=says):
            laid_over(protocol, [("a test", layer)])
