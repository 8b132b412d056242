"""Runs as tasks of Ray: on this machine, or on a cluster that others may use.

Every run is one task. What it reports goes to a small actor, the board, which the command reads; there a run also sees
that it is to stop. Results come back to the command, which writes them where a run here would have: the machines of a
cluster need not share a file system. Where they do not, a run that is moved to another machine begins anew.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from pathspace.experiments.configuration import versions
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.executor import Ended, Job, Messages, Several, WorkerDiedError

if TYPE_CHECKING:
    from pathspace.experiments.monitor import Monitor
    from pathspace.experiments.run import RunConfig, RunResult

# Before Ray is imported: nothing is told to anybody, and nothing is said about that.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ray: Any = import_module("ray")  # by name: type checks are the same where it is not installed
RayError, RayTaskError = ray.exceptions.RayError, ray.exceptions.RayTaskError

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_QUESTIONS = 1.0  # of a run that asks whether it is to stop
SECONDS_TO_STOP = 60.0
SMALLEST_STORE = 100 * 2**20  # bytes of shared memory: results are small


class RayTasks(Several[Any]):
    """Does jobs as tasks of Ray; use it in a `with` statement.

    Args:
        address: Of a cluster, as `ray.init` takes it; empty: Ray is started here for the time of the statement.
        processes: Tasks at a time; None: as many as the cluster has processors for.
        threads: Processors of a task.
        gpus: GPUs of a task.
    """

    def __init__(self, address: str, processes: int | None, *, threads: int = 1, gpus: int = 0) -> None:
        self._address, self._processes = address, processes
        self._threads, self._gpus = threads, gpus
        self._running: dict[Any, RunConfig] = {}

    def __enter__(self) -> Self:
        connect(self._address, self._processes, self._threads)
        board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board)
        self._board: Any = board.remote()
        options = {"num_cpus": self._threads, "num_gpus": self._gpus, "max_retries": 0}
        self._task: Any = ray.remote(**options)(_work)
        return self

    def __exit__(self, *_: object) -> None:
        # After an error: the runs in progress end with a checkpoint.
        if self._running:
            with contextlib.suppress(RayError):
                ray.get(self._board.stop_all.remote())
                ray.wait(list(self._running), num_returns=len(self._running), timeout=SECONDS_TO_STOP)
            for task in self._running:
                ray.cancel(task, force=True)
        ray.shutdown()

    def run_places(self) -> int:
        """See `executor.Several`."""
        if self._processes is not None:
            return self._processes
        there = ray.cluster_resources()
        places = there.get("CPU", 0) // self._threads
        return max(1, int(min(places, there.get("GPU", 0)) if self._gpus else places))

    def begin(self, job: Job, *, again: bool) -> Any:
        """See `executor.Several`."""
        task = self._task.options(name=job.config.label).remote(job, again, self._board, versions())
        self._running[task] = job.config
        return task

    def wait(self, running: Iterable[Any], monitor: Monitor) -> list[Any]:
        """See `executor.Several`."""
        tasks = list(running)
        done, _ = ray.wait(tasks, num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
        with contextlib.suppress(RayError):  # the board is on its way to another process
            for name, arguments in ray.get(self._board.take.remote()):
                getattr(monitor, name)(*arguments)
        return done

    def end(self, handle: Any, job: Job) -> Ended:
        """See `executor.Several`."""
        del self._running[handle]
        try:
            result = ray.get(handle)
        except RayTaskError as error:
            cause = error.cause
            return Ended(job.config, error=cause if isinstance(cause, Exception) else error)
        except RayError as error:
            died = WorkerDiedError(
                f"The process of the run {job.config.label!r} died ({type(error).__name__}), perhaps for want of "
                "memory: continue with --resume."
            )
            return Ended(job.config, error=died)
        job.keep(result)
        return Ended(job.config, result)

    def stop(self, config: RunConfig) -> None:
        """See `Executor.stop`."""
        self._board.stop.remote(config.key)


def connect(address: str, processes: int | None, threads: int = 1) -> None:
    """Join a cluster, or start Ray here, until `ray.shutdown`.

    Args:
        address: See `RayTasks`.
        processes: Tasks at a time, where Ray is started here; None: as many as there are processors.
        threads: Of a task.

    Raises:
        ConfigurationError: There is no such cluster, or Ray does not start.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            ray.init(address, **quiet)
        else:
            ray.init(
                num_cpus=(processes or os.cpu_count() or 1) * threads,
                include_dashboard=False,
                object_store_memory=SMALLEST_STORE,
                _node_ip_address="127.0.0.1",  # nobody else is to reach it
                **quiet,
            )
    except Exception as error:  # Ray's own may be no more than that, as where a node does not start in time
        raise ConfigurationError(
            f"Ray cannot be reached or started ({' '.join(str(error).split())}): give the --address of a running "
            "cluster, or none to start Ray here."
        ) from error


def computed(
    compute: Callable[[Any], Any], cells: Sequence[Any], *, address: str, processes: int | None
) -> Iterator[Any]:
    """Compute the cells of a table, each in a task, and yield the results as they come in.

    Args:
        compute: Computes one.
        cells: What to compute.
        address: See `RayTasks`.
        processes: See `connect`.

    Raises:
        ConfigurationError: See `connect`; or a process died more often than Ray tries again.
    """
    connect(address, processes)
    try:
        task: Any = ray.remote(num_cpus=1)(compute_cell)
        left = [task.remote(compute, cell, versions()) for cell in cells]
        while left:
            (done,), left = ray.wait(left, num_returns=1)
            try:
                yield ray.get(done)
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from None
            except RayError as error:
                raise ConfigurationError(
                    f"A process of Ray died ({type(error).__name__}), perhaps for want of memory: give the command "
                    "again."
                ) from error
    finally:
        ray.shutdown()


def compute_cell(compute: Callable[[Any], Any], cell: Any, wanted: dict[str, str]) -> Any:
    """Compute one cell in a process of Ray."""
    _check_versions(wanted)
    return compute(cell)


class Board:
    """What runs report and the command has not read yet, and the keys of the runs that are to stop."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._stopped: set[str] = set()
        self._all = False

    def tell(self, message: Any) -> None:
        """Keep a message."""
        self._messages.append(message)

    def take(self) -> list[Any]:
        """Return all messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def stop(self, key: str) -> None:
        """Ask one run to stop."""
        self._stopped.add(key)

    def stop_all(self) -> None:
        """Ask every run to stop."""
        self._all = True

    def is_stopped(self, key: str) -> bool:
        """Say whether a run is to stop."""
        return self._all or key in self._stopped


def _work(job: Job, again: bool, board: Any, wanted: dict[str, str]) -> RunResult:
    """Do a job in a process of Ray."""
    _check_versions(wanted)
    return job(Messages(board.tell.remote), _stop_asked(board, job.config.key), again=again)


def _stop_asked(board: Any, key: str) -> Callable[[], bool]:
    """Return what says whether a run is to stop, and asks no more often than every second."""
    stopped, asked = False, time.monotonic()

    def should_stop() -> bool:
        nonlocal stopped, asked
        if not stopped and time.monotonic() - asked > SECONDS_BETWEEN_QUESTIONS:
            asked = time.monotonic()
            with contextlib.suppress(RayError):
                stopped = ray.get(board.is_stopped.remote(key))
        return stopped

    return should_stop


def _check_versions(wanted: dict[str, str]) -> None:
    here = versions()
    for name, version in wanted.items():
        if here.get(name) != version:
            raise ConfigurationError(
                f"A machine of the cluster has {name} {here.get(name)}, and the command {version}, which may give "
                "other results: install the same version there."
            )
