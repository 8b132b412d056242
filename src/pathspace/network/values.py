"""What tracing knows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class AliasGroup:
    """Tensors that share one storage in the real model; writing into one of several is refused."""

    members: int = 1


@dataclass(frozen=True)
class Value:
    """What is known of one tensor of the traced forward pass.

    Attributes:
        slot: where the squared network keeps it.
        labels: scale label of every element (see ``scales``), of the tensor's own shape. For a parameter: the flat
            index of every element in the parameter.
        kind: ``"input"`` (depends on data alone), ``"buffer"``, ``"parameter"``, ``"hidden"`` (depends on a parameter)
            or ``"tail"`` (a softmax at the end, which nothing may use any more).
        name: the name of the parameter or buffer that it is a view of; of the operation, for a tail.
        batch: the dimension that holds the batch, if known.
        module: for a tail, the module that made it.
        state: True for the last hidden state of a recurrent layer, which is not an output of the network.
    """

    slot: int
    labels: Tensor
    kind: str = "hidden"
    name: str = ""
    batch: int | None = None
    state: bool = False
    module: str = ""
    alias: AliasGroup = field(default_factory=AliasGroup)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor, for one example."""
        return self.labels.shape


def common_kind(values: Sequence[Value]) -> str:
    """The kind of a result: hidden as soon as a parameter had a part in it."""
    kinds = {v.kind for v in values}
    if kinds == {"buffer"}:
        return "buffer"
    return "input" if kinds <= {"input", "buffer"} else "hidden"
