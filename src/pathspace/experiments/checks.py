"""What the values of settings and options have to be by themselves."""

from __future__ import annotations

import sys
from typing import Any


def is_whole(value: Any, least: int) -> bool:
    """Say whether a value is a whole number, `least` at least; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_real(value: Any) -> bool:
    """Say whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
