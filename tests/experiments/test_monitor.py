"""How far a command is: a bar in a terminal, lines in a pipe, with what its user has to know in either."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from pathspace.experiments.jobs import Place, run_all
from pathspace.experiments.monitor import Monitor, Shown
from pathspace.experiments.run import RunConfig


def test_a_pipe_gets_the_last_run_of_a_stage_in_words(
    tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stream = io.StringIO()
    configs = [tiny_config(seed=seed) for seed in range(2)]
    with Shown(Console(file=stream, width=200)) as monitor:
        run_all(configs, Place(tmp_path_factory.mktemp("runs")), monitor, title="Training")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("Training: 2/2  sgd, balanced, rate 0.05, seed 1: validation error ")
    assert ", 100 %, " in line


def test_a_terminal_gets_a_bar_that_moves_within_a_run(
    tiny_config: Callable[..., RunConfig],
) -> None:
    stream = io.StringIO()
    config = tiny_config()
    with Shown(Console(file=stream, width=200, force_terminal=True)) as monitor:
        monitor.stage("Training [red]", 4, done=1)
        monitor.started(config, 8)
        monitor.advanced(config, 4, 0.5)
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
