"""Processes that work for another one: they end when it does, and leave Ctrl-C to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C, which goes to every process of the terminal.

    A blocked signal stays blocked in the children from their first instruction on, so that none of them dies of it
    while it is still loading. Windows has no such thing: there what they do at their start has to do.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_after_errors() -> Iterator[None]:
    """End the processes that the block started where an error leaves it, or Ctrl-C that they did not hear.

    A pool would wait for what they are at, for hours perhaps, and nobody wants its results.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def hear_quietly() -> None:
    """Let Ctrl-C end this process from now on, without a word: the one that started it tells the user."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with_parent() -> None:
    """End this process as soon as the one that started it is no more, killed for example: nobody wants its results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent.sentinel,), daemon=True).start()


def _wait_for(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
