"""Who does runs: this process, worker processes here (`workers`), or a Ray cluster (`ray_tasks`).

All of them are an `Executor`, so that a comparison, a recipe and a sweep need not know which one works for them. A run
is a function of its configuration: who does it changes how long it takes, not what comes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from pathspace.experiments.engine import InterruptedRunError
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.interrupt import postponed_interrupt
from pathspace.experiments.monitor import Listener, Monitor
from pathspace.experiments.run import RunConfig, RunResult, Validation

TRIES = 2  # of a job whose process dies


class WorkerDiedError(ConfigurationError):
    """The process that did a run is no more, and so it was when the run was tried again."""


class Job(Protocol):
    """A run that reports its progress; it must be possible to pickle it."""

    @property
    def config(self) -> RunConfig:
        """What is to be run."""
        ...

    def __call__(
        self, listener: Listener, should_stop: Callable[[], bool] | None = None, *, again: bool = False
    ) -> RunResult:
        """Do the run; `again`, from its checkpoint, after the process that had begun it died."""
        ...

    def keep(self, result: RunResult) -> None:
        """Write the result to its place, if a process that did the job on another machine could not."""
        ...


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a result or with an error."""

    config: RunConfig
    result: RunResult | None = None
    error: Exception | None = None

    def value(self) -> RunResult:
        """Return the result, or raise the error."""
        if self.result is None:
            raise self.error or AssertionError("a job ends with a result or an error")
        return self.result


class Executor(Protocol):
    """Does jobs; use it in a `with` statement, whose end stops those that are still running."""

    def __enter__(self) -> Self:
        """Make ready."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop the runs in progress, which write their checkpoints, and begin no other."""
        ...

    def run(self, jobs: Iterable[Job], monitor: Monitor) -> Iterator[Ended]:
        """Do all jobs and yield how each ended, as it comes in.

        Args:
            jobs: What to do, no configuration twice. The next one is taken when somebody is free to do it, and after
                all that has ended was yielded.
            monitor: Told what the runs report, in this process.

        Raises:
            KeyboardInterrupt: The user stopped.
        """
        ...

    def stop(self, config: RunConfig) -> None:
        """Ask a run to end before its next step: with a checkpoint, and an `InterruptedRunError`."""
        ...


class ThisProcess:
    """Does one job after another where it is called."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, jobs: Iterable[Job], monitor: Monitor) -> Iterator[Ended]:
        """See `Executor.run`."""
        with postponed_interrupt() as interrupted:
            for job in jobs:
                key = job.config.key
                try:
                    ended = Ended(
                        job.config,
                        job(monitor, lambda key=key: interrupted.is_set() or key in self._stopped),
                    )
                except Exception as error:
                    if isinstance(error, InterruptedRunError) and key not in self._stopped:
                        raise KeyboardInterrupt from None
                    ended = Ended(job.config, error=error)
                yield ended
            if interrupted.is_set():  # after the last step of the last run
                raise KeyboardInterrupt

    def stop(self, config: RunConfig) -> None:
        """See `Executor.stop`."""
        self._stopped.add(config.key)


Handle = TypeVar("Handle")


class Several(ABC, Generic[Handle]):
    """Does several jobs at a time, in other processes.

    What is left to a subclass is one process's part: to begin a job, which gives a handle, and to see how it ended.
    """

    @abstractmethod
    def run_places(self) -> int:
        """Return how many jobs there is room for at a time."""

    @abstractmethod
    def begin(self, job: Job, *, again: bool) -> Handle:
        """Begin a job and return at once."""

    @abstractmethod
    def wait(self, running: Iterable[Handle], monitor: Monitor) -> list[Handle]:
        """Pass on what runs report, for a moment at most; return the handles of those that ended."""

    @abstractmethod
    def end(self, handle: Handle, job: Job) -> Ended:
        """Return how a job ended; with a `WorkerDiedError` if its process did."""

    def run(self, jobs: Iterable[Job], monitor: Monitor) -> Iterator[Ended]:
        """See `Executor.run`."""
        waiting = iter(jobs)
        running: dict[Handle, tuple[Job, int]] = {}
        more = True
        with postponed_interrupt() as interrupted:
            while True:
                if interrupted.is_set():
                    raise KeyboardInterrupt
                while more and len(running) < self.run_places():
                    job = next(waiting, None)
                    if job is None:
                        more = False
                    else:
                        running[self.begin(job, again=False)] = job, 1
                if not running:
                    return
                for handle in self.wait(running, monitor):
                    job, tries = running.pop(handle)
                    ended = self.end(handle, job)
                    if isinstance(ended.error, WorkerDiedError) and tries < TRIES:
                        monitor.noted(job.config, "its process died: going on from its last checkpoint.")
                        running[self.begin(job, again=True)] = job, tries + 1
                    else:
                        yield ended


class Messages(Listener):
    """A listener that hands on what it is told to another process, as pairs of a name and arguments."""

    def __init__(self, send: Callable[[tuple[str, tuple[object, ...]]], object]) -> None:
        self._send = send

    def started(self, config: RunConfig, steps: int) -> None:
        """See `monitor.Listener`."""
        self._send(("started", (config, steps)))

    def advanced(self, config: RunConfig, step: int, loss: float) -> None:
        """See `monitor.Listener`."""
        self._send(("advanced", (config, step, loss)))

    def validated(self, config: RunConfig, validation: Validation) -> None:
        """See `monitor.Listener`."""
        self._send(("validated", (config, validation)))

    def noted(self, config: RunConfig, sentence: str) -> None:
        """See `monitor.Listener`."""
        self._send(("noted", (config, sentence)))
