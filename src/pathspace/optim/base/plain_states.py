"""Moments of plain rules, taken into coordinates and back.

A rule in coordinates u = w / r sees h = r g. So what it averages of gradients is r times what the
plain rule keeps, what it averages of their squares is r^2 times that, and lengths of steps are
divided by r. For rules of elements this is exact while r stays as it is.

Letters: w parameter, g = dL/dw, r = 1 / sqrt(D), u coordinates, h = dL/du.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pathspace.optim.rules.traits import traits_of
from pathspace.rescaling.optimizer_states import follow_state_
from pathspace.squared.sharding import to_local


def expect_plain(rule: Optimizer, state: Mapping[str, Any], owner: str, parameter: str) -> None:
    """Refuse a state without a metric that cannot be taken into coordinates.

    Args:
        rule: what is to take it.
        state: of one parameter.
        owner: the name of the optimizer around the rule.
        parameter: its name in the network.

    Raises:
        ValueError: the rule's moments have no known transformation, or the state is another rule's.
    """
    kind = type(rule).__name__
    powers = traits_of(type(rule)).powers
    if powers is None:
        raise ValueError(
            f"this is not the state of {owner}: that of '{parameter}' has no gauge, so its moments belong to other "
            f"coordinates, and what {kind} keeps has no known transformation: start {owner} without a state"
        )
    unknown = sorted(str(key) for key in state.keys() - powers.keys())
    if unknown:
        raise ValueError(
            f"this is not the state of {owner}: that of '{parameter}' has no gauge, and {kind} keeps no "
            f"{', '.join(map(repr, unknown))}: load a state of plain {kind}, or one of {owner}"
        )


def into_coordinates_(rule: Optimizer, shadow: Tensor, r: Tensor) -> None:
    """Take what a rule keeps of a parameter from weights into coordinates, in memory of its own."""
    state = rule.state.get(shadow, {})
    for key, power in _powers(rule).items():
        value = state.get(key)
        if not isinstance(value, Tensor):
            continue
        # a rule that has loaded a state shares its memory with whoever saved it
        state[key] = value.clone()
        if power:
            part = to_local(state[key])
            part.copy_(_times(part, r, power))


def follow_rescaling_(rule: Optimizer, shadow: Tensor, scale: Tensor) -> None:
    """Move what a rule keeps of a weight outside coordinates after the weight was multiplied by a scale."""
    state = rule.state.get(shadow, {})
    powers = _powers(rule)
    for key in powers:
        if isinstance(state.get(key), Tensor):
            # a rule that has loaded a state shares its memory with whoever saved it
            state[key] = state[key].clone()
    follow_state_(state, powers, scale.expand(shadow.shape))


def out_of_coordinates(
    rule: Optimizer, state: Mapping[str, Any], r: Tensor | None
) -> dict[str, Any]:
    """Return what the plain rule would keep of a parameter; r is None outside the network.

    Raises:
        TypeError: the rule's moments have no known transformation.
    """
    powers = traits_of(type(rule)).powers
    if powers is None:
        raise TypeError(
            f"what {type(rule).__name__} keeps has no known transformation to the plain rule's"
        )
    result = dict(state)
    for key, power in powers.items():
        value = result.get(key)
        if not isinstance(value, Tensor):
            continue
        result[key] = value.clone() if r is None or not power else _times(value, r, -power)
    return result


def _powers(rule: Optimizer) -> Mapping[str, int]:
    """Return the powers of r for a rule whose state was taken into coordinates."""
    powers = traits_of(type(rule)).powers
    assert powers is not None
    return powers


def _times(value: Tensor, r: Tensor, power: int) -> Tensor:
    """r^power times a value, in its type; 0 where r is 0 and weights stand still."""
    r = r.view(value.shape)
    factor = r if power > 0 else torch.where(r == 0, 0.0, r.reciprocal())
    # one after the other: the square of r alone may leave the type
    for _ in range(abs(power)):
        value = value * factor
    return value
