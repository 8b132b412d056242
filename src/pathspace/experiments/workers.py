"""Jobs in several processes: the parent alone hears Ctrl-C; workers send their progress back."""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Protocol

from pathspace.children import deaf_children, end_with_parent
from pathspace.experiments.engine import InterruptedRunError
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.interrupt import postponed_interrupt

if TYPE_CHECKING:
    from pathspace.experiments.monitor import Monitor
    from pathspace.experiments.run import RunConfig, RunResult

SECONDS_BETWEEN_LOOKS = 0.1

# Set once in each worker: where progress goes, and the event by which the parent asks all runs to stop.
_channel: tuple[Any, Any] | None = None


class Job(Protocol):
    """A run that reports its progress; it must be possible to pickle it."""

    def __call__(
        self,
        *,
        started: Callable[[RunConfig, int], None],
        advanced: Callable[[RunConfig, int, float], None],
        noted: Callable[[RunConfig, str], None],
        should_stop: Callable[[], bool] | None,
    ) -> RunResult:
        """Do the run."""
        ...


class Workers:
    """Processes that do jobs; use it in a `with` statement.

    Args:
        processes: How many. They start with the first jobs and last until the end of the statement, because loading
            PyTorch takes each of them seconds.
    """

    def __init__(self, processes: int) -> None:
        # "spawn": a forked copy of a process that has used PyTorch's threads may hang.
        context = multiprocessing.get_context("spawn")
        self._messages, self._stop = context.Queue(), context.Event()
        self._executor = ProcessPoolExecutor(
            processes,
            mp_context=context,
            initializer=_start_worker,
            initargs=(self._messages, self._stop),
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error: the runs in progress end with a checkpoint, the others never begin.
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)

    def run(self, jobs: Sequence[Job], monitor: Monitor) -> Iterator[RunResult]:
        """Do all jobs and yield their results as they come in.

        Args:
            jobs: What to do; begun in this order.
            monitor: Told what the workers report.

        Raises:
            ConfigurationError: A job raised one, or a worker died.
            KeyboardInterrupt: The user stopped. The jobs in progress write their checkpoints as the workers end.
        """
        with postponed_interrupt() as interrupted:
            with deaf_children():
                pending = {self._executor.submit(_work, job) for job in jobs}
            while pending:
                _pass_on(self._messages, monitor)
                if interrupted.is_set():
                    raise KeyboardInterrupt
                done = {future for future in pending if future.done()}
                pending -= done
                for future in done:
                    _pass_on(self._messages, monitor)
                    yield _result(future)


def _pass_on(messages: Any, monitor: Monitor) -> None:
    """Give the monitor what has come in; wait a moment for the first message."""
    try:
        name, arguments = messages.get(timeout=SECONDS_BETWEEN_LOOKS)
        while True:
            getattr(monitor, name)(*arguments)
            name, arguments = messages.get_nowait()
    except queue.Empty:
        return


def _result(future: Future[RunResult]) -> RunResult:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ConfigurationError(
            "A worker process died, perhaps for want of memory: continue with --resume --workers 1."
        ) from error
    except InterruptedRunError:
        raise KeyboardInterrupt from None


def _start_worker(messages: Any, stop: Any) -> None:
    global _channel
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _channel = (messages, stop)


def _work(job: Job) -> RunResult:
    assert _channel is not None, "the initializer of the worker has run"
    messages, stop = _channel
    return job(
        started=lambda config, steps: messages.put(("started", (config, steps))),
        advanced=lambda config, step, loss: messages.put(("advanced", (config, step, loss))),
        noted=lambda config, sentence: messages.put(("noted", (config, sentence))),
        should_stop=stop.is_set,
    )
