"""The tests of ``kills.py``, which fork, in a process that has used no gradient yet: torch's threads are not forked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def passed_of_their_own(marker):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
    ]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("kills.py"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_commands_that_die_or_find_no_room_go_on():
    assert passed_of_their_own("not slow") >= 17


@pytest.mark.slow
def test_processes_that_are_killed_at_random_go_on():
    assert passed_of_their_own("slow") >= 1
