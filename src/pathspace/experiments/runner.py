"""Does the jobs of a command: in this process, in several of this machine (joblib's loky), or as tasks of Ray.

A job is a function of its configuration: who does it changes how long it takes, not what comes out.
A run has a folder with its checkpoint while it lasts, and its result afterwards. So one that died
with its process, or was stopped, goes on from there.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.run import CHECKPOINT, RESULT, RunConfig, RunResult
from pathspace.experiments.storage import make_folder, read_checked, write_checked
from pathspace.experiments.tasks import build_task
from pathspace.experiments.terminal import SECONDS_BETWEEN_NOTES, Monitor, Written, pass_on
from pathspace.tools.processes import Processes

if TYPE_CHECKING:
    from pathspace.experiments.tasks.task import Task

RUNS = "runs"

ENGINES = ("local", "ray")
SMALLEST_STORE = 100 * 2**20  # bytes of Ray's shared memory: results are small


class WorkerDiedError(ConfigurationError):
    """The process that did a job is no more, and so it was when the job was tried again."""


class Work(Protocol):
    """Work that can be pickled."""

    @property
    def key(self) -> str:
        """A name that no other job of the command has."""
        ...

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.key

    def __call__(self, monitor: Monitor) -> Any:
        """Do the work, from its checkpoint where there is one."""
        ...


class Job(Work):
    """Work whose result is kept as JSON in a file; what is there is not done again.

    Attributes:
        kind: The dataclass of the result, which has a property `words`.
    """

    kind: type

    @property
    def file(self) -> Path:
        """The file of the result."""
        raise NotImplementedError

    def stored(self) -> Any | None:
        """Return the result that is there already; None if there is none."""
        try:
            return read_checked(self.file, TypeAdapter(self.kind).validate_python)
        except FileNotFoundError:
            return None

    def keep(self, result: Any) -> str:
        """Write the result, and say in a few words what it is."""
        make_folder(self.file.parent)
        write_checked(self.file, TypeAdapter(self.kind).dump_python(result, mode="json"))
        return result.words


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: a result or an error."""

    job: Any
    result: Any = None
    error: BaseException | None = None

    def value(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True)
class Runner:
    """Does jobs; use it in a `with` statement.

    Attributes:
        engine: A name in `ENGINES`.
        processes: Jobs at a time; None: see `runs_at_a_time`, and as many as Ray has room for.
        address: Of a Ray cluster; empty: Ray is started here, and ends with the statement.
        threads: Of a job.
        gpus: Of a job, on a cluster.
    """

    engine: str = "local"
    processes: int | None = 1
    address: str = ""
    threads: int = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES, "--engine")
        if self.address and self.engine != "ray":
            raise ConfigurationError(
                f"--address {self.address} names a Ray cluster: give --engine ray, too."
            )
        if self.processes is not None and self.processes < 1:
            raise ConfigurationError(
                f"The option --workers is {self.processes}: give a whole number from 1 on."
            )

    def __enter__(self) -> Runner:
        if self.engine == "ray":
            connect(self.address, self.processes, self.threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.engine == "ray":
            _ray().shutdown()
        elif kind is not None and self.places() > 1:  # nobody wants what they are at
            Processes(self.places(), self.threads).kill()

    def all_results(self, jobs: Iterable[Job], monitor: Monitor, title: str) -> list[Any]:
        """Return the results of all jobs in their order, doing those that have none yet.

        Raises:
            ConfigurationError: A job could not be done as asked.
            KeyboardInterrupt: The user stopped; the checkpoints of the jobs in progress are there.
        """
        jobs = list(jobs)
        results = {job.key: job.stored() for job in jobs}
        waiting = [job for job in jobs if results[job.key] is None]
        monitor.stage(title, len(jobs), len(jobs) - len(waiting))
        for ended in self.run(waiting, monitor):
            results[ended.job.key] = ended.value()
            monitor.finished(ended.job.label, ended.job.keep(ended.result))
        return [results[job.key] for job in jobs]

    def run(self, jobs: Iterable[Work], monitor: Monitor) -> Iterator[JobOutcome]:
        """Do all jobs and yield how each ended, as it comes in.

        The next job is taken when there is room for it, after all that has ended was yielded.
        """
        places = self.places()
        if self.engine == "local" and places == 1:
            for job in jobs:
                yield _here(job, monitor)
            return
        with TemporaryDirectory(prefix="pathspace-", ignore_cleanup_errors=True) as notes:
            yield from self._in_processes(iter(jobs), places, monitor, Path(notes))

    def _in_processes(
        self, jobs: Iterator[Work], places: int, monitor: Monitor, notes: Path
    ) -> Iterator[JobOutcome]:
        """Do jobs in other processes, which say in the folder `notes` how far they are."""
        submit = self._submitter(places, notes)
        died: list[Work] = []
        while True:
            # No job is taken once one has died: a pool loses all of its processes with one.
            for job, future in _as_they_end(jobs, places, submit, died, monitor, notes):
                if _has_died(future.exception()):
                    monitor.noted(job.label, "its process died: going on from its last checkpoint.")
                    died.append(job)
                else:
                    yield _ended(job, future)
            if not died:
                return
            # One at a time: it is then known whose process dies next.
            for job, future in _as_they_end(iter(died), 1, submit, (), monitor, notes):
                yield _ended(job, future)
            died = []

    def places(self) -> int:
        """Return how many jobs are done at a time."""
        if self.processes is not None:
            return self.processes
        if self.engine == "local":
            return runs_at_a_time(self.threads)
        there = _ray().cluster_resources()
        places = there.get("CPU", 0) // self.threads
        if self.gpus:
            places = min(places, there.get("GPU", 0) // self.gpus)
        return max(1, int(places))

    def _submitter(self, places: int, notes: Path) -> Callable[[Work], Future[Any]]:
        if self.engine == "ray":
            options = {"num_cpus": self.threads, "num_gpus": self.gpus, "max_retries": 0}
            task = _ray().remote(**options)(_there)
            return lambda job: (
                task.options(name=job.label).remote(job, versions(), notes / job.key).future()
            )

        processes = Processes(places, self.threads)
        return lambda job: processes.submit(_there, job, versions(), notes / job.key)


def runs_at_a_time(threads: int = 1) -> int:
    """Return how many jobs of so many threads are done here at a time by default: two, or one without room for two."""
    return max(1, min(2, (os.cpu_count() or 1) // threads))


def connect(address: str, processes: int | None, threads: int = 1) -> None:
    """Join the Ray cluster at an address, or start Ray here, for so many processes; None: one for each processor."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            _ray().init(address, **quiet)
        else:
            _ray().init(
                num_cpus=(processes or os.cpu_count() or 1) * threads,
                include_dashboard=False,
                object_store_memory=SMALLEST_STORE,
                _node_ip_address="127.0.0.1",  # nobody else is to reach it
                **quiet,
            )
    except ImportError:
        raise
    except Exception as error:
        # Ray's own may be no more than that, as where a node does not start in time
        raise ConfigurationError(
            f"Ray cannot be reached or started ({' '.join(str(error).split())}): give the --address of a running "
            "cluster, or none to start Ray here."
        ) from error


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    import torch

    import pathspace

    return {
        "pathspace": pathspace.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _ray() -> Any:
    # before it is imported: nothing is told to anybody, and nothing is said about that
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return import_module("ray")  # by name: type checks are the same where it is not installed


def _here(job: Work, monitor: Monitor) -> JobOutcome:
    try:
        return JobOutcome(job, job(monitor))
    except Exception as error:
        return JobOutcome(job, error=error)


def _as_they_end(
    jobs: Iterator[Work],
    places: int,
    submit: Callable[[Work], Future[Any]],
    died: Sequence[Work],
    monitor: Monitor,
    notes: Path,
) -> Iterator[tuple[Work, Future[Any]]]:
    """Submit jobs while there is room and none has died, and yield each that has ended."""
    running: dict[Future[Any], Work] = {}
    while True:
        room = 0 if died else places - len(running)
        for job in islice(jobs, room):
            running[submit(job)] = job
        if not running:
            return
        for future in wait(running, SECONDS_BETWEEN_NOTES, FIRST_COMPLETED).done:
            job = running.pop(future)
            (notes / job.key).unlink(missing_ok=True)
            yield job, future
        pass_on(notes, monitor)


def _there(job: Work, wanted: dict[str, str], note: Path) -> Any:
    """Do a job in another process, which leaves in the file `note` how far it is."""
    here = versions()
    for name, version in wanted.items():
        if here.get(name) != version:
            raise ConfigurationError(
                f"A machine of the cluster has {name} {here.get(name)}, and the command {version}, which may give "
                "other results: install the same version there."
            )
    return job(Written(note))


def _has_died(error: BaseException | None) -> bool:
    if isinstance(error, BrokenProcessPool):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return "RayError" in names and "RayTaskError" not in names


def _ended(job: Work, future: Future[Any]) -> JobOutcome:
    error = future.exception()
    if error is None:
        return JobOutcome(job, future.result())
    if _has_died(error):
        error = WorkerDiedError(
            f"The process of {job.label!r} died, perhaps as memory ran out: continue with --resume --workers 1."
        )
    cause = getattr(error, "cause", None)  # of Ray's error around ours
    return JobOutcome(job, error=cause if isinstance(cause, Exception) else error)


@dataclass(frozen=True)
class PlacedRun(Job):
    """A run, and the folder of its checkpoint and its result; see `runner.Job`.

    What is there is taken, or continued; a finished run of another device is taken as it is.
    """

    config: RunConfig
    folder: Path
    data_dir: Path | None = None
    checkpoint_every: int = 200
    device: str = "cpu"
    kind = RunResult

    @property
    def file(self) -> Path:
        """See `runner.Job`."""
        return self.folder / RESULT

    @property
    def key(self) -> str:
        """See `runner.Job`."""
        return self.config.key

    @property
    def label(self) -> str:
        """See `runner.Job`."""
        return self.config.label

    def __call__(self, monitor: Monitor) -> RunResult:
        """Do the run, from its checkpoint if there is one."""
        from pathspace.experiments.engine import run

        config = self.config
        return run(
            config,
            load_task(config.task, config.task_options, self.data_dir),
            folder=make_folder(self.folder),
            checkpoint_every=self.checkpoint_every,
            resume=True,
            listener=monitor,
            device=self.device,
        )

    def keep(self, result: RunResult) -> str:
        """Replace the checkpoint by the result, and say how the run ended."""
        words = super().keep(result)
        self.remove_checkpoint()
        return words

    def stored(self) -> RunResult | None:
        """See `runner.Job`."""
        result = super().stored()
        if result is None or result.config.key != self.key:
            return None
        self.remove_checkpoint()  # it was killed between the two
        return result

    def remove_checkpoint(self) -> None:
        """Delete the checkpoint of a run that is done."""
        (self.folder / CHECKPOINT).unlink(missing_ok=True)


@dataclass(frozen=True)
class Runs:
    """Folder, monitor, data, runner and device of a command's runs.

    Runs are kept in the folder `runs` of the output, and what is there is taken, or continued. By
    default this process does them, one after the other.
    """

    output: Path
    monitor: Monitor = field(default_factory=Monitor)
    data_dir: Path | None = None
    runner: Runner = field(default_factory=Runner)
    device: str = "cpu"

    def job(self, config: RunConfig, checkpoint_every: int) -> PlacedRun:
        """Return a run as a job that keeps a checkpoint every so many steps."""
        folder = self.output / RUNS / config.key
        return PlacedRun(config, folder, self.data_dir, checkpoint_every, self.device)

    def results(
        self, configs: Iterable[RunConfig], title: str, checkpoint_every: int = 200
    ) -> list[RunResult]:
        """Return the results of runs, all different, in their order; see `Runner.all_results`."""
        jobs = [self.job(config, checkpoint_every) for config in configs]
        return self.runner.all_results(jobs, self.monitor, title) if jobs else []


def load_task(name: str, options: Mapping[str, Any], data_dir: Path | None) -> Task:
    """Return the task that `tasks.build_task` builds; the last one is kept, for all runs of a comparison share it."""
    written = json.dumps(dict(options), sort_keys=True)
    return _task(name, written, data_dir, os.environ.get("PATHSPACE_DATA"))


@functools.lru_cache(maxsize=1)
def _task(name: str, options: str, data_dir: Path | None, _environment: str | None) -> Task:
    return build_task(name, json.loads(options), data_dir=data_dir)
