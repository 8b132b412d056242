import doctest
import functools
import io
import itertools

import pytest
from rich.console import Console

from pathspace import progress
from pathspace.progress import FIRST, MOST, Lines, clock_time, shown


def test_the_example_prints_what_it_says() -> None:
    failures, attempted = doctest.testmod(progress)
    assert (failures, attempted > 0) == (0, True)


def test_lines_come_seldomer_the_longer_it_takes_but_they_come() -> None:
    now, times = [0.0], []
    lines = Lines(lambda _line: times.append(now[0]), clock=lambda: now[0])
    for second in range(7200):
        now[0] = float(second)
        lines.told(second / 7200, "")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == FIRST
    assert gaps == sorted(gaps)
    assert gaps[-1] == MOST


def test_the_time_left_counts_only_what_took_time() -> None:
    now, said = [0.0], []
    lines = Lines(said.append, bound="at most", clock=lambda: now[0])
    lines.begin(0.5)
    assert lines.left(0.5) == ""
    now[0] = 10.0
    assert lines.left(0.500001) == ""  # ten seconds of loading, not of that step
    now[0] = 60.0
    lines.told(0.75, "half of the rest")
    assert said == ["half of the rest, 75 %, 1:00 so far, at most 1:00 left"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599.6, "1:00:00"), (86400, "24:00:00")]
)
def test_times_in_words(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_quiet_work_shows_nothing_and_terminals_get_a_bar() -> None:
    for quiet, terminal, said in ((True, True, False), (False, True, True), (False, False, False)):
        stream = io.StringIO()
        with shown("work", Console(file=stream, force_terminal=terminal), quiet=quiet) as show:
            show(0.5, "half")
        assert ("half" in stream.getvalue()) is said


def test_what_comes_before_the_first_report_is_no_measure_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "Lines", functools.partial(Lines, clock=lambda: now[0]))
    with shown("fit", Console(file=stream, width=200), bound="at most") as show:
        for now[0], part in ((26.0, 0.01), (36.0, 0.51)):  # 26 seconds of compiling, then 20 of training
            show(part, "pass")
    assert stream.getvalue().splitlines() == [
        "fit: pass, 1 %, 0:26 so far",
        "fit: pass, 51 %, 0:36 so far, at most 0:10 left",
    ]
