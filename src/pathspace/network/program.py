"""What a trace remembers of the forward pass itself, so that it can be followed again on real data.

The tape (see ``tape``) is the squared network of one example. Quantities that depend on data, such as the node measure
of data-dependent path normalization, need the values that the same forward pass takes on a batch: they run the model's
own code once more and match its operations, one after the other, with those that were traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Operation:
    """One traced operation whose result depends on a parameter.

    Attributes:
        name: the operation.
        module: path of the module it was called in.
        kind: kind of the result (see ``Value``), or ``"outside"`` for the call of a module left outside.
        arguments: for every tensor argument the dimension that holds the batch; None where there is none.
        results: slots of the results on the tape, and of the rows inside bags; for ``"outside"``, of what flows in.
        batch: the dimension of the (first) result that holds the batch.
    """

    name: str
    module: str
    kind: str
    arguments: tuple[int | None, ...]
    results: tuple[int, ...]
    batch: int | None


@dataclass(frozen=True)
class Program:
    """The traced forward pass.

    Attributes:
        operations: in the order in which the model performs them.
        outputs: slots of the tensors that ``Network.returned`` gives; None for one that is no output of the network.
        nodes: slot -> class labels of the units whose values before their activation are nodes of the graph: what
            enters an activation, linear maps of unit classes that have none, and the outputs (as they leave).
    """

    operations: tuple[Operation, ...]
    outputs: tuple[int | None, ...]
    nodes: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
