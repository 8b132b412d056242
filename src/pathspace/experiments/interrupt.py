"""Ctrl-C as a flag, so that a run ends between two steps and not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed_interrupt() -> Iterator[threading.Event]:
    """Set the yielded event at the first Ctrl-C; the second one interrupts as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # Python delivers signals to the main thread only
        return
    before = signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
