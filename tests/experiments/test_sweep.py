"""Sweeps: every point once, however often the command is killed, and each failure with its reason."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="sweeps need optuna: pip install -e '.[sweep]'")

import command_line
import pathspace
from command_line import call
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import RESULT, RunConfig, Validation
from pathspace.experiments.runner import JobOutcome, Runner, Runs, WorkerDiedError
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings
from pathspace.experiments.sweep.plan import Dimension, Plan, config_of, parse_search, plan_from
from pathspace.experiments.sweep.report import best_table, failures_table, points_of
from pathspace.experiments.sweep.trials import Sweep, sweep
from pathspace.experiments.terminal import Monitor
from processes import in_child

Make = Callable[..., Settings]
SET = ["clip_norm=0", 'starts=["default"]', 'model_options.start="uniform"']
TASK = [*command_line.TINY, *(word for setting in SET for word in ("--set", setting))]
RUNS = ["--epochs", "1", "--methods", "sgd,path-sgd", "--seeds", "2", "--workers", "1"]
TINY = ["sweep", "adding", *TASK, *RUNS]


@pytest.mark.parametrize(
    ("text", "options", "listed"),
    [
        (
            "learning_rate=1e-4:1:log",
            {"low": 1e-4, "high": 1, "log": True},
            (0.0001, 0.001, 0.01, 0.1, 1.0),
        ),
        ("learning_rate=0.01,0.1", {"values": (0.01, 0.1)}, (0.01, 0.1)),
        ("damping=0:1:3", {"low": 0, "high": 1, "points": 3}, (0.0, 0.5, 1.0)),
        ("weight_decay=0:1", {"low": 0, "high": 1}, (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("refresh_every=1:2:3", {"low": 1, "high": 2, "points": 3}, (1, 2)),  # whole numbers
        (
            "model_options.hidden=4:64:log:3",
            {"low": 4, "high": 64, "log": True, "points": 3},
            (4, 16, 64),
        ),
        ("schedule=cosine,constant", {"values": ("cosine", "constant")}, ("cosine", "constant")),
        ("damping=[.1, .01]", {"values": (0.1, 0.01)}, (0.1, 0.01)),
        ("plain_rnn=[true, false]", {"values": (True, False)}, (True, False)),
    ],
)
def test_searches_are_read_and_ranges_listed_at_equal_factors_or_distances(
    text: str, options: dict[str, Any], listed: tuple[Any, ...]
) -> None:
    name = text.partition("=")[0]
    assert parse_search(text) == Dimension(name, **options)
    assert parse_search(text).listed().values == listed


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ("damping", "--search 'damping' says nothing to search: write --search learning_rate="),
        ("dampening=1,2", "Unknown setting 'dampening' in --search: choose from learning_rate"),
        ("seeds=1,2", "Unknown setting 'seeds' in --search"),
        ("damping=1:0.1", "is no range: write NAME=LOW:HIGH"),
        ("learning_rate=0:1:log", "is no range"),
        ("damping=0:1:1", "is no range"),
        ("damping=0:1:2:3", "is no range"),
        (f"refresh_every=1:{10**400}", "is no range"),
        (f"learning_rate={10**400}", "needs numbers"),
        ("learning_rate=fast,slow", "needs numbers"),
        ("damping=nan,0.5", "needs numbers, names, true or false"),
        ("damping=[[1],[2]]", "needs numbers, names, true or false"),
        ("model_options.width=1,2", "width"),
        ("damping=-1,0.1", "The option --search damping is -1: give 0 or more."),
        ("damping=0.1,x", "The option --search damping is 'x': give a number."),
        ("momentum=0.5:1", "The option --search momentum is 1.0: give less than 1."),
        ("refresh_every=1.5,2", "refresh_every is 1.5: give a whole number."),
        ("learning_rate=0.1,-1", "learning_rate is [0.1, -1]: give more than 0 each."),
        ("weight_decay=-1:1", "weight_decay is [-1.0, 1.0]: give 0 or more each."),
    ],
)
@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_a_search_that_no_run_can_have_is_refused_before_the_first_one(
    search: str, says: str, sampler: str, tiny_settings: Make
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        plan_from(tiny_settings(), [search], sampler)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("adding --search damping=-1,0.1", "The option --search damping is -1: give 0 or more."),
        ("adding --search damping=1,2 --search damping=1,2", "names 'damping' twice"),
        ("adding --sampler best", "Unknown sampler 'best' in --sampler: choose from grid, random"),
        ("adding --prune all", "Unknown pruner 'all' in --prune: choose from none, median"),
        ("adding --trials 5", "--trials is 5: a grid does all of its points; give --sampler rand"),
        ("adding --size huge", "Unknown size 'huge'"),
        ("adding --engine dask", "Unknown engine 'dask'"),
        ("chess", "Unknown recipe or task 'chess' in sweep"),
        ("winner", "give one of its parts: winner-mnist"),
        ("xor", "'xor' is not one comparison of optimizers"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    arguments: str, says: str, tmp_path: Path
) -> None:
    result = call("sweep", *arguments.split(), "--output", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.count(" digits,") <= 1  # a recipe and a task
    assert not (tmp_path / "out").exists()


def test_a_sweep_writes_its_page_and_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out [red]"  # no markup
    command = [*TINY, "--learning-rates", "0.1", "--search", "damping=0.1,1.0"]
    result = call(*command, "--output", str(folder))
    assert result.exit_code == 0, result.output
    assert f"Report: {folder / 'report.html'}" in result.stdout
    assert "4/4" in result.stderr  # points
    assert {path.name for path in folder.iterdir()} == {
        ".report.json", "report.html", "sweep.png", "table.csv", "trials.csv", "results.json", "config.json", "runs",
        "sweep.journal",
    }  # fmt: skip
    content = json.loads((folder / "results.json").read_text())
    assert [best["method"] for best in content["best"]] == ["sgd", "path-sgd"]
    assert len(content["trials"]) == 2 * 2 * 2
    seeds = {trial["seed"] for trial in content["trials"]}
    assert seeds == {FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1}
    for best in content["best"]:
        errors: dict[Any, list[float]] = {}
        for trial in content["trials"]:
            if trial["method"] == best["method"]:
                errors.setdefault(json.dumps(trial["point"]), []).append(trial["validation_error"])
        means = {point: sum(some) / 2 for point, some in errors.items()}
        assert best["validation_error_mean"] == pytest.approx(min(means.values()))
        assert means[json.dumps(best["point"])] == min(means.values())
    page = (folder / "report.html").read_text()
    assert "All points" in page
    assert "<svg" in page
    # nothing but JSON on standard output, and no progress
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", ""))
    printed = call(*command, "--json", "--quiet", "--output", str(tmp_path / "quiet"))
    assert json.loads(printed.stdout)["trials"] == content["trials"]
    assert printed.stderr == ""


def trials(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())["trials"]


def written(folder: Path) -> dict[Path, int]:
    """When each result of a run was written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"runs/*/{RESULT}")}


def swept(
    settings: Settings, plan: Plan, folder: Path, monitor: Any = None, runner: Runner | None = None
) -> Sweep:
    folder.mkdir(exist_ok=True)
    return sweep(settings, plan, Runs(folder, monitor or Monitor(), runner=runner or Runner()))


def numbers(found: Sweep) -> list[Any]:
    return [
        (point.method, point.start, dict(point.point), run.seed, run.state, run.error, run.reason)
        for point in found.points
        for run in point.runs
    ]


def states(found: Sweep) -> list[str]:
    return [run.state for point in found.points for run in point.runs]


def test_a_failed_run_has_its_reason_and_stops_nothing(tiny_settings: Make, tmp_path: Path) -> None:
    settings = tiny_settings(
        methods=["sgd"], starts=["default"], learning_rates=[0.01, 1e30], seeds=1
    )
    # More sequences than there are, no units, and a rate at which the loss overflows.
    plan = plan_from(settings, ["batch_size=16,1000", "model_options.hidden=6,0"])
    found = swept(settings, plan, tmp_path)
    reasons = {tuple(point.point.values()): point.runs[0].reason for point in found.points}
    assert len(reasons) == 8
    assert reasons[0.01, 16, 6] == ""
    assert "The batch size 1000 exceeds the 64 training sequences" in reasons[0.01, 1000, 6]
    assert "hidden" in reasons[0.01, 16, 0]
    assert "not finite after" in reasons[1e30, 16, 6]
    assert not found.all_failed
    table = failures_table(found)
    assert table is not None
    assert [row.cells[-1] for row in table.rows] == list(filter(None, reasons.values()))
    assert best_table(found).rows[0].cells[2] == "0.01*"
    again = swept(settings, plan, tmp_path)
    assert numbers(again) == numbers(found)


@pytest.mark.usefixtures("no_pictures")
def test_the_exit_code_is_1_only_if_all_failed(tmp_path: Path) -> None:
    some = call(*TINY, "--learning-rates", "1e30,0.01", "--output", str(tmp_path / "some"))
    assert some.exit_code == 0
    assert "not finite" in some.stdout
    every = call(*TINY, "--learning-rates", "1e30", "--output", str(tmp_path / "every"), "--json")
    assert every.exit_code == 1
    assert "Every run failed, the first one so: the loss or a step was not finite" in every.stderr
    assert {trial["state"] for trial in json.loads(every.stdout)["trials"]} == {"failed"}
    wrong = ["--learning-rates", "1e30", "--search", "schedule=none,cosine", "--quiet"]
    refused = call(*TINY, *wrong, "--output", str(tmp_path / "refused"))
    assert refused.exit_code == 2
    assert refused.stderr.endswith(
        "choose from constant, cosine, steps, drop. Did you mean 'cosine'?\n"
    )


def test_runs_are_those_that_compare_chooses_rates_by(tiny_settings: Make) -> None:
    from pathspace.experiments.compare import tuning_runs

    settings = tiny_settings(seeds=2, tuning_seeds=2, weight_decays=[0.0, 0.1])
    plan = plan_from(settings)
    keys = {
        config_of(settings, (method, start), point, seed).key
        for method in settings.methods for start in settings.starts for point in plan.grid() for seed in range(2)
    }  # fmt: skip
    assert keys == {config.key for config in tuning_runs(settings)}


class StopsAfter(Monitor):
    """Presses Ctrl-C, in effect, once so many points are over, or in the second epoch of so many runs."""

    def __init__(self, points: int, runs: int = -1) -> None:
        self.left = points
        self.runs = runs
        self.begun: list[str] = []

    def validated(self, config: RunConfig, validation: Validation) -> None:
        if validation.step == 0:
            self.begun.append(config.key)
        if len(self.begun) == self.runs and validation.step == 8:
            raise KeyboardInterrupt

    def finished(self, label: str, words: str) -> None:  # noqa: ARG002
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.sample(1)
@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_a_stopped_sweep_goes_on_with_the_point_that_it_was_at(
    sampler: str, tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd", "path-sgd"], starts=["default"], seeds=2, epochs=1)
    search = ["model_options.hidden=2:6:2", "schedule=constant,cosine"]
    trials = None if sampler == "grid" else 3
    plan = plan_from(settings, search[: 1 if sampler == "grid" else 2], sampler, trials)
    with pytest.raises(KeyboardInterrupt):
        swept(settings, plan, tmp_path, StopsAfter(2))
    with (tmp_path / "sweep.journal").open("ab") as journal:
        # as a full disk, or a machine that went down, may leave it
        journal.write(b'{"op_code": 5, "work')
    (tmp_path / "sweep.journal.lock").symlink_to("sweep.journal")
    begun = {path.parent.name for path in tmp_path.glob(f"runs/*/{RESULT}")}
    rest = StopsAfter(-1)
    whole = swept(settings, plan, tmp_path, rest)
    assert begun.isdisjoint(rest.begun)
    assert begun <= {path.parent.name for path in tmp_path.glob(f"runs/*/{RESULT}")}
    assert len(begun) + len(rest.begun) == len(states(whole)) == 2 * plan.trials * 2
    for point in points_of(whole):
        assert [run.seed for run in point.runs] == [FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1]
        assert 0.01 <= point.point["learning_rate"] <= 0.1
        assert point.point["model_options.hidden"] in range(2, 7)
    if sampler == "grid":
        assert numbers(whole) == numbers(swept(settings, plan, tmp_path / "whole"))
        return
    drawn = [
        {p.point["learning_rate"] for p in whole.points if p.method == m} for m in settings.methods
    ]
    assert len(drawn[0] | drawn[1]) == 6


class LosesTheFirst(Runner):
    """The process of the first run dies, as often as it is tried."""

    def run(self, jobs: Iterable[Any], monitor: Any) -> Iterator[JobOutcome]:
        waiting = iter(jobs)
        yield JobOutcome(
            next(waiting), error=WorkerDiedError("its process died: continue with --resume.")
        )
        yield from super().run(waiting, monitor)


def test_a_run_whose_process_died_is_done_when_the_sweep_is_resumed(
    tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd"], starts=["default"], seeds=2, epochs=1)
    plan = plan_from(settings)
    whole = swept(settings, plan, tmp_path / "whole")
    found = swept(settings, plan, tmp_path / "lost", None, LosesTheFirst())
    assert states(found) == ["failed", "failed", "complete", "complete"]
    assert found.points[0].runs[0].reason == "its process died: continue with --resume."
    resumed = StopsAfter(-1)
    assert numbers(swept(settings, plan, tmp_path / "lost", resumed)) == numbers(whole)
    assert len(resumed.begun) == 2


def test_a_point_that_is_drawn_twice_is_run_once(
    quick_processes: Runner, tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(
        methods=["sgd"], starts=["default"], learning_rates=[0.1], seeds=1, epochs=1
    )
    plan = plan_from(settings, ["momentum=0.0,0.5"], "random", 6)
    found = swept(settings, plan, tmp_path, None, quick_processes)
    assert len(found.points) == 6
    assert len(list(tmp_path.glob(f"runs/*/{RESULT}"))) <= 2
    assert all(point.mean("error") is not None for point in found.points)


def test_points_are_pruned_only_where_that_was_asked_for(
    tiny_settings: Make, tmp_path: Path
) -> None:
    settings = tiny_settings(methods=["sgd"], starts=["default"], seeds=2, epochs=2)
    search = ["learning_rate=0.1,0.09,0.08,0.07,0.06,1e-7,2e-7"]
    found = swept(settings, plan_from(settings, search), tmp_path / "all")
    assert set(states(found)) == {"complete"}
    plan = plan_from(settings, search, prune="median")
    pruned = swept(settings, plan, tmp_path / "pruned")
    assert states(pruned) == ["complete"] * 10 + ["pruned"] * 2  # at their first seed
    (last,) = pruned.points[-1].runs
    assert last.steps == 4
    assert last.reason == "pruned at step 4: worse than the median there"
    assert "Pruned, as asked for" in " ".join(best_table(pruned).notes)
    assert not list((tmp_path / "pruned").glob("runs/*/checkpoint*"))
    assert numbers(swept(settings, plan, tmp_path / "pruned")) == numbers(pruned)
    # a run that has told its first epoch tells it again
    with pytest.raises(KeyboardInterrupt):
        swept(settings, plan, tmp_path / "stopped", StopsAfter(-1, runs=5))
    assert numbers(swept(settings, plan, tmp_path / "stopped")) == numbers(pruned)


def test_a_pruned_point_that_is_the_same_run_is_not_run_again(
    tiny_settings: Make, tmp_path: Path
) -> None:
    methods = ["sgd", "path-sgd"]
    settings = tiny_settings(methods=methods, starts=["default"], seeds=1, epochs=2)
    # SGD's step has no bound: each rate is one run of it, and two points
    search = ["learning_rate=0.1,0.09,0.08,1e-7", "clip_step=1.0,2.0"]
    monitor = StopsAfter(-1)
    found = swept(settings, plan_from(settings, search, prune="median"), tmp_path, monitor)
    assert len([key for key in monitor.begun if key.startswith("sgd")]) == 4
    assert states(found)[:8] == ["complete"] * 6 + ["pruned"] * 2


def test_searched_epochs_are_those_of_the_runs(tiny_settings: Make) -> None:
    settings = tiny_settings(methods=["sgd"], tuning_epochs=3, learning_rates=[0.1])
    points = plan_from(settings, ["epochs=1,2"]).grid()
    assert [config_of(settings, ("sgd", "balanced"), point, 0).epochs for point in points] == [1, 2]
    other = plan_from(settings, ["momentum=0.0,0.5"]).grid()
    assert {config_of(settings, ("sgd", "balanced"), point, 0).epochs for point in other} == {3}
    for searched, told in (("momentum=0.0,0.5", True), ("epochs=1,2", False)):
        found = Sweep(settings, plan_from(settings, [searched]), "a task", "error, %", ())
        assert ("after 3 epochs" in best_table(found).notes[0]) == told


def test_a_grid_of_one_method_is_not_that_of_others(tiny_settings: Make) -> None:
    rates = {"learning_rates": [0.1, 0.3], "method_rates": {"g-sgd-published": [1e-9, 1e-7]}}
    one = tiny_settings(methods=["g-sgd-published"], starts=["default"], **rates)
    assert [point["learning_rate"] for point in plan_from(one).grid()] == [1e-9, 1e-7]
    both = tiny_settings(methods=["sgd", "g-sgd-published"], starts=["default"], **rates)
    with pytest.raises(ConfigurationError, match="gives g-sgd-published a grid of its own"):
        plan_from(both)
    assert len(plan_from(both, ["learning_rate=0.1,0.2"]).grid()) == 2


def killed_after(results: int, command: list[str]) -> None:
    """A command that kills its process when so many results have been written."""
    from pathspace.experiments import runner

    write, written = runner.write_checked, []

    def write_and_die(file: Path, values: Mapping[str, Any]) -> None:
        write(file, values)
        written.append(file)
        if len(written) == results:
            os.kill(os.getpid(), signal.SIGKILL)

    runner.write_checked = write_and_die
    said = call(*command)
    raise AssertionError(said.output)


@pytest.mark.usefixtures("no_pictures")
def test_a_killed_sweep_goes_on_and_does_no_run_again(tmp_path: Path) -> None:
    command = [*TINY, "--learning-rates", "0.01,0.1", "--output", str(tmp_path / "killed")]
    assert in_child(killed_after, 3, command) == -signal.SIGKILL
    before = written(tmp_path / "killed")
    assert len(before) == 3
    resumed = call("sweep", "--resume", "--workers", "1", "--output", str(tmp_path / "killed"))
    assert resumed.exit_code == 0, resumed.output
    done = written(tmp_path / "killed")
    assert before.items() <= done.items()
    assert call(*command[:-1], str(tmp_path / "whole")).exit_code == 0
    assert trials(tmp_path / "killed") == trials(tmp_path / "whole")
    assert "was finished already" in call(*command).stderr
    assert written(tmp_path / "killed") == done


@pytest.mark.usefixtures("no_pictures")
def test_the_command_that_is_named_for_an_unfinished_sweep_goes_on_with_it(tmp_path: Path) -> None:
    command = [*TINY, "--learning-rates", "0.01", "--output", str(tmp_path)]
    assert call(*command).exit_code == 0
    (tmp_path / "report.html").unlink()
    refused = call(*command, "--clip-step", "1")
    assert refused.exit_code == 2
    assert "unfinished runs with other settings" in refused.stderr
    program, *named = shlex.split(refused.stderr.split("`")[1])
    assert program == "pathspace"
    resumed = call(*named, "--workers", "1")
    assert resumed.exit_code == 0, resumed.output


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("lines", [0, 3])
def test_a_journal_that_finds_no_room_is_named(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Optuna's error, which names no file, the command line made a full standard output."""
    from optuna.storages.journal import JournalFileBackend

    append = JournalFileBackend.append_logs

    def fill(file: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        if len(Path(file._file_path).read_bytes().splitlines()) >= lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, logs)

    with monkeypatch.context() as without_room:
        without_room.setattr(JournalFileBackend, "append_logs", fill)
        full = call(*TINY, "--learning-rates", "0.01", "--output", str(tmp_path))
    assert full.exit_code == 2, full.output
    assert (
        f"Cannot write {str(tmp_path / 'sweep.journal')!r} (No space left on device)" in full.stderr
    )
    assert f"continue with: pathspace sweep --resume --output {tmp_path}" in full.stderr
    resumed = call("sweep", "--resume", "--workers", "1", "--output", str(tmp_path))
    assert resumed.exit_code == 0, resumed.output


@pytest.mark.sample(1)
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("line", ["not JSON", "[]", "{}", '{"op_code": 99, "worker_id": "a"}'])
def test_a_damaged_journal_is_named_and_can_be_done_without(line: str, tmp_path: Path) -> None:
    command = [*TINY, "--learning-rates", "0.01", "--output", str(tmp_path)]
    assert call(*command).exit_code == 0
    found = trials(tmp_path)
    (tmp_path / "report.html").unlink()
    journal = tmp_path / "sweep.journal"
    first, *rest = journal.read_text().splitlines()
    journal.write_text("\n".join([first, line, *rest, ""]))
    refused = call(*command)
    assert refused.exit_code == 2, refused.output
    assert f"The journal {str(journal)!r} cannot be read" in refused.stderr
    journal.unlink()
    done = written(tmp_path)
    assert call(*command).exit_code == 0
    assert trials(tmp_path) == found
    assert written(tmp_path) == done


def test_a_journal_of_another_version_is_refused(tiny_settings: Make, tmp_path: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    settings = tiny_settings(methods=["sgd"], starts=["default"], seeds=1, epochs=1)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "sweep.journal")))
    study = optuna.create_study(storage=storage, study_name="sgd, default")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(
        ConfigurationError,
        match=r"cannot be read \(it is of another version of pathspace\): delete it",
    ):
        swept(settings, plan_from(settings), tmp_path)


def with_mark(mark: str) -> dict[int, str]:
    """The command lines of all processes that have a mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if line}


@pytest.mark.slow
def test_ray_does_a_sweep_though_a_worker_is_killed_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    if not Path("/proc/self/environ").exists():
        pytest.skip("looks for processes in /proc, which this system has not")
    arguments = [
        "sweep", "adding", *TASK, "--set", "task_options.train_size=20000", "--set", "checkpoint_every=20",
        "--epochs", "1", "--methods", "sgd,path-sgd", "--seeds", "1", "--learning-rates", "0.01,0.1", "--workers", "2",
    ]  # fmt: skip
    mark = f"PATHSPACE_TEST_MARK={uuid.uuid4()}"
    name, value = mark.split("=")
    here = {"PYTHONPATH": str(Path(pathspace.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "pathspace", *arguments, "--engine", "ray", "--output", "ray"],
        cwd=tmp_path, env={**os.environ, **here, name: value}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        killed = None
        deadline = time.monotonic() + 400
        while killed is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if list(tmp_path.glob("ray/runs/*/checkpoint.pt")):
                at_work = [
                    pid
                    for pid, line in with_mark(mark).items()
                    if line.startswith("ray::sgd, default")
                ]
                if at_work:
                    killed = at_work[0]
                    os.kill(killed, signal.SIGKILL)
        out, said = process.communicate(timeout=500)
    finally:
        process.kill()
    assert killed is not None, out + said
    assert process.returncode == 0, out + said
    assert "its process died: going on from its last checkpoint." in said
    deadline = time.monotonic() + 60
    while with_mark(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert with_mark(mark) == {}
    alone = call(*arguments, "--output", str(tmp_path / "here"))
    assert alone.exit_code == 0, alone.output
    assert trials(tmp_path / "ray") == trials(tmp_path / "here")
