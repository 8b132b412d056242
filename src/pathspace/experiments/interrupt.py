"""Ctrl-C as a flag, so that a run ends between two steps and not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed_interrupt(*, patient: bool = False) -> Iterator[threading.Event]:
    """While it lasts, the first Ctrl-C sets the event handed out; the second one interrupts as usual.

    Args:
        patient: Take any number of them for one: torchrun passes on what the terminal has sent already.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # Python delivers signals to the main thread only
        return
    before = signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: object) -> None:
        event.set()
        if not patient:
            signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
