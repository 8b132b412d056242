"""State tensors that are points in a rule's coordinates, and move with them when the metric changes.

A point u of the coordinates stands for the weight r u. With another r it stands for the same weight
as u r_old / r_new. What is made of gradients stays as it is: it belongs to directions that no
rescaling changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathspace.optim.rules.traits import traits_of


def points_of(rule: Optimizer, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the points in a rule's state; None where nobody knows."""
    if names is not None:
        return (names,) if isinstance(names, str) else tuple(names)
    return traits_of(type(rule)).points


def expect_unread(rule: Optimizer) -> None:
    """Refuse a rule that copied parameters when it was made, before there were coordinates.

    Raises:
        TypeError: it did.
    """
    kind = type(rule).__name__
    for state in rule.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and not value.is_meta and bool(value.isnan().any()):
                raise TypeError(
                    f"{kind} copies parameters ('{key}') when it is made, and coordinates have values at a step alone: "
                    f"wrap it around the invariant optimizer instead, {kind}(pathspace.optim.Invariant(...))"
                )


def frozen_because(rule: Optimizer) -> None:
    """Say that the metric will not change."""
    kind = type(rule).__name__
    warnings.warn(
        f"it is not known whether {kind} keeps points of parameter space, which would have to move when the metric "
        "changes: the metric of the first step is kept for good. Say points=() if it keeps none, or name those in its "
        "state, as points=('z',)",
        stacklevel=3,
    )


def move_points_(
    rule: Optimizer,
    points: Sequence[str],
    shadow: nn.Parameter,
    w: Tensor,
    old: Tensor | None,
    new: Tensor | None,
) -> None:
    """Convert points u of one parameter to u r_old / r_new, or to w / r_new where r_old was 0 and w did not move.

    Raises:
        RuntimeError: a point has not the size of its parameter.
    """
    if old is None or new is None or old is new:
        return
    state = rule.state.get(shadow, {})
    ratio = torch.where(new == 0, 1.0, old / new)
    freed = (old == 0) & (new != 0)
    for key in points:
        point = state.get(key)
        if point is None:
            continue
        if point.numel() != ratio.numel():
            raise RuntimeError(
                f"'{key}' of {type(rule).__name__} holds {point.numel()} of {ratio.numel()} elements of a parameter, "
                "and cannot follow the metric: let it keep all (slice_p=1), or use "
                "metric=pathspace.metrics.Balanced()"
            )
        point.mul_(ratio.view(point.shape).to(point.dtype))
        point.copy_(torch.where(freed, w / new, point.view(w.shape)).view(point.shape))
