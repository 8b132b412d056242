"""Memory limits of this process, and errors where a task needs more."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def machine_memory() -> int | None:
    """Return the bytes that this process may take at most, or None where the system does not say.

    That is the memory of the machine, or less where a container or `ulimit -v` allows less.
    """
    found = [_physical(), _address_space(), *(_limit_in(file) for file in _CGROUPS)]
    return min((size for size in found if size is not None), default=None)


def check_memory(needed: float, what: str, instead: str) -> None:
    """Refuse a task that needs more memory than there is.

    Args:
        needed: bytes that the task takes at least.
        what: the task, as the subject of a sentence in the plural.
        instead: what to do about it.

    Raises:
        ValueError: if the task needs more.
    """
    there = machine_memory()
    if there is not None and needed > there:
        raise ValueError(
            f"{what} take at least {_in_words(needed)} of memory, and {_in_words(there)} are there: {instead}"
        )


def _in_words(size: float) -> str:
    """Return a number of bytes in words."""
    if size >= 1e15:
        return "more than a million GB"
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _physical() -> int | None:
    # Windows has no sysconf
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _address_space() -> int | None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _limit_in(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        return int(file.read_text())
    return None
