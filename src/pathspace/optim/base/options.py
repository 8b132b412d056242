"""Which metric an optimizer was asked for: an object, or the options of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pathspace.metrics import Path


def chosen_metric(metric: Path | None, make: Callable[..., Path], options: Mapping[str, Any]) -> Path:
    """The metric that was given, or one made of options.

    Raises:
        TypeError: it is no metric, both were given, or an option does not exist.
    """
    if metric is None:
        return make(**options)
    if not isinstance(metric, Path):
        raise TypeError(f"metric must be an object such as pathspace.metrics.Path(), got {metric!r}")
    if options:
        names = ", ".join(sorted(options))
        raise TypeError(f"{names}: give options of the metric to the metric itself, or no metric")
    return metric
