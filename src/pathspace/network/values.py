"""What tracing knows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pathspace.network.memory import Memory, View, whole


@dataclass(frozen=True)
class Value:
    """What is known of one tensor of the traced forward pass.

    Attributes:
        slot: where the squared network keeps it.
        labels: scale label of every element (see ``scales``), of the tensor's own shape. For a parameter: the flat
            index of every element in the parameter.
        kind: ``"input"`` (depends on data alone), ``"buffer"``, ``"parameter"``, ``"hidden"`` (depends on a parameter)
            or ``"tail"`` (a function of outputs, such as a softmax, which no parameter may use any more) or
            ``"indices"`` (where a maximum was).
        name: the name of the parameter or buffer that it is a view of; of the operation, for a tail and indices.
        batch: the dimension that holds the batch, if known.
        module: for a tail and indices, the module that made them.
        state: True for the last hidden state of a recurrent layer, which is not an output of the network.
        memory: what it shares with other tensors.
        view: which elements of the memory it shows; None if it may be a copy of them.
        version: how many writes into the memory it has seen.
        order: True for a permutation of the examples, an input.
        refusal: for a tail, the error to raise if a parameter comes after it.
    """

    slot: int
    labels: Tensor
    kind: str = "hidden"
    name: str = ""
    batch: int | None = None
    state: bool = False
    module: str = ""
    memory: Memory = field(default_factory=Memory)
    view: View | None = whole
    version: int = 0
    order: bool = False
    refusal: Exception | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor, for one example."""
        return self.labels.shape


def apart(value: Value) -> Value:
    """The same in memory of its own."""
    return replace(value, memory=Memory(), view=whole, version=0)


def common_kind(values: Sequence[Value]) -> str:
    """The kind of a result: hidden as soon as a parameter had a part in it."""
    kinds = {v.kind for v in values}
    if kinds == {"buffer"}:
        return "buffer"
    return "input" if kinds <= {"input", "buffer"} else "hidden"
