"""The options that all optimizers with a metric share, and the metric that they ask for: an object, or options of one.

clip_norm   largest norm of g / sqrt(D) over all parameters (of g, outside the network); longer gradients are scaled
down to it. It does not depend on the scaling of the weights, as that of g would.
maximize    ascend instead.
metric      the metric, an object that may serve several optimizers of one network; None: one made of the options
of its class that stand beside it (power, damping, refresh_every, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathspace.metrics import DataDependent, Metric, Path
from pathspace.metrics.checks import check_names
from pathspace.metrics.data_dependent import DataOptions
from pathspace.metrics.path import PathOptions


class SharedOptions(PathOptions, total=False):
    """Of optimizers whose metric is that of the path norm."""

    clip_norm: float | None
    maximize: bool
    metric: Metric | None


class SharedDataOptions(DataOptions, total=False):
    """Of optimizers whose metric is data-dependent."""

    clip_norm: float | None
    maximize: bool
    metric: DataDependent | None


def with_metric(
    owner: object, options: Mapping[str, Any], kind: type[Path], **defaults: Any
) -> dict[str, Any]:
    """Return the shared options of an optimizer, with the metric that was given or one made of the other options."""
    of_data = {"alpha", *SharedDataOptions.__annotations__}
    check_names(
        owner,
        options,
        of_data if issubclass(kind, DataDependent) else SharedOptions.__annotations__,
    )
    shared = ("clip_norm", "maximize", "metric")
    own = {n: v for n, v in options.items() if n not in shared and (n, v) != ("alpha", None)}
    return {
        "clip_norm": options.get("clip_norm"),
        "maximize": options.get("maximize", False),
        "metric": chosen_metric(options.get("metric"), kind, own, **defaults),
    }


def chosen_metric(
    metric: Metric | None, kind: type[Path], options: Mapping[str, Any], **defaults: Any
) -> Metric:
    """Return the metric that was given, or one made of options.

    Args:
        metric: the metric: any, unless ``kind`` is data-dependent.
        kind: the class of the default.
        options: those that the user gave.
        defaults: others.

    Raises:
        TypeError: it is not of that kind, both were given, or an option does not exist.
    """
    if metric is None:
        return kind(**{**defaults, **options})
    if not isinstance(metric, kind if issubclass(kind, DataDependent) else Metric):
        raise TypeError(
            f"metric must be an object such as pathspace.metrics.{kind.__name__}(), got {metric!r}"
        )
    if options:
        names = ", ".join(sorted(options))
        raise TypeError(f"{names}: give options of the metric to the metric itself, or no metric")
    return metric
