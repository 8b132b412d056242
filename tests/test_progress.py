import doctest
import io

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
    assert len(lines) == 100 / SECONDS
    assert lines[4] == "Training: a run, 50 %, 0:50 so far, about 0:50 left"
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


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599.6, "1:00:00"), (86400, "24:00:00")]
)
def test_times_in_words(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_quiet_work_shows_nothing_and_terminals_get_a_bar() -> None:
    for quiet, terminal, said in ((True, True, False), (False, True, True), (False, False, False)):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, width=200)
        with shown("work", console, quiet=quiet) as show:
            show(0.5, "half")
        assert ("half" in stream.getvalue()) is said
