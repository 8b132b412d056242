"""Commands that are killed, find no room, may not write or meet one another: the result is that of an undisturbed one.

The short tests choose the moment of death by counting changes of files, and fork, so that they need
no second start of Python. The slow ones kill whole processes at random times.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pathspace
from faults.commands import (
    COMMANDS,
    at_a_terminal,
    dies_at,
    in_child,
    interrupted_at,
    litter,
    moments,
    prepare,
    result,
    terminated_at,
    with_room_for,
)
from pathspace.cli import app
from pathspace.sequences import checkpoints

KILLS = 20  # of each command in the slow tests


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    return folder


@pytest.fixture
def here(inputs, tmp_path, monkeypatch):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)  # a checkpoint after every pass
    # The pictures take most of the time, and are checked elsewhere.
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", "<svg></svg>"))
    return tmp_path


def start_over(folder):
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """What each command gives in this process, which has then loaded all that its copies need."""
    known = {}

    def whole(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("whole")
            shutil.copytree(inputs, folder, dirs_exist_ok=True)
            with contextlib.chdir(folder):
                assert CliRunner().invoke(app, COMMANDS[name]).exit_code == 0
            known[name] = result(name, folder)
        return known[name]

    return whole


def finish(name, folder):
    code, said = in_child(folder, COMMANDS[name])
    assert code == 0, said
    assert not litter(folder), litter(folder)
    return result(name, folder)


CHANGES = {"train": 45, "compare": 200, "fit": 60, "fit-restarts": 60}
"""How often about a command changes a file; the others do so three times."""


# The slow tests kill all of them. A fit that restarts is a fit, and a comparison trains.
@pytest.mark.parametrize("name", ["train", "compare", "fit-restarts", "compress"])
def test_a_command_that_dies_goes_on_to_the_same_result(name, here, undisturbed):
    whole = undisturbed(name)
    for moment in moments(name, 2 if name == "compare" else 3, CHANGES.get(name, 3)):
        code, said = in_child(here, COMMANDS[name], dies_at(moment))
        assert code == -signal.SIGKILL, said
    assert finish(name, here) == whole


@pytest.mark.parametrize("name", ["train", "fit", "compress"])
def test_two_ctrl_cs_end_a_command_quietly(name, here, undisturbed):
    whole = undisturbed(name)
    for later, moment in enumerate(moments(f"Ctrl-C {name}", 2, CHANGES.get(name, 3)), start=1):
        start_over(here)
        code, said = at_a_terminal(here, COMMANDS[name], interrupted_at(moment, later))
        assert code == 130, said
        assert "Traceback" not in said
    assert finish(name, here) == whole


@pytest.mark.parametrize("name", ["train", "fit", "compress"])
def test_sigterm_ends_a_command_as_ctrl_c_does(name, here, undisturbed):
    whole = undisturbed(name)
    moment = {"train": 35, "fit": 20, "compress": 1}[name]
    code, said = at_a_terminal(here, COMMANDS[name], terminated_at(moment))
    assert code == 143, said
    if name == "fit":
        assert "interrupted: what has been learned is saved, go on with --resume" in said
    if name == "train":
        assert "Stopped. Continue with: pathspace train --resume --output out" in said
        assert list((here / "out").glob("runs/*/checkpoint.pt"))
    assert finish(name, here) == whole


@pytest.mark.parametrize("name", ["train", "fit", "compress"])
def test_a_full_disk_is_named_and_the_same_command_goes_on(name, here, undisturbed):
    whole = undisturbed(name)
    for room in (0, 700):
        start_over(here)
        code, said = in_child(here, COMMANDS[name], with_room_for(room))
        if code != 0:  # some outputs are small enough
            assert code == 2, said
            assert "File too large" in said
        else:
            assert room
        assert not any(entry.endswith(".part") for entry in litter(here))
        assert finish(name, here) == whole


@pytest.mark.parametrize("name", ["train", "fit", "compress"])
def test_a_folder_that_may_not_be_written_is_named(name, inputs):
    # pytest's own folders can be entered by nobody else
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(inputs, folder, dirs_exist_ok=True)
        folder.chmod(0o555)

        def as_nobody():
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)

        code, said = in_child(folder, COMMANDS[name], as_nobody)
        folder.chmod(0o755)
        assert code == 2, said
        assert "Permission denied" in said
        assert {path.name for path in folder.iterdir()} == {path.name for path in inputs.iterdir()}


def test_two_at_once_do_not_harm_each_other(here, undisturbed):
    whole = undisturbed("train")
    barrier, release = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.close(release)
                os.read(barrier, 1)  # until both are there
                code = in_child(here, COMMANDS["train"])[0]
            finally:
                os._exit(code)
        children.append(child)
    os.close(barrier)
    os.close(release)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert set(codes) <= {0, 2}  # the later one may be refused
    assert 0 in codes
    assert finish("train", here) == whole


START = """
from pathspace import cli
from pathspace.sequences import checkpoints

checkpoints.SECONDS = 0.0
app = cli.app

def ready():
    print("ready", flush=True)  # Python has started, and main listens to Ctrl-C
    app()

cli.app = ready
cli.main()
"""


def run(folder, name, **options):
    sources = str(Path(pathspace.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": sources,
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", START, *COMMANDS[name]],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def wait_until_ready(process):
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_twenty_kills_of_each_command_cost_nothing(name, inputs, tmp_path):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    began = time.monotonic()
    said = run(tmp_path, name).communicate()[0]
    seconds = time.monotonic() - began
    whole = result(name, tmp_path)
    start_over(tmp_path)
    rng, kills, finished = random.Random(name), 0, 0
    while kills < KILLS or not finished:
        process = run(tmp_path, name)
        if kills < KILLS:
            time.sleep(rng.uniform(0, seconds))
            process.kill()
        said = process.communicate()[0]
        if process.returncode == -signal.SIGKILL:
            kills += 1
            if name == "decompress" and (tmp_path / "out").exists():
                assert result(name, tmp_path) == whole  # it died with its work done
                start_over(tmp_path)
            continue
        assert process.returncode == 0, said
        assert result(name, tmp_path) == whole
        assert not litter(tmp_path)
        finished += 1
        start_over(tmp_path)
    print(f"{name}: {kills} kills, {finished} finished in between and after, all the same")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "compare", "fit-restarts", "compress"])
def test_twenty_double_ctrl_cs_end_quietly(name, inputs, tmp_path):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    process = run(tmp_path, name)
    wait_until_ready(process)
    began = time.monotonic()
    process.communicate()
    seconds = time.monotonic() - began
    whole = result(name, tmp_path)
    start_over(tmp_path)
    rng = random.Random(name)
    for _ in range(KILLS):
        process = run(tmp_path, name)
        wait_until_ready(process)
        time.sleep(rng.uniform(0.0, 1.0) * seconds)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(rng.choice((0.0, 0.01, 0.1)))
        said = process.communicate()[0]
        # By the signal itself where Python had already put its handlers away.
        assert process.returncode in (0, 130, -signal.SIGINT), said
        assert "Traceback" not in said
        assert "Exception ignored" not in said
    said = run(tmp_path, name).communicate()[0]
    assert result(name, tmp_path) == whole, said


@pytest.mark.slow
def test_a_comparison_in_two_processes_goes_on_however_it_ended(inputs, tmp_path):
    """Ctrl-C to all of its processes, SIGTERM, SIGKILL, and the death of a worker; then it is done."""
    arguments = [*COMMANDS["compare"], "--workers", "2", "--set", "task_options.train_size=800"]

    def start():
        sources = str(Path(pathspace.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-m", "pathspace", *arguments], cwd=tmp_path, start_new_session=True, text=True,
            env={**os.environ, "PYTHONPATH": sources}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def at_work(process):
        begun = time.time_ns()
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError):  # a run has just ended
                if any(
                    path.stat().st_mtime_ns > begun
                    for path in tmp_path.glob("out/runs/*/checkpoint.pt")
                ):
                    return
            time.sleep(0.02)

    ends = {
        130: lambda process: os.killpg(process.pid, signal.SIGINT),
        143: lambda process: process.terminate(),
        -9: lambda process: process.kill(),
    }
    for code, end in ends.items():
        process = start()
        at_work(process)
        end(process)
        said = process.communicate()[0]
        assert process.returncode == code, said
        assert "Traceback" not in said
    process = start()
    at_work(process)
    listed = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "loky"], capture_output=True, text=True, check=False
    )
    workers = [int(word) for word in listed.stdout.split()]
    for worker in workers[-1:]:
        os.kill(worker, signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert not litter(tmp_path)
    found = result("compare", tmp_path)
    start_over(tmp_path)
    alone = [*COMMANDS["compare"], "--set", "task_options.train_size=800"]
    with contextlib.chdir(tmp_path):
        assert CliRunner().invoke(app, alone).exit_code == 0
    assert result("compare", tmp_path) == found
