"""Numba's compiler, whose code is kept on disk where there is a folder for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numba

from pathspace.kept_code import recompile_if_damaged


def njit(*, owns_arrays: bool = True, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as `numba.njit` does; with ``cache``, but where no folder may be written, for this process.

    Numba itself refuses a function whose code it can keep nowhere, so that an installation without
    a folder that its user may write could not be imported. Kept code that is damaged is compiled
    anew.

    Args:
        owns_arrays: whether references to arrays are counted. A function that makes no array, nor
            part of one, needs no count, which takes more than half of the time where functions hand
            on a tuple of many arrays.
        options: those of `numba.njit`. ``forceinline`` belongs on functions that get tuples of
            arrays: a call copies every field of every array, some hundred numbers, to the stack.
    """
    if not owns_arrays:
        options["_nrt"] = False

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            found = numba.njit(**options)(function)
        except RuntimeError:
            if not options.get("cache"):
                raise
            _say_so()
            for_now: dict[str, Any] = {**options, "cache": False}
            return numba.njit(**for_now)(function)
        return recompile_if_damaged(found) if options.get("cache") else found

    return compiled


def is_compiled(function: Any) -> bool:
    """Return whether the code of a function is there, in this process or on disk."""
    if function.signatures:
        return True
    try:
        return bool(function._cache._cache_file._load_index())
    except Exception:
        # no code is kept, or what is there cannot be read
        return False


@cache
def _say_so() -> None:
    warnings.warn(
        "compiled code can be kept in no folder, so that every process compiles it anew, which takes half a minute: "
        "set NUMBA_CACHE_DIR to a folder that may be written",
        RuntimeWarning,
        stacklevel=2,
    )
