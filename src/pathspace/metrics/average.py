"""The average of what data shows, over the refreshes of a metric; its state belongs to one parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AVERAGED = 0.9
"""The decay for random signs, if nothing else is asked for."""


def averaged(
    state: dict[str, Any], new: dict[str, Any], key: str, data: Tensor, decay: float
) -> tuple[Tensor, float]:
    """The average m = a m + (1 - a) data, and 1 - a^t, which it is to be divided by, as Adam's moments are.

    It is written over the data; the state keeps its own until that is known to be good.
    """
    if not decay:
        return data, 1.0
    average, weight = f"{key}_average", f"{key}_weight"
    if average not in state:
        new[average], new[weight] = data * (1 - decay), 1 - decay
    else:
        new[average] = torch.lerp(state[average].to(data.dtype), data, 1 - decay, out=data)
        new[weight] = state[weight] + (1 - decay) * (1 - state[weight])
    return new[average], new[weight]
