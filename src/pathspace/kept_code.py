"""Numba's files of compiled code: damaged ones are written anew."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def recompile_if_damaged(compiled: Any) -> Any:
    """Let a function of `numba.njit(cache=True)` be compiled anew where its files on disk cannot be read.

    Numba raises what the damage leads to (`UnpicklingError`, `EOFError`, ...), at every call until
    the files are deleted. A process that was killed, a full disk or a copied folder may leave such
    files.

    Args:
        compiled: the function, on which this acts in place.

    Returns:
        The same function.
    """
    kept = compiled._cache
    load = kept.load_overload
    save = kept.save_overload

    def load_or_none(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:
            # None stands for code that is not there: Numba compiles it
            _empty(kept)
            return None

    def save_if_possible(*arguments: Any) -> None:
        try:
            save(*arguments)
        except Exception:
            # the code is compiled and runs, and the next process compiles it again
            _empty(kept)

    kept.load_overload = load_or_none
    kept.save_overload = save_if_possible
    return compiled


def _empty(kept: Any) -> None:
    """Write an index without entries, if the folder may be written."""
    with suppress(OSError):
        kept.flush()
