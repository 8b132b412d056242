"""Who does runs makes no difference to them; whoever dies in one is replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.cli.groups import EngineOptions
from pathspace.experiments import checkpoint
from pathspace.experiments.engine import InterruptedRunError
from pathspace.experiments.engines import executor_for
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.executor import Ended, Executor, Job, ThisProcess, WorkerDiedError
from pathspace.experiments.layers import parse_settings
from pathspace.experiments.monitor import Listener, Monitor
from pathspace.experiments.pool import Place, PlacedRun
from pathspace.experiments.run import RunConfig, RunResult, Validation
from pathspace.experiments.settings import settings_from
from pathspace.experiments.workers import Workers

from .conftest import Copies

Configs = Callable[..., RunConfig]


@dataclass(frozen=True)
class Dying(PlacedRun):
    """Kills its process at its first checkpoint, as often as it has lives to lose."""

    lives: int = 0

    def __call__(
        self, listener: Listener, should_stop: Callable[[], bool] | None = None, *, again: bool = False
    ) -> RunResult:
        lost = len(list(self.place.folder.glob("death-*")))
        if lost < self.lives:

            def die() -> bool:
                if checkpoint.exists(self.folder):
                    (self.place.folder / f"death-{lost}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return False

            return super().__call__(listener, die, again=again)
        return super().__call__(listener, should_stop, again=again)


class Notes(Monitor):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.said: list[str] = []

    def validated(self, config: RunConfig, validation: Validation) -> None:  # noqa: ARG002
        self.steps.append(validation.step)

    def noted(self, config: RunConfig, sentence: str) -> None:  # noqa: ARG002
        self.said.append(sentence)


def curve(result: RunResult | None) -> tuple[object, ...]:
    assert result is not None
    return result.config.key, result.losses, result.validations, result.test_error


def test_a_run_goes_on_in_another_process_when_its_own_dies_and_the_others_do_not_notice(
    tiny_config: Configs, tmp_path: Path
) -> None:
    whole = PlacedRun(tiny_config(), Place(tmp_path / "whole", checkpoint_every=3))(Monitor())
    place, notes = Place(tmp_path, checkpoint_every=3), Notes()
    jobs = [Dying(tiny_config(), place, 1), PlacedRun(tiny_config(seed=1), place)]
    with Copies(2) as workers:
        ended = {one.config.seed: one for one in workers.run(jobs, notes)}
        (lost,) = workers.run(
            [Dying(tiny_config(seed=2), Place(tmp_path / "more", checkpoint_every=3), 9)], Monitor()
        )
    assert curve(ended[0].result) == curve(whole)
    assert ended[1].result is not None
    assert notes.said == ["its process died: going on from its last checkpoint."]
    assert notes.steps.count(0) == 2  # the dead one's beginning was not done again
    assert isinstance(lost.error, WorkerDiedError)
    with pytest.raises(ConfigurationError, match=r"'sgd, balanced, rate 0.05, seed 2' died.*--workers 1"):
        lost.value()


@pytest.mark.slow
def test_a_process_that_has_loaded_nothing_yet_gives_what_this_one_gives(
    tiny_config: Configs, tmp_path: Path
) -> None:
    here = PlacedRun(tiny_config(), Place(tmp_path / "here"))(Monitor())
    with Workers(1) as workers:
        (there,) = workers.run([PlacedRun(tiny_config(), Place(tmp_path / "there"))], Monitor())
    assert curve(there.result) == curve(here)


def test_a_process_that_died_between_two_stages_is_replaced(tiny_config: Configs, tmp_path: Path) -> None:
    with Copies(2) as workers:
        for seed in range(2):
            (ended,) = workers.run([PlacedRun(tiny_config(seed=seed), Place(tmp_path))], Monitor())
            assert ended.result is not None
            for worker in workers._idle:
                for process in worker.pool._processes.values():
                    process.kill()
                    process.join()
                with pytest.raises(BrokenProcessPool):  # known to the pool, too
                    worker.pool.submit(os.getpid).result(60)


def test_sigterm_to_every_process_leaves_workers_to_the_command(tiny_config: Configs, tmp_path: Path) -> None:
    def processes(workers: Workers) -> list[int]:
        return [number for worker in workers._idle for number in worker.pool._processes]

    with Copies(1) as workers:
        list(workers.run([PlacedRun(tiny_config(), Place(tmp_path))], Monitor()))
        (before,) = processes(workers)
        os.kill(before, signal.SIGTERM)
        (ended,) = workers.run([PlacedRun(tiny_config(seed=1), Place(tmp_path))], Monitor())
        assert ended.result is not None
        assert processes(workers) == [before]


class Stops(Notes):
    """Asks every run to stop at the first validation after its start."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor

    def validated(self, config: RunConfig, validation: Validation) -> None:
        super().validated(config, validation)
        if validation.step:
            self.executor.stop(config)


def test_one_run_is_stopped_and_the_next_one_is_taken_only_then(
    executor: Executor, tiny_config: Configs, tmp_path: Path
) -> None:
    order: list[str] = []

    def jobs() -> Iterator[PlacedRun]:
        for seed in range(3):
            order.append(f"taken {seed}")
            yield PlacedRun(tiny_config(seed=seed, epochs=2000), Place(tmp_path))

    for one in executor.run(jobs(), Stops(executor)):
        assert isinstance(one.error, InterruptedRunError)
        order.append(f"ended {one.config.seed}")
    places = 1 if isinstance(executor, ThisProcess) else 2
    assert order[:places] == [f"taken {seed}" for seed in range(places)]
    assert order.index("taken 2") > min(order.index(f"ended {seed}") for seed in range(2))
    assert all(checkpoint.exists(folder) for folder in tmp_path.iterdir())


def test_ctrl_c_is_heard_after_the_last_step_too(
    executor: Executor, tiny_config: Configs, tmp_path: Path
) -> None:
    """Else a comparison goes on with its next stage, for hours perhaps."""
    ended = executor.run([PlacedRun(tiny_config(), Place(tmp_path))], Monitor())
    assert next(ended).result is not None
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(ended)


def test_an_error_in_a_run_is_its_end_and_nobody_elses(
    executor: Executor, tiny_config: Configs, tmp_path: Path
) -> None:
    wrong = replace(tiny_config(), batch_size=1000)
    jobs = [PlacedRun(config, Place(tmp_path)) for config in (wrong, tiny_config(seed=1))]
    ended = {one.config.seed: one for one in executor.run(jobs, Monitor())}
    assert isinstance(ended[0].error, ConfigurationError)
    assert ended[1].result is not None


def test_engines_are_checked_before_anything_is_started() -> None:
    with pytest.raises(ConfigurationError, match="Unknown engine 'dask' in --engine: choose from local, ray"):
        executor_for("dask", 2)
    with pytest.raises(
        ConfigurationError, match="--address auto names a Ray cluster: give --engine ray, too"
    ):
        executor_for("local", 2, address="auto")
    assert isinstance(executor_for("local", 1), ThisProcess)
    assert isinstance(executor_for("local", 2), Workers)


@pytest.mark.parametrize(("given", "at_a_time"), [([], 2), (["threads=2"], 2), (["threads=3"], 1)])
def test_as_many_runs_as_there_is_room_for_at_a_time_however_threads_are_given(
    given: list[str], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    settings = settings_from(("the command line", parse_settings(given)))
    around = EngineOptions().surroundings("compare", [])
    assert isinstance(around.executor(settings.threads), {1: ThisProcess, 2: Workers}[at_a_time])


@pytest.mark.parametrize("command", ["compare", "reproduce adding", "sweep adding"])
def test_commands_hand_their_runs_to_the_engine_that_is_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("sweep"):
        pytest.importorskip("optuna", reason="sweeps need optuna: pip install -e '.[sweep]'")
    asked = []

    class Here(ThisProcess):
        def run(self, jobs: Iterable[Job], monitor: Monitor) -> Iterator[Ended]:
            asked.append("ran")
            return super().run(jobs, monitor)

    def instead(engine: str, processes: int | None, **options: object) -> Executor:
        asked.append((engine, processes, options["address"]))
        return Here()

    monkeypatch.setattr("pathspace.experiments.execution.executor_for", instead)
    for name in ("report.files.draw", "sweep.report.draw"):
        monkeypatch.setattr(f"pathspace.experiments.{name}", lambda _: (b"", "<svg></svg>"))
    tiny = [
        word for name in ("train", "validation", "test") for word in ("--set", f"task_options.{name}_size=64")
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
def like_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What stands for Ray where it is not installed: it does a task when its result is asked for."""

    class RayError(Exception):
        pass

    def remote(**_options: object) -> Callable[..., object]:
        return lambda function: SimpleNamespace(remote=lambda *arguments: lambda: function(*arguments))

    fake = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {})),
        started=[],
        init=lambda *_, **options: fake.started.append(options),
        remote=remote,
        wait=lambda tasks, **_: (tasks[:1], tasks[1:]),
        get=lambda task: task(),
        shutdown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delitem(sys.modules, "pathspace.experiments.ray_tasks", raising=False)
    yield fake
    sys.modules.pop("pathspace.experiments.ray_tasks", None)


def test_ray_that_is_started_here_takes_all_processors(like_ray: SimpleNamespace) -> None:
    tasks = import_module("pathspace.experiments.ray_tasks")
    found = tasks.computed(abs, [-1, -2], address="", processes=None)
    assert list(found) == [1, 2]
    assert list(tasks.computed(abs, [-1], address="", processes=3)) == [1]
    tasks.connect("", None, threads=2)
    processors = os.cpu_count() or 1
    assert [options["num_cpus"] for options in like_ray.started] == [processors, 3, 2 * processors]


def test_ray_that_does_not_start_in_time_is_no_mistake_of_ours(like_ray: SimpleNamespace) -> None:
    def init(**_options: object) -> None:
        raise Exception("The current node timed out during startup.")  # so has Ray 2.60

    like_ray.init = init
    tasks = import_module("pathspace.experiments.ray_tasks")
    with pytest.raises(
        ConfigurationError, match=r"cannot be reached or started \(The current node timed out"
    ):
        tasks.connect("", 2)


@pytest.mark.slow
def test_the_cells_of_a_table_are_tasks_of_ray_too() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    code = (
        "import math; from pathspace.experiments.ray_tasks import computed\n"
        "print(sorted(computed(math.sqrt, [9.0, 4.0, 1.0], address='', processes=2)))\n"
        "try:\n    list(computed(math.sqrt, [-1.0], address='', processes=1))\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "[1.0, 2.0, 3.0]", done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stderr
