"""What the values of settings and options have to be by themselves."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from pathspace.experiments.errors import ConfigurationError


def is_whole(value: Any, least: int) -> bool:
    """Say whether a value is a whole number, `least` at least; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_real(value: Any) -> bool:
    """Say whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_several(name: str, values: Collection[Any]) -> None:
    """Raise a `ConfigurationError` unless a list holds something, and nothing twice."""
    listed = list(values)
    if not listed or any(value in listed[:place] for place, value in enumerate(listed)):
        raise ConfigurationError(f"The setting {name!r} is {listed!r}: give at least one, each once.")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise a `ConfigurationError` unless a setting, or one of its values, is a whole number, `least` at least."""
    if not is_whole(value, least):
        raise ConfigurationError(f"The setting {name!r} has {value!r}: give whole numbers from {least} on.")
