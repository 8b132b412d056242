"""Options that are out of their range, refused by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from inspect import signature
from numbers import Integral, Real
from typing import Any

from torch import Tensor

_NOT_NEGATIVE = (
    "lr",
    "momentum",
    "alpha",
    "eps",
    "weight_decay",
    "path_decay",
    "max_precondition_size",
)
_COUNTS = ("precondition_frequency", "ns_steps")


def checked(**options: Any) -> dict[str, Any]:
    """Options that param groups may have, by the names that they have in all rules.

    Raises:
        TypeError: one is to be a number, and is none.
        ValueError: one is out of its range.
    """
    check_not_negative(**{name: options[name] for name in _NOT_NEGATIVE if name in options})
    check_counts(**{name: options[name] for name in _COUNTS if name in options})
    betas: tuple[float, float] = options.get("betas", (0.0, 0.0))
    good = isinstance(betas, Sequence) and [
        isinstance(b, (Real, Tensor)) and 0 <= b < 1 for b in betas
    ]
    if good != [True, True]:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    return options


_BOUNDS = {"clip_norm", "clip_step"}


def check_names(owner: object, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that the class of an object does not have, beside those that its constructor names.

    Raises:
        TypeError: it does not have one; with the nearest that it has.
    """
    every = {*known, *signature(type(owner)).parameters}
    for name in given:
        if name not in every:
            # what bounds a step has two names, which are not spelled alike
            near = sorted(every & _BOUNDS) if name in _BOUNDS else []
            near = near or difflib.get_close_matches(name, sorted(every), 1)
            meant = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{type(owner).__name__} has no option '{name}'{meant}")


def check_not_negative(**options: float) -> None:
    """Refuse negative options.

    Raises:
        TypeError: an option is no number.
        ValueError: an option is negative, NaN or infinite.
    """
    check_numbers(**options)
    for name, value in options.items():
        if math.isnan(value):
            raise ValueError(f"{name} must not be negative or NaN, got {value}")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        if value == math.inf:
            raise ValueError(f"{name} must be finite, got {value}")


def check_numbers(**options: Any) -> None:
    """Refuse options that are no numbers.

    Raises:
        TypeError: an option is none.
    """
    for name, value in options.items():
        if not isinstance(value, (Real, Tensor)) or (
            isinstance(value, Tensor) and value.numel() != 1
        ):
            raise TypeError(f"{name} must be a number, got {value!r}")


def check_bounds(**options: float | None) -> None:
    """Refuse bounds that nothing meets.

    Raises:
        TypeError: an option is no number.
        ValueError: an option is not positive, or NaN; None is no bound.
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_numbers(**given)
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive or None, got {value}")


def check_counts(**options: int) -> None:
    """Refuse what does not count anything.

    Raises:
        ValueError: an option is no whole number, or less than 1.
    """
    for name, value in options.items():
        if not (isinstance(value, Integral) and value >= 1):
            raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
