"""The list of edges of a written-out graph, as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BIAS = 0
"""The bias node."""
NONE = -1
"""No weight, or no gate, on an edge."""


@dataclass
class Edges:
    """Columns of the list of edges, in the order in which the operations ran."""

    source: list[Tensor] = field(default_factory=list)
    target: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    factor: list[Tensor] = field(default_factory=list)
    gate: list[Tensor] = field(default_factory=list)

    def add(self, source: Tensor, target: Tensor, weight: Any, factor: Tensor, gate: Any = NONE) -> None:
        """Append edges; ``weight`` and ``gate`` may be one number for all of them."""
        for column, value in zip(
            (self.source, self.target, self.weight, self.gate), (source, target, weight, gate), strict=True
        ):
            column.append(torch.as_tensor(value).expand(target.shape))
        self.factor.append(factor.expand(target.shape))
