"""How the command line ends when it is interrupted or has a mistake of its own."""

import errno
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pathspace import cli
from pathspace.experiments import invariance


@pytest.fixture(autouse=True)
def _own_handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (AssertionError("the sizes\ndiffer"), "Error: AssertionError: the sizes differ", 70),
        (RuntimeError("no"), "Error: RuntimeError: no", 70),
        (MemoryError(), "Error: There is not enough memory", 2),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
            "Error: There is not enough",
            2,
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[9"),
            "Error: There is not enough",
            2,
        ),
        (TypeError("empty(): Overflow when unpacking long long"), "Error: There is not enough", 2),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "Error: Cannot write to standard output (No space",
            2,
        ),
        (KeyboardInterrupt(), "Stopped.", 130),
    ],
)
def test_no_traceback_reaches_a_user(monkeypatch, capsys, error, says, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(invariance, "run_check_invariance", fail)
    monkeypatch.setattr(sys, "argv", ["pathspace", "check-invariance"])
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert ended.value.code == code
    assert captured.err.startswith(says)
    assert "Traceback" not in captured.err
    if code == 70:
        assert captured.err.endswith(f"with what the command prints with {cli.TRACEBACK}=1 set.\n")
        monkeypatch.setenv(cli.TRACEBACK, "1")
        with pytest.raises(type(error)):
            cli.main()


# Both signals come when they hurt most: the second one while the first one is being put away.
TWICE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell ignores it
from pathspace import cli
from pathspace.experiments import invariance
def run(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("not reached")
invariance.run_check_invariance = run
sys.argv = ["pathspace", "check-invariance"]
cli.main()
"""


def test_a_second_ctrl_c_ends_quietly():
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# Two copies of one process, which takes seconds to load what both need.
TERMINATED = """
import os, signal, sys
from pathspace import cli
from pathspace.experiments import invariance
invariance.run_check_invariance = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["pathspace", "check-invariance"]
for ctrl_c in (signal.default_int_handler, signal.SIG_IGN):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, ctrl_c)
        cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_sigterm_is_heard_where_ctrl_c_is_ignored_too():
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (2 * "143\n", 2 * "Stopped.\n")


@pytest.mark.slow
def test_an_ignored_ctrl_c_stays_ignored():
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['pathspace', '--version']\n"
        "from pathspace import cli\n"
        "try: cli.main()\n"
        "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from pathspace.experiments.terminal import Monitor
from pathspace.experiments.runner import Runner
from tests.faults.test_ends import Slow
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path(sys.argv[1])
def press():
    while not (folder / "begun").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.{how})
threading.Thread(target=press, daemon=True).start()
try:
    with Runner(processes=2) as runner:
        runner.all_results([Slow(folder)], Monitor(), "Waiting")
except KeyboardInterrupt:
    print("interrupted")
"""


@dataclass(frozen=True)
class Slow:
    """A job that takes half a minute and says so."""

    folder: Path
    key: str = "slow"
    label: str = "slow"

    def __call__(self, _monitor):
        (self.folder / "begun").touch()
        time.sleep(30)
        (self.folder / "late").touch()

    def stored(self):
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("SIGINT", "interrupted\n"), ("SIGKILL", "")])
def test_processes_end_with_the_command_that_is_interrupted_or_killed(how, says, tmp_path):
    # A worker holds the write end of a pipe, which reads as closed when it has ended.
    code = INTERRUPTED.replace("{how}", how)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.stdout == says
    time.sleep(3)  # in which a process that lost its parent notices
    assert not (tmp_path / "late").exists()
    assert (tmp_path / "begun").exists()
