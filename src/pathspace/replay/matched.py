"""What a forward pass on data has shown so far, matched with the traced one: nodes, and uses of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.network import Network
from pathspace.network.program import Operation
from pathspace.network.trace.functions import tensors_in
from pathspace.replay.arguments import mapped
from pathspace.replay.observed import Key, Node, Use

_OUT_OF_PLACE = {
    "add_": torch.add,
    "__iadd__": torch.add,
    "sub_": torch.sub,
    "__isub__": torch.sub,
    "mul_": torch.mul,
    "__imul__": torch.mul,
}  # what a use of a parameter computes, where it happened in place

UNGRADED = (
    "; parts of it ran with gradients disabled, as reentrant checkpointing does, and what they add on data does not "
    "show: give torch.utils.checkpoint use_reentrant=False"
)

Summary = Callable[[Tensor, int | None], Tensor]
"""From a node's values and the dimension of the examples to what is wanted of them."""


class Matched:
    """Nodes and uses of parameters met so far. Depends on data: *data*; on parameters only: *weight*.

    Args:
        network: what was traced.
        leaves: its parameters, by name.
        count: how many examples the data hold.
        differentiable: whether values of nodes may be differentiated.
        inputs: what the model is called with.
        summary: what to keep of the values of a node; all of them if None.
    """

    def __init__(
        self,
        network: Network,
        leaves: dict[str, Tensor],
        count: int,
        differentiable: bool,
        inputs: list[Any],
        summary: Summary | None = None,
    ) -> None:
        super().__init__()
        self.program, self.count, self.differentiable = network.program, count, differentiable
        self._summary = summary
        self.batch, self.outside = network.call.batch_dim, network.call.outside
        self.nodes: dict[Key, Node] = {}
        self.uses: list[Use] = []
        self.views = {id(leaf) for leaf in leaves.values()}
        self.data = {id(t): t for t in inputs if isinstance(t, Tensor)}  # keeps them alive: ids stay unique
        self.weights: list[Tensor] = []  # likewise
        self.position = 0
        self.ungraded = False  # whether a part ran with gradients disabled
        # on a path to an output; only one output of a recurrent layer may be, its first stands for its inside
        self.live = network.tape.filled
        self.normalizations = network.tape.normalizations

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on parameters only."""
        return tensor.requires_grad and id(tensor) not in self.data

    def was_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor depended on parameters only before it was written to."""
        return id(tensor) in self.views or any(tensor is weight for weight in self.weights)

    def next(self, name: str) -> Operation:
        """The traced operation that stands where the forward pass is now."""
        traced = self.program.operations
        call = traced[self.position] if self.position < len(traced) else None
        if call is None or call.name != name:
            expected = f"'{call.name}' in '{call.module}'" if call is not None else "the end"
            raise UnmatchedForwardError(
                f"operation {self.position} of the forward pass is '{name}' where tracing met {expected}: the model's "
                "code takes another way than it did when it was traced (in evaluation form); trace it again, or make "
                f"its steps independent of the data{UNGRADED if self.ungraded else ''}"
            )
        self.position += 1
        return call

    def batch_of(self, tensor: Tensor, traced: int | None, one: torch.Size | None) -> int | None:
        """The batch dimension; that of a constant made for all examples is the inputs' own, of size 1 for ``one``."""
        place = self.batch if traced is None else None
        if place is None or tensor.dim() <= place or (one is not None and one[place] != 1):
            return traced
        return place if tensor.shape[place] == self.count else None

    def note_use(
        self,
        call: Operation,
        name: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        weights: list[Tensor],
        result: Tensor,
    ) -> None:
        """Remember where parameters are used."""
        batch = self.batch_of(result, call.batch, call.shapes[-1])
        if batch is None and self.batch is not None:
            raise UnmatchedForwardError(
                f"'{name}' in '{call.module}' makes a value that is the same for all examples, so what each of them "
                "adds to it is not known"
            )
        if len(tensors) != len(call.arguments):
            raise UnmatchedForwardError(
                f"'{name}' in '{call.module}' takes {len(tensors)} tensors, and took {len(call.arguments)} when it was "
                "traced: the number of steps must be the traced one; trace the model with such an input"
            )
        batches = {}
        for t, traced, one in zip(tensors, call.arguments, call.shapes[:-1], strict=True):
            place = None if self.is_weight(t) else self.batch_of(t, traced, one)
            if place is not None:
                batches[id(t)] = place
        function = _OUT_OF_PLACE.get(name, func)
        args, kwargs = mapped(lambda t: t if self.is_weight(t) else t.detach(), args, kwargs)
        kept = tensors_in(args, kwargs)
        batches = {
            id(new): batches[id(old)] for old, new in zip(tensors, kept, strict=True) if id(old) in batches
        }
        use = Use(
            name, function, args, kwargs, weights, batches, [get_gradient_edge(result)], batch, result.shape
        )
        self.uses.append(use)

    def note_nodes(self, call: Operation, results: list[Tensor]) -> None:
        """Remember those results of an operation that are nodes."""
        for slot, tensor in zip(call.results, results, strict=False):
            if slot in self.program.nodes:
                self.note_node((slot,), tensor, call.batch)

    def note_node(self, key: Key, tensor: Tensor, traced: int | None) -> None:
        """Remember a node, by its first value: a ReLU in place would overwrite it."""
        if key in self.nodes or key[0] not in self.live:
            return
        labels = self.program.nodes.get(key[0]) if len(key) == 1 else None
        batch = self.batch_of(tensor, traced, None if labels is None else labels.shape)
        if batch is None and self.batch is not None:
            raise UnmatchedForwardError("a node of the network has the same value for all examples")
        value, result = tensor if self.differentiable else tensor.detach(), None
        if self._summary is None:
            value = value.clone()
        else:
            result = self._summary(value, batch)
        self.nodes[key] = Node(value, get_gradient_edge(tensor), batch, result)
