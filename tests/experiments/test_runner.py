"""Who does jobs makes no difference to them; one whose process dies is done once more."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.experiments import runner
from pathspace.experiments.context import EngineContext
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import parse_settings
from pathspace.experiments.run import CHECKPOINT, RunConfig, RunResult, Validation
from pathspace.experiments.runner import Job, JobOutcome, PlacedRun, Runner, Runs, WorkerDiedError
from pathspace.experiments.settings import settings_from
from pathspace.experiments.terminal import Monitor

Configs = Callable[..., RunConfig]


class Kills(Monitor):
    """Kills the process of a run once it has a checkpoint."""

    def __init__(self, run: PlacedRun, mark: Path) -> None:
        self.run, self.mark = run, mark

    def validated(self, config: RunConfig, validation: Validation) -> None:  # noqa: ARG002
        if (self.run.folder / CHECKPOINT).exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Dying(PlacedRun):
    """Kills its process at its first checkpoint, as often as it has lives to lose."""

    lives: int = 0

    def __call__(self, monitor: Monitor) -> RunResult:
        lost = len(list(self.folder.parent.glob("death-*")))
        if lost < self.lives:
            monitor = Kills(self, self.folder.parent / f"death-{lost}")
        return super().__call__(monitor)


def job(config: RunConfig, folder: Path, checkpoint_every: int = 200) -> PlacedRun:
    return Runs(folder).job(config, checkpoint_every)


def dying(config: RunConfig, folder: Path, lives: int) -> Dying:
    return Dying(config, job(config, folder).folder, checkpoint_every=3, lives=lives)


class Notes(Monitor):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.done: list[str] = []

    def noted(self, label: str, sentence: str) -> None:  # noqa: ARG002
        self.said.append(sentence)

    def finished(self, label: str, words: str) -> None:
        self.done.append(f"{label}: {words}")


def curve(result: RunResult | None) -> tuple[object, ...]:
    assert result is not None
    return result.config.key, result.losses, result.validations, result.test_error


def test_a_run_goes_on_in_another_process_when_its_own_dies(
    quick_processes: Runner, tiny_config: Configs, tmp_path: Path
) -> None:
    whole = job(tiny_config(), tmp_path / "whole", 3)(Monitor())
    notes = Notes()
    jobs = [dying(tiny_config(), tmp_path, 1), job(tiny_config(seed=1), tmp_path, 3)]
    ended = {one.job.config.seed: one for one in quick_processes.run(jobs, notes)}
    assert curve(ended[0].result) == curve(whole)
    assert ended[1].result is not None
    assert set(notes.said) == {"its process died: going on from its last checkpoint."}


@pytest.mark.slow
def test_a_run_whose_process_dies_twice_is_named_and_the_others_are_not(
    quick_processes: Runner, tiny_config: Configs, tmp_path: Path
) -> None:
    jobs = [dying(tiny_config(seed=2), tmp_path, 9), job(tiny_config(seed=1), tmp_path, 3)]
    ended = {one.job.config.seed: one for one in quick_processes.run(jobs, Notes())}
    assert ended[1].result is not None
    assert isinstance(ended[2].error, WorkerDiedError)
    with pytest.raises(
        ConfigurationError, match=r"'sgd, balanced, rate 0.05, seed 2' died.*--workers 1"
    ):
        ended[2].value()


@pytest.mark.slow
def test_the_processes_of_joblib_give_what_this_one_gives_though_one_dies(
    tiny_config: Configs, tmp_path: Path
) -> None:
    here = job(tiny_config(), tmp_path / "here")(Monitor())
    jobs = [dying(tiny_config(), tmp_path / "there", 1)]
    with Runner(processes=2) as two:
        (there,) = two.all_results(jobs, Monitor(), "Training")
    assert curve(there) == curve(here)


def test_results_that_are_there_are_taken_and_others_are_kept(
    tiny_config: Configs, tmp_path: Path
) -> None:
    configs = [tiny_config(seed=seed) for seed in range(3)]
    jobs = [job(config, tmp_path) for config in configs]
    jobs[1].keep(jobs[1](Monitor()))
    notes = Notes()
    results = Runner().all_results(jobs, notes, "Training")
    assert [result.config for result in results] == configs
    assert [line.split(":")[0] for line in notes.done] == [configs[0].label, configs[2].label]
    assert all([path.name for path in job.folder.iterdir()] == ["result.json"] for job in jobs)


def test_the_next_job_is_taken_when_one_has_ended(
    executor: Runner, tiny_config: Configs, tmp_path: Path
) -> None:
    order: list[str] = []

    def jobs() -> Iterator[PlacedRun]:
        for seed in range(3):
            order.append(f"taken {seed}")
            yield job(tiny_config(seed=seed), tmp_path)

    for one in executor.run(jobs(), Monitor()):
        order.append(f"ended {one.job.config.seed}")
    places = executor.processes or 0
    assert order[:places] == [f"taken {seed}" for seed in range(places)]
    assert order.index("taken 2") > min(order.index(f"ended {seed}") for seed in range(2))


def test_an_error_in_a_run_is_its_end_and_nobody_elses(
    executor: Runner, tiny_config: Configs, tmp_path: Path
) -> None:
    wrong = replace(tiny_config(), batch_size=1000)
    jobs = [job(config, tmp_path) for config in (wrong, tiny_config(seed=1))]
    ended = {one.job.config.seed: one for one in executor.run(jobs, Monitor())}
    assert isinstance(ended[0].error, ConfigurationError)
    assert ended[1].result is not None


def test_engines_are_checked_before_anything_is_started() -> None:
    with pytest.raises(
        ConfigurationError, match="Unknown engine 'dask' in --engine: choose from local, ray"
    ):
        Runner("dask", 2)
    with pytest.raises(
        ConfigurationError, match="--address auto names a Ray cluster: give --engine ray, too"
    ):
        Runner("local", 2, address="auto")


@pytest.mark.parametrize(("given", "at_a_time"), [([], 2), (["threads=2"], 2), (["threads=3"], 1)])
def test_as_many_runs_as_there_is_room_for_at_a_time_however_threads_are_given(
    given: list[str], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    settings = settings_from(("the command line", parse_settings(given)))
    assert EngineContext().runner(settings.threads).places() == at_a_time


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", ["compare", "reproduce adding", "sweep adding"])
def test_commands_hand_their_runs_to_the_engine_that_is_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("sweep"):
        pytest.importorskip("optuna", reason="sweeps need optuna: pip install -e '.[sweep]'")
    asked = []

    class Here(Runner):
        def run(self, jobs: Iterable[Job], monitor: Monitor) -> Iterator[JobOutcome]:
            asked.append("ran")
            return super().run(jobs, monitor)

    def instead(engine: str, processes: int | None, address: str, *_: int) -> Runner:
        asked.append((engine, processes, address))
        return Here()

    monkeypatch.setattr("pathspace.experiments.context.Runner", instead)
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", "<svg></svg>"))
    tiny = [
        word
        for name in ("train", "validation", "test")
        for word in ("--set", f"task_options.{name}_size=64")
    ]
    words = [
        *command.split(), *tiny, "--set", "task=adding", "--set", "task_options.length=4", "--epochs", "1",
        "--set", "model_options.hidden=4", "--set", "tuning_epochs=0", "--set", "batch_size=16", "--methods", "sgd",
        "--seeds", "1", "--learning-rates", "0.01", "--engine", "ray", "--address", "there:1",
        "--output", str(tmp_path),
    ]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert ("ray", None, "there:1") in asked
    assert "ran" in asked


@pytest.fixture
def like_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What stands for Ray where it is not installed: it does a task when it is given."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        def __init__(self, cause: BaseException) -> None:
            self.cause = cause

    class Task:
        def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
            self.function, self.given = function, options

        def options(self, **more: Any) -> "Task":
            fake.named.append(more["name"])
            return self

        def remote(self, *arguments: Any) -> SimpleNamespace:
            future: Future[Any] = Future()
            try:
                future.set_result(self.function(*arguments))
            except Exception as error:
                future.set_exception(RayTaskError(error))
            return SimpleNamespace(future=lambda: future)

    def remote(**options: Any) -> Callable[..., Task]:
        return lambda function: Task(function, options)

    fake = SimpleNamespace(
        started=[],
        named=[],
        init=lambda *_, **options: fake.started.append(options),
        remote=remote,
        cluster_resources=lambda: {"CPU": 4.0},
        shutdown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_tasks_of_ray_are_runs_and_their_errors_ours(
    like_ray: SimpleNamespace, tiny_config: Configs, tmp_path: Path
) -> None:
    wrong = replace(tiny_config(), batch_size=1000)
    jobs = [job(config, tmp_path) for config in (wrong, tiny_config(seed=1))]
    with Runner("ray", None, threads=2) as cluster:
        assert cluster.places() == 2
        ended = {one.job.config.seed: one for one in cluster.run(jobs, Monitor())}
    assert isinstance(ended[0].error, ConfigurationError)
    assert ended[1].result is not None
    assert like_ray.named == [job.label for job in jobs]


def test_ray_that_is_started_here_takes_all_processors(like_ray: SimpleNamespace) -> None:
    for processes, threads in ((None, 1), (3, 1), (None, 2)):
        with Runner("ray", processes, threads=threads):
            pass
    processors = os.cpu_count() or 1
    assert [options["num_cpus"] for options in like_ray.started] == [processors, 3, 2 * processors]


def test_ray_that_does_not_start_in_time_is_no_mistake_of_ours(like_ray: SimpleNamespace) -> None:
    def init(**_options: object) -> None:
        raise Exception("The current node timed out during startup.")  # so has Ray 2.60

    like_ray.init = init
    with (
        pytest.raises(
            ConfigurationError, match=r"cannot be reached or started \(The current node timed out"
        ),
        Runner("ray", 2),
    ):
        pass


def test_another_version_on_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathspace.experiments.runner.versions", lambda: {"torch": "1.0"})
    with pytest.raises(ConfigurationError, match=r"has torch 1\.0, and the command 2\.0"):
        runner._there(None, {"torch": "2.0"}, Path())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_died_while_it_had_nothing_to_do_is_replaced(
    quick_processes: Runner, pools: list[Any], tiny_config: Configs, tmp_path: Path
) -> None:
    for seed in range(2):
        (ended,) = quick_processes.run([job(tiny_config(seed=seed), tmp_path)], Monitor())
        assert ended.result is not None
        for process in list(pools[-1]._processes.values()):
            process.kill()
            process.join()
