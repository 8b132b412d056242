"""Processes of this machine that work for this one, by joblib's loky: they end with it, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class Processes:
    """Processes that are started with the first job and last, for it takes seconds to load what they need.

    Args:
        count: how many.
        threads: of each, in the libraries of linear algebra.
    """

    def __init__(self, count: int, threads: int = 1) -> None:
        self._count = count
        self._threads = threads

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in one of the processes, and replace processes that died."""
        with _sigint_blocked():
            try:
                return self._pool().submit(function, *arguments)
            except BrokenProcessPool:  # one has died just now
                return self._pool().submit(function, *arguments)

    def kill(self) -> None:
        """End the processes at once, and what they are at."""
        self._pool().shutdown(kill_workers=True)

    def _pool(self) -> Any:
        from joblib.externals.loky import get_reusable_executor

        return get_reusable_executor(
            max_workers=self._count,
            timeout=300,
            initializer=_begin,
            initargs=(os.getpid(),),
            env=dict.fromkeys(THREADS, str(self._threads)),
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C, which goes to every process of the terminal.

    A blocked signal stays blocked in them from their first instruction on, so that none of them
    dies of it while it is still loading. Windows has no such thing: there what they do at their
    start has to do.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """Leave signals to the process that started this one, which a scheduler may send to all, and end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
