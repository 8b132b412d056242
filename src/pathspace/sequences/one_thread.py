"""Linear algebra in one thread: small products are faster so, and sums are the same whatever the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

_lock = threading.Lock()
_inside = 0
_limits: threadpool_limits | None = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Bound the libraries of linear algebra to one thread while the block runs, or others like it in other threads.

    The bound holds for the whole process. Of blocks that overlap, the first sets it and the last
    gives it back: one that ended between them would free the others, and the last would bring back
    the bound itself.
    """
    global _inside, _limits
    with _lock:
        if _inside == 0:
            _limits = threadpool_limits(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _limits is not None:
                _limits.restore_original_limits()
