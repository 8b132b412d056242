import doctest
import io
import threading

import pytest
from rich.console import Console

from pathspace.tools import progress
from pathspace.tools.progress import SECONDS, Progress, clock_time, shown


def test_the_example_prints_what_it_says() -> None:
    failures, attempted = doctest.testmod(progress)
    assert (failures, attempted > 0) == (0, True)


def test_lines_come_every_ten_seconds_and_at_the_end() -> None:
    now, stream = [0.0], io.StringIO()
    with Progress(Console(file=stream, width=200), clock=lambda: now[0]) as work:
        work.stage("Training", 100)
        for second in range(1, 101):
            now[0] = float(second)
            work.update(second, "a run", last=second == 100)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Training: a run, 1 %, 0:01 so far"
    assert len(lines) == 1 + 100 / SECONDS
    assert lines[5] == "Training: a run, 51 %, 0:51 so far, about 0:49 left"
    assert lines[-1] == "Training: a run, 100 %, 1:40 so far, about 0:00 left"


def test_the_time_left_counts_only_what_took_time() -> None:
    now, stream = [0.0], io.StringIO()
    with Progress(Console(file=stream, width=200), bound="at most", clock=lambda: now[0]) as work:
        work.stage("fit", 100, done=50)
        # 26 seconds of compiling, then 10 for each fifth
        for now[0], done in ((26.0, 51), (36.0, 61), (46.0, 71)):
            work.update(done, "pass")
    assert stream.getvalue().splitlines() == [
        "fit: pass, 51 %, 0:26 so far",
        "fit: pass, 61 %, 0:36 so far, at most 0:39 left",
        "fit: pass, 71 %, 0:46 so far, at most 0:29 left",
    ]


def test_work_that_says_nothing_has_its_lines_too() -> None:
    now, stream = [0.0], io.StringIO()
    with Progress(Console(file=stream, width=200), clock=lambda: now[0]) as work:
        work.stage("Computing", 8, note="0/8")
        for second in range(0, 23):
            now[0] = float(second)
            work.line()
    assert stream.getvalue().splitlines() == [
        f"Computing: 0/8, 0 %, {spent} so far" for spent in ("0:01", "0:11", "0:21")
    ]


def test_a_pipe_is_written_to_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    said, stream = threading.Event(), io.StringIO()
    monkeypatch.setattr(progress, "FIRST", 0.001)
    monkeypatch.setattr(Progress, "say", lambda _, line: (stream.write(line), said.set()))
    with Progress(Console(file=stream)) as work:
        work.stage("Compiling", 1)
        assert said.wait(60)
    assert stream.getvalue() == "Compiling: 0 %, 0:00 so far"


def test_steps_of_unknown_length_are_named_one_after_the_other() -> None:
    now, stream = [0.0], io.StringIO()
    with Progress(Console(file=stream, width=200), clock=lambda: now[0]) as work:
        for title in ("Loading", "Tracing", "Measuring"):
            work.step(title)
            for _ in range(8):
                now[0] += 1.0
                work.line()
    assert stream.getvalue().splitlines() == [
        "Loading: 0:01 so far",
        "Tracing: 0:03 so far",
        "Measuring: 0:05 so far",
    ]


def test_a_terminal_shows_finished_steps_as_done() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=80, force_terminal=True)) as work:
        work.step("Loading")
        work.step("Tracing")
    assert [task.finished for task in work._bars.tasks] == [True, False]
    assert "Tracing" in stream.getvalue()
    assert "left" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599.6, "1:00:00"), (86400, "24:00:00")]
)
def test_times_in_words(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_quiet_work_shows_nothing_and_terminals_get_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet, terminal, said in ((True, True, False), (False, True, True), (False, False, False)):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=200)
        monkeypatch.setattr(progress, "FIRST", 1e9)
        with shown("work", console, quiet=quiet) as show:
            show(0.5, "half")
        assert ("half" in stream.getvalue()) is said
