"""Values of the squared network that are mixed with given ones, as the data-dependent measure mixes paths and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.repeated import spread
from pathspace.squared.squares import dense


@dataclass
class Blend:
    """Values that are mixed with given ones, h = own + (1 - alpha) h, and dG/dh of the mixed values once known.

    Attributes:
        alpha: the share of the given values.
        own: slot -> alpha times the given value.
        gradients: slot -> dG/dh, where a path leads from it to an output.
    """

    alpha: float
    own: Mapping[int, Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def mix_(self, slots: dict[int, Any], made: Sequence[int]) -> None:
        """Mix the values that were just made; a shape stands for one that nobody needs."""
        for slot in made:
            own = self.own.get(slot)
            if own is None:
                continue
            value = slots[slot] = spread(slots[slot])
            shape = value.shape if isinstance(value, Tensor) else torch.Size(value)
            check_shape(own.shape, shape)
            if isinstance(value, Tensor):
                slots[slot] = torch.add(own, value, alpha=1 - self.alpha)

    def unmix_(self, gradients: dict[int, Any], made: Sequence[int]) -> None:
        """Keep dG/dh of the mixed values, and go on to what was mixed."""
        for slot in made:
            if slot in self.own and slot in gradients:
                self.gradients[slot] = dense(gradients[slot])
                gradients[slot] = self.gradients[slot] * (1 - self.alpha)


def check_shape(given: torch.Size, traced: torch.Size) -> None:
    """Refuse values on data whose shape, for one example, is not the traced one.

    Raises:
        ValueError: it is another.
    """
    if given != traced:
        raise ValueError(
            f"the inputs give a node the shape {tuple(given)} for one example; it was traced with {tuple(traced)}: use "
            "inputs of the traced shape (but for the number of examples), or trace again"
        )
