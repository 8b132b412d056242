"""Worker processes on this machine: the parent alone hears Ctrl-C and SIGTERM; workers send their progress back."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Self

from pathspace.children import deaf_children, end_with_parent
from pathspace.experiments.executor import Ended, Job, Messages, Several, WorkerDiedError

if TYPE_CHECKING:
    from pathspace.experiments.monitor import Monitor
    from pathspace.experiments.run import RunConfig, RunResult

SECONDS_BETWEEN_LOOKS = 0.1

# Set once in each worker: what sends a message, and what says whether the parent asks its run to stop.
_channel: tuple[Callable[[Any], None], Callable[[], bool]] | None = None


class Workers(Several["_Worker"]):
    """Processes that do jobs; use it in a `with` statement.

    Args:
        processes: How many. They start with the first jobs and last until the end of the statement, because loading
            PyTorch takes each of them seconds.
    """

    def __init__(self, processes: int) -> None:
        # "spawn": a forked copy of a process that has used PyTorch's threads may hang.
        self._context = multiprocessing.get_context("spawn")
        self._ears, self._bell = self._context.Pipe(duplex=False)
        self._processes = processes
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error: the runs in progress end with a checkpoint, the others never begin.
        workers = [*self._busy, *self._idle]
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.pool.shutdown(cancel_futures=True)
        self._ears.close()
        self._bell.close()

    def run_places(self) -> int:
        """See `executor.Several`."""
        return self._processes

    def begin(self, job: Job, *, again: bool) -> _Worker:
        """See `executor.Several`."""
        while True:
            worker = self._idle.pop() if self._idle else _Worker(self._context)
            try:
                worker.begin(job, again, lambda _: self._bell.send_bytes(b"."))
            except BrokenProcessPool:  # killed while it had nothing to do
                worker.end()
            else:
                self._busy.append(worker)
                return worker

    def wait(self, running: Iterable[_Worker], monitor: Monitor) -> list[_Worker]:
        """See `executor.Several`."""
        workers = list(running)
        connection.wait([self._ears, *(worker.messages for worker in workers)], SECONDS_BETWEEN_LOOKS)
        while self._ears.poll():
            self._ears.recv_bytes()
        done = [worker for worker in workers if worker.future.done()]
        for worker in workers:
            worker.pass_on(monitor)
        return done

    def end(self, handle: _Worker, job: Job) -> Ended:
        """See `executor.Several`."""
        self._busy.remove(handle)
        error = handle.future.exception()
        if isinstance(error, BrokenProcessPool):
            handle.end()
            error = WorkerDiedError(
                f"The process of the run {job.config.label!r} died, perhaps for want of memory: continue with "
                "--resume --workers 1."
            )
        else:
            self._idle.append(handle)
        if error is not None:
            return Ended(
                job.config, error=error if isinstance(error, Exception) else RuntimeError(repr(error))
            )
        return Ended(job.config, handle.future.result())

    def stop(self, config: RunConfig) -> None:
        """See `Executor.stop`."""
        for worker in self._busy:
            if worker.config == config:
                worker.stopped.set()


class _Worker:
    """One process, with a channel of its own: what it holds when it is killed holds up nobody else."""

    future: Future[RunResult]
    config: RunConfig

    def __init__(self, context: Any) -> None:
        self.messages, sender = context.Pipe(duplex=False)
        self.stopped = context.Event()
        self.pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_start_worker, initargs=(sender, self.stopped)
        )

    def begin(self, job: Job, again: bool, done: Callable[[object], object]) -> None:
        self.stopped.clear()
        self.config = job.config
        with deaf_children():
            self.future = self.pool.submit(_work, job, again)
        self.future.add_done_callback(done)

    def pass_on(self, monitor: Monitor) -> None:
        """Give the monitor what has come in."""
        with contextlib.suppress(EOFError, OSError):
            while self.messages.poll():
                name, arguments = self.messages.recv()
                getattr(monitor, name)(*arguments)

    def dismiss(self) -> None:
        """Ask the run in progress to stop, and listen no longer."""
        self.stopped.set()
        self.messages.close()

    def end(self) -> None:
        """Let go of a process that died."""
        self.dismiss()
        self.pool.shutdown()


def _start_worker(sender: Any, stopped: Any) -> None:
    global _channel
    end_with_parent()
    for one in (signal.SIGINT, signal.SIGTERM):  # which a scheduler may send to every process
        signal.signal(one, signal.SIG_IGN)

    def send(message: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any longer: the run is to write its checkpoint
            sender.send(message)

    _channel = send, stopped.is_set


def _work(job: Job, again: bool) -> RunResult:
    assert _channel is not None, "the initializer of the worker has run"
    send, should_stop = _channel
    return job(Messages(send), should_stop, again=again)
