"""Activations: an edge for each element, whose gate is the slope there."""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace.graph.capture import Step
from pathspace.network.rules.activations import CAPTURED
from pathspace.ops.family import GatedFamily, Gates, first_operand
from pathspace.ops.listing import Listing


class Activations(GatedFamily):
    """Positively homogeneous functions of single elements, such as ReLU and the absolute value."""

    names = CAPTURED

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
