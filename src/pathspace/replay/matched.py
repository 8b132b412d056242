"""What a forward pass on data has shown so far, matched with the traced one: nodes, and uses of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.network import Network
from pathspace.network.program import Merged, Operation, Place
from pathspace.replay.arguments import mapped
from pathspace.replay.observed import Key, Node, Use

OUT_OF_PLACE = {
    "add_": torch.add,
    "__iadd__": torch.add,
    "sub_": torch.sub,
    "__isub__": torch.sub,
    "mul_": torch.mul,
    "__imul__": torch.mul,
}  # what a use of a parameter computes, where it happened in place

UNGRADED = (
    "; parts of it ran with gradients disabled, as in torch.no_grad and reentrant checkpointing, and what they add on "
    "data does not show: give torch.utils.checkpoint use_reentrant=False, or run these parts with gradients"
)


class Matched:
    """Nodes and uses of parameters met so far. Depends on data: *data*; on parameters only: *weight*.

    Args:
        network: what was traced.
        leaves: its parameters, by name.
        count: how many examples the data hold.
        differentiable: whether values of nodes may be differentiated.
        inputs: what the model is called with.
    """

    def __init__(
        self, network: Network, leaves: dict[str, Tensor], count: int, differentiable: bool, inputs: list[Any]
    ) -> None:
        super().__init__()
        self.program, self.count, self.differentiable = network.program, count, differentiable
        self.batch, self.outside = network.call.batch_dim, network.call.outside
        self.nodes: dict[Key, Node] = {}
        self.uses: list[Use] = []
        self.views = {id(leaf) for leaf in leaves.values()}
        self.data = {id(t): t for t in inputs if isinstance(t, Tensor)}  # keeps them alive: ids stay unique
        self.weights: list[Tensor] = []  # likewise
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}  # what stands for a tensor in the graph
        self._views_read: list[tuple[Tensor, GradientEdge]] = []  # views at which gradients will be read
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

    @property
    def expected(self) -> Operation | None:
        """The traced operation that stands where the forward pass is now; None at the end."""
        traced = self.program.operations
        return traced[self.position] if self.position < len(traced) else None

    def next(self, name: str) -> Operation:
        """The traced operation that stands where the forward pass is now, which has this name; the pass goes on."""
        call = self.expected
        if call is None or call.name != name:
            expected = f"'{call.name}' in '{call.module}'" if call is not None else "the end"
            raise UnmatchedForwardError(
                f"operation {self.position} of the forward pass is '{name}' where tracing met {expected}: the model's "
                "code takes another way than when it was traced. What is computed on data runs it in evaluation form: "
                "trace it in that form (model.eval()), or make its steps independent of the data"
                f"{UNGRADED if self.ungraded else ''}"
            )
        self.position += 1
        return call

    def exposed(self, result: Tensor, place: Place, tensors: Sequence[Tensor] = ()) -> Tensor:
        """What the pass goes on with in the place of a result, which stays in the graph whatever is written later.

        A view drops out of the graph where its memory is written to, and some layers of torch return one. Where a
        reshape merged the examples with something else, a view with them apart stays in the graph.
        """
        shown = after = result
        if isinstance(place, Merged) and self._fits(result, place):
            shown = place.apart(result)
            after = place.joined(shown)
        elif not result._is_view():
            return result
        base = result._base
        if base is None or not any(t is base or t._base is base for t in tensors):
            after = after.clone()  # nobody else has its memory
        self._shown[id(after)] = after, shown
        return after

    def _fits(self, tensor: Tensor, place: Merged) -> bool:
        return tensor.shape[place.dim] == self.count * place.before * place.after

    def apart(self, tensor: Tensor, what: str) -> Tensor:
        """What stands for a tensor in the graph, with the examples apart; it is called ``what`` where there is none."""
        if id(tensor) not in self._shown:
            raise UnmatchedForwardError(
                f"{what} has its examples in one dimension with something else, where a reshape put them, and so what "
                "each of them adds is not known here; do it before that reshape, or after one that takes them apart"
            )
        return self._shown[id(tensor)][1]

    def check_written(self) -> None:
        """Refuse a pass in which the result of a layer dropped out of the graph."""
        if any(t.grad_fn is not edge.node for t, edge in self._views_read):
            raise UnmatchedForwardError(
                "what a layer returned is a view of other memory, which was written to in place afterwards, so the "
                "gradients at the layer are lost; write it out of place"
            )

    def batch_of(self, tensor: Tensor, traced: Place, one: torch.Size | None) -> Place:
        """Where a tensor has the examples; a constant made for all of them where inputs do, of size 1 for ``one``."""
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
        if len(tensors) != len(call.arguments):
            raise UnmatchedForwardError(
                f"'{name}' in '{call.module}' takes {len(tensors)} tensors, and took {len(call.arguments)} when it was "
                "traced: the number of steps must be the traced one; trace the model with such an input"
            )
        places: dict[int, Place] = {}
        for t, traced, one in zip(tensors, call.arguments, call.shapes[:-1], strict=True):
            if not self.is_weight(t):
                places[id(t)] = self.batch_of(t, traced, one)
            elif isinstance(call.batch, Merged) and t.shape != one:
                raise UnmatchedForwardError(
                    f"'{name}' in '{call.module}' takes a parameter that was repeated for the examples, which lie in "
                    "one dimension with something else; let it broadcast before that reshape"
                )
        use = self.add_use(call, name, OUT_OF_PLACE.get(name, func), args, kwargs, weights, result, places)
        if use.batch is None and self.batch is not None:
            raise UnmatchedForwardError(
                f"'{name}' in '{call.module}' makes a value that is the same for all examples, or whose examples an "
                "index or a reshape put where they are not found, so what each of them adds to it is not known"
            )

    def add_use(
        self,
        call: Operation,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        weights: list[Tensor],
        result: Tensor,
        places: dict[int, Place],
    ) -> Use:
        """Likewise, given by id where the arguments that depend on data have their examples."""
        merged, batch = None, self.batch_of(result, call.batch, call.shapes[-1])
        if isinstance(batch, Merged):
            result = self.apart(result, f"the result of '{name}' in '{call.module}'")
            merged, batch = batch, batch.dim + 1
        else:
            result = self._shown.get(id(result), (result, result))[1]
        batches: dict[int, int] = {}
        forms: list[Merged | None] = []

        def kept(t: Tensor) -> Tensor:
            place = places.get(id(t))
            form = place if isinstance(place, Merged) and self._fits(t, place) else None
            forms.append(form)
            if self.is_weight(t):
                return t
            t = t.detach() if form is None else form.apart(t.detach())
            if form is not None:
                batches[id(t)] = form.dim + 1
            elif isinstance(place, int):
                batches[id(t)] = place
            return t

        args, kwargs = mapped(kept, args, kwargs)
        if merged is not None or any(forms):
            function = _with_examples_apart(function, forms, merged)
        edge = get_gradient_edge(result)
        if result._is_view():
            self._views_read.append((result, edge))
        use = Use(name, function, args, kwargs, weights, batches, [edge], batch, result.shape)
        self.uses.append(use)
        return use

    def note_nodes(self, call: Operation, results: list[Tensor]) -> None:
        """Remember those results of an operation that are nodes."""
        for slot, tensor in zip(call.results, results, strict=False):
            if slot in self.program.nodes:
                self.note_node((slot,), tensor, call.batch)

    def note_node(self, key: Key, tensor: Tensor, traced: Place) -> None:
        """Remember a node, by its first value: a ReLU in place would overwrite it."""
        if key in self.nodes or key[0] not in self.live:
            return
        labels = self.program.nodes.get(key[0]) if len(key) == 1 else None
        merged, batch = None, self.batch_of(tensor, traced, None if labels is None else labels.shape)
        if isinstance(batch, Merged):
            merged, tensor, batch = batch, self.apart(tensor, "a node of the network"), batch.dim + 1
        if batch is None and self.batch is not None:
            raise UnmatchedForwardError(
                "a node of the network has the same value for all examples, or an index or a reshape put them where "
                "they are not found"
            )
        value = (tensor if self.differentiable else tensor.detach()).clone()
        self.nodes[key] = Node(value, get_gradient_edge(tensor), batch, merged)


def _with_examples_apart(
    function: Callable[..., Any], forms: list[Merged | None], result: Merged | None
) -> Callable[..., Any]:
    """An operation on tensors some of which have the examples in a dimension of their own, and its result likewise."""

    def operation(*args: Any, **kwargs: Any) -> Tensor:
        left = iter(forms)

        def joined(t: Tensor) -> Tensor:
            form = next(left)
            return t if form is None else form.joined(t)

        args, kwargs = mapped(joined, args, kwargs)
        created = function(*args, **kwargs)
        return created if result is None else result.apart(created)

    return operation
