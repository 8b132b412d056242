import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from pathspace.experiments.live import Bars, PlainLines, monitor
from pathspace.experiments.pool import Place, run_all
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.settings import Settings


def test_pipes_get_one_plain_line_per_run(tiny_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = tiny_settings()
    stream = io.StringIO()
    display, watcher = monitor(Console(file=stream, width=60))
    assert isinstance(watcher, PlainLines)
    watcher = PlainLines(Console(file=stream, width=60), clock=lambda: 0.0)  # no line in between is ever due
    configs = [settings.run_config("sgd", "balanced", rate, 3, evaluate_test=True) for rate in (0.01, 1e30)]
    with display:
        run_all(configs, Place(tmp_path), watcher, title="Training")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Training: 2 runs"
    assert lines[1].startswith("  1/2  sgd, balanced, rate 0.01, seed 3: validation error ")
    assert "test error" in lines[1]
    assert lines[2].startswith("  2/2  sgd, balanced, rate 1e+30, seed 3: diverged at step ")
    assert len(lines) == 3


def test_pipes_get_a_line_now_and_then_with_the_time_left(
    tiny_settings: Callable[..., Settings],
) -> None:
    now = [100.0]
    stream = io.StringIO()
    watcher = PlainLines(Console(file=stream, width=60), clock=lambda: now[0])
    first, second = (
        tiny_settings().run_config("sgd", "balanced", rate, 3, evaluate_test=True) for rate in (1, 2)
    )
    watcher.stage("Training", 4)
    watcher.started(first, 100)
    watcher.started(second, 100)
    for config in (first, second):
        watcher.advanced(config, 1, 0.5)
    now[0] += 1
    watcher.advanced(first, 10, 0.5)
    assert stream.getvalue() == "Training: 4 runs\n"
    now[0] += 9
    watcher.advanced(second, 10, 0.25)
    assert stream.getvalue().splitlines()[1:] == [
        "  0/4  sgd, balanced, rate 2, seed 3: step 10/100, loss 0.25; all runs, 5 %, 0:10 so far, about 3:31 left"
    ]


def test_steps_of_a_checkpoint_took_no_time(tiny_settings: Callable[..., Settings]) -> None:
    now = [100.0]
    stream = io.StringIO()
    watcher = PlainLines(Console(file=stream, width=60), clock=lambda: now[0])
    config = tiny_settings().run_config("sgd", "balanced", 0.01, 3, evaluate_test=True)
    watcher.stage("Training", 1)
    watcher.started(config, 10_000)
    watcher.advanced(config, 9_001, 0.5)
    now[0] += 9
    watcher.advanced(config, 9_010, 0.5)  # a second a step
    assert stream.getvalue().splitlines()[1].endswith("all runs, 90 %, 0:09 so far, about 16:30 left")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_comes_before_the_first_step_is_no_measure_of_the_rest(
    tiny_settings: Callable[..., Settings], workers: int
) -> None:
    now = [100.0]
    stream = io.StringIO()
    lines = PlainLines(Console(file=stream, width=60), clock=lambda: now[0])
    display = Progress(console=Console(file=io.StringIO()), auto_refresh=False, get_time=lambda: now[0])
    bars = Bars(display)
    configs = [
        tiny_settings().run_config("sgd", "balanced", 0.01, seed, evaluate_test=True)
        for seed in range(workers)
    ]
    for watcher in (lines, bars):
        watcher.stage("Training", workers)
        for config in configs:
            watcher.started(config, 1110)
    for config in configs:
        now[0] += 7  # of loading and tracing
        for watcher in (lines, bars):
            watcher.advanced(config, 1, 0.5)
    assert "0:07 so far\n" in stream.getvalue()
    for step in range(11, 562, 10):
        now[0] += 0.1
        for watcher in (lines, bars):
            for config in configs:
                watcher.advanced(config, step, 0.5)
    assert stream.getvalue().splitlines()[-1].endswith("about 0:06 left")
    if workers == 1:  # else what the one does while the other traces counts for half a minute
        assert display.tasks[0].time_remaining == pytest.approx(5.5, abs=1)


def result_of(config: RunConfig) -> RunResult:
    return RunResult(config, (1.0,), (Validation(0, 1.0, 1.0), Validation(1, 0.5, 0.5)), None, None, 1.0)


@pytest.mark.parametrize("unusual", ["a result on disk", "a late report", "its process died"])
def test_the_time_left_is_that_of_what_took_time(
    tiny_settings: Callable[..., Settings], unusual: str
) -> None:
    now = [100.0]
    stream = io.StringIO()
    watcher = PlainLines(Console(file=stream, width=60), clock=lambda: now[0])
    first, second, third = (
        tiny_settings().run_config("sgd", "balanced", 0.01, seed, evaluate_test=True) for seed in range(3)
    )
    watcher.stage("Training", 3)

    def done(config: RunConfig, begin: int, end: int) -> None:
        for step in range(begin, end + 1):
            now[0] += 1
            watcher.advanced(config, step, 0.5)

    watcher.started(first, 100)
    done(first, 1, 50)
    if unusual == "its process died":
        watcher.started(first, 100)
    done(first, 51, 100)
    watcher.finished(result_of(first))
    if unusual == "a result on disk":  # a sweep takes it in when its turn comes
        watcher.finished(result_of(third))
    if unusual == "a late report":
        watcher.advanced(first, 100, 0.5)
    watcher.started(second, 100)
    done(second, 1, 100)
    watcher.finished(result_of(second))
    ends = [line for line in stream.getvalue().splitlines() if "validation error" in line]
    third_is_there = ["about 1:40 left"] * (unusual == "a result on disk")
    told = ["about 3:20 left", *third_is_there, "about 0:00 left" if third_is_there else "about 1:40 left"]
    assert [line.rsplit("; ", 1)[1] for line in ends] == told  # a second a step


def test_quiet_monitors_print_what_is_noted_and_nothing_else(tiny_settings: Callable[..., Settings]) -> None:
    stream = io.StringIO()
    display, watcher = monitor(Console(file=stream, width=60), quiet=True)
    config = tiny_settings().run_config("sgd", "balanced", 0.01, 0, evaluate_test=True)
    with display:
        watcher.stage("Training", 2)
        watcher.started(config, 8)
        watcher.noted(config, "its checkpoint is damaged")
    assert stream.getvalue() == f"  {config.label}: its checkpoint is damaged\n"


def test_terminals_get_bars_with_the_time_left(
    tiny_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    stream = io.StringIO()
    display, watcher = monitor(Console(file=stream, width=140, force_terminal=True))
    assert isinstance(watcher, Bars)
    assert isinstance(display, Progress)
    config = tiny_settings().run_config("sgd", "balanced", 0.01, 0, evaluate_test=True)
    (result,) = run_all([config], Place(tmp_path), PlainLines(Console(file=io.StringIO())), title="")
    with display:
        watcher.stage("Training", 2)
        watcher.started(config, 8)
        watcher.advanced(config, 5, 0.25)
        shown = [
            (task.description, task.completed, task.total, task.fields["note"]) for task in display.tasks
        ]
        assert shown == [("[bold]Training", 5 / 8, 2, ""), (f"  {config.label}", 5, 8, "loss 0.25")]
        display.refresh()
        watcher.finished(result)
        # A result that was on disk already has no bar of its own.
        watcher.finished(replace(result, config=replace(config, seed=9)))
        assert [(task.completed, task.total) for task in display.tasks] == [(2, 2)]
    text = stream.getvalue()
    assert "5/8" in text
    assert "left" in text


def test_results_on_disk_make_no_bar_fast(tiny_settings: Callable[..., Settings]) -> None:
    now = [0.0]
    display = Progress(console=Console(file=io.StringIO()), auto_refresh=False, get_time=lambda: now[0])
    watcher = Bars(display)
    first, *others = (
        tiny_settings().run_config("sgd", "balanced", 0.01, seed, evaluate_test=True) for seed in range(9)
    )
    watcher.stage("Training", 10)
    for config in others:
        now[0] += 0.01
        watcher.finished(result_of(config))
    watcher.started(first, 100)
    for step in range(1, 21):
        now[0] += 1
        watcher.advanced(first, step, 0.5)
    assert display.tasks[0].time_remaining == pytest.approx(180, abs=2)  # a second a step


def test_a_run_that_is_begun_again_has_one_bar(tiny_settings: Callable[..., Settings]) -> None:
    display, watcher = monitor(Console(file=io.StringIO(), width=140, force_terminal=True))
    assert isinstance(display, Progress)
    config = tiny_settings().run_config("sgd", "balanced", 0.01, 0, evaluate_test=True)
    with display:
        watcher.stage("Training", 1)
        for _ in range(2):  # its process died
            watcher.started(config, 8)
        assert [task.total for task in display.tasks] == [1, 8]
        watcher.unfinished(config, "failed")
        assert [task.total for task in display.tasks] == [1]
