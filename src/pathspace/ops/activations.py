"""Activations: an edge for each element, whose gate is the slope there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.graph.capture import Step
from pathspace.network.rules.activations import BY_NAME
from pathspace.ops.family import GatedFamily, Gates, first_operand
from pathspace.ops.listing import Listing


def is_homogeneous(step: Step) -> bool:
    """Return whether a step is an activation with arguments that make it homogeneous."""
    activation = BY_NAME.get(step.name)
    if activation is None:
        return False
    args = step.args[1:]
    kwargs = {key: value for key, value in step.kwargs.items() if key != "input"}
    return activation.holds(_is_zero, *args, **kwargs)


def _is_zero(bound: Any) -> bool:
    return not bool(torch.as_tensor(bound).any())


class Activations(GatedFamily):
    """Positively homogeneous functions of single elements, such as ReLU and the absolute value."""

    names = frozenset(BY_NAME)

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is homogeneous."""
        del listing
        return is_homogeneous(step)

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return the slope f(x) / x of each element; 0 where x is 0."""
        del listing
        operand, function = first_operand(step)
        x = operand.detach()
        y = function(x.clone()).detach()
        divisor = torch.where(x != 0, x, 1.0)
        slopes = torch.where(x != 0, y / divisor, 0.0)
        place = torch.arange(x.numel())
        return (operand,), Gates(place, place, slopes.flatten())
