"""How far a command is: a bar in a terminal, lines in a pipe, with what its user has to know in either."""

import io
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pathspace.experiments.execution import StoredCell
from pathspace.experiments.layers import laid_over
from pathspace.experiments.recipes import ENGINES, NEEDED, load_recipe
from pathspace.experiments.run import RunConfig
from pathspace.experiments.runner import Runs
from pathspace.experiments.terminal import Monitor, Part, Shown, Written, pass_on


def test_a_pipe_gets_the_last_run_of_a_stage_in_words(
    tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stream = io.StringIO()
    configs = [tiny_config(seed=seed) for seed in range(2)]
    with Shown(Console(file=stream, width=200)) as monitor:
        Runs(tmp_path_factory.mktemp("runs"), monitor).results(configs, "Training")
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("Training: 2/2  sgd, balanced, rate 0.05, seed 1: validation error ")
    assert ", 100 %, " in line


def test_a_terminal_gets_a_bar_that_moves_within_a_run(
    tiny_config: Callable[..., RunConfig],
) -> None:
    stream = io.StringIO()
    config = tiny_config()
    with Shown(Console(file=stream, width=200, force_terminal=True)) as monitor:
        monitor.stage("Training [red]", 4, done=1)
        monitor.advanced(config.label, 0.5, "step 4/8")
        assert monitor._progress._bars.tasks[-1].completed == 1.5
        monitor.finished(config.label, "validation error 0.1")
        assert monitor._progress._bars.tasks[-1].completed == 2
    assert "Training [red]" in stream.getvalue()
    assert "2/4  sgd, balanced, rate 0.05, seed 0: validation error 0.1" in stream.getvalue()


def test_what_a_user_has_to_know_is_said_though_progress_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    with Shown(Console(file=stream, width=200), quiet=True) as monitor:
        monitor.stage("Training", 1)
        monitor.finished("a run", "done")
        monitor.noted("a run", "its process died")
    assert stream.getvalue() == "  a run: its process died\n"
    Monitor().noted("another", "from a process of its own")
    assert capsys.readouterr().err == "  another: from a process of its own\n"


class Heard(Monitor):
    """Remembers how far jobs were."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self.words: list[str] = []

    def advanced(self, label: str, part: float, words: str) -> None:
        self.parts.setdefault(label, []).append(part)
        self.words.append(words)


TABLES = {
    "xor": {"lines": 30, "length": 10, "units": 3, "passes": 6, "every": 3, "seeds": 1},
    "symbols": {
        "texts": ["anbn"],
        "rows": ["PCNN, DH+FB"],
        "units": [3],
        "lengths": {"anbn": 4},
        "passes": {"anbn": 6},
        "restarts": {"anbn": 2},
        "heat": 2,
    },
    "long-memory": {
        "lengths": [4],
        "hidden": [3],
        "methods": ["path-muon"],
        "learning_rates": [1e-6],
        "tuning_seeds": 1,
        "seeds": 1,
        "test_size": 10,
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_tells_how_far_each_cell_is(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    engine = import_module(ENGINES[recipe.engine])
    for package in NEEDED.get(recipe.engine, ()):
        pytest.importorskip(package)
    protocol = laid_over(engine.Protocol, [("a test", TABLES[name])])
    heard = Heard()

    def do(kind: type, cells: Sequence[Any], compute: Callable[..., Any]) -> list[Any]:
        jobs = [StoredCell(kind, cell, compute, tmp_path) for cell in cells]
        return [job(heard) for job in jobs]

    engine.fill(protocol, do, tmp_path)
    for parts in heard.parts.values():
        assert len(parts) > 1
        assert parts == sorted(set(parts))
        assert parts[-1] == 1.0
    assert all("pass" in words or "step" in words for words in heard.words)


def test_other_processes_tell_how_far_they_are(tmp_path: Path) -> None:
    written, heard = Written(tmp_path / "a job"), Heard()
    written.advanced("a job", 0.25, "step 1/4")
    written.advanced("a job", 0.5, "step 2/4")  # within the same second
    (tmp_path / "another").write_text("[")  # half written
    pass_on(tmp_path, heard)
    assert heard.parts == {"a job": [0.25]}
    Written(tmp_path / "missing" / "a job").advanced("a job", 0.5, "")


def test_a_run_is_a_part_of_a_job() -> None:
    heard = Heard()
    Part(heard, "a point", 1, 4).advanced("seed 1", 0.5, "step 4/8")
    assert heard.parts == {"a point": [0.375]}
