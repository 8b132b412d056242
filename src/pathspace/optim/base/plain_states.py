"""Moments of plain rules, taken into coordinates and back.

A rule in coordinates u = w / r sees h = r g. So what it averages of gradients is r times what the plain rule keeps,
what it averages of their squares is r^2 times that, and lengths of steps are divided by r. For rules of elements this
is exact while r stays as it is.

Letters: w parameter, g = dL/dw, r = 1 / sqrt(D), u coordinates, h = dL/du.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.rmsprop import RMSprop
from pathspace.rescaling.optimizer_states import POWERS, follow_state_
from pathspace.squared.parts import local

_POWERS: dict[type[Optimizer], dict[str, int]] = {
    **POWERS,
    RMSprop: POWERS[optim.RMSprop],
    MuonAdamW: {**POWERS[optim.AdamW], **POWERS[optim.Muon]},
}
"""Rule -> entry of its state -> power of r that takes it from weights to coordinates."""


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
    powers = _POWERS.get(type(rule))
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
    for key, power in _POWERS[type(rule)].items():
        value = state.get(key)
        if not isinstance(value, Tensor):
            continue
        # a rule that has loaded a state shares its memory with whoever saved it
        state[key] = value.clone()
        if power:
            part = local(state[key])
            part.copy_(_times(part, r, power))


def follow_rescaling_(rule: Optimizer, shadow: Tensor, scale: Tensor) -> None:
    """Move what a rule keeps of a weight outside coordinates after the weight was multiplied by a scale."""
    state = rule.state.get(shadow, {})
    for key in _POWERS[type(rule)]:
        if isinstance(state.get(key), Tensor):
            # a rule that has loaded a state shares its memory with whoever saved it
            state[key] = state[key].clone()
    follow_state_(state, _POWERS[type(rule)], scale.expand(shadow.shape))


def out_of_coordinates(rule: Optimizer, state: Mapping[str, Any], r: Tensor | None) -> dict[str, Any]:
    """Return what the plain rule would keep of a parameter; r is None outside the network.

    Raises:
        TypeError: the rule's moments have no known transformation.
    """
    powers = _POWERS.get(type(rule))
    if powers is None:
        raise TypeError(f"what {type(rule).__name__} keeps has no known transformation to the plain rule's")
    result = dict(state)
    for key, power in powers.items():
        value = result.get(key)
        if not isinstance(value, Tensor):
            continue
        result[key] = value.clone() if r is None or not power else _times(value, r, -power)
    return result


def _times(value: Tensor, r: Tensor, power: int) -> Tensor:
    """r^power times a value, in its type; 0 where r is 0 and weights stand still."""
    r = r.view(value.shape)
    factor = r if power > 0 else torch.where(r == 0, 0.0, r.reciprocal())
    # one after the other: the square of r alone may leave the type
    for _ in range(abs(power)):
        value = value * factor
    return value
