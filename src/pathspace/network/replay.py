"""Runs a traced model once more, on real data, and notes where its nodes and its parameters' edges are.

What runs is a copy of the model in its evaluation form (no dropout, BatchNorm with its running statistics) whose
parameters share their memory with the model's. Every operation that depends on a parameter is matched with the one that
was traced; a forward pass that differs from the traced one is refused.

Letters: n examples, z value of a node before its activation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.network import Network
from pathspace.network.program import Operation
from pathspace.network.recorder import METADATA, short_name
from pathspace.network.rules import MOVEMENTS

_OUT_OF_PLACE = {
    "add_": torch.add,
    "__iadd__": torch.add,
    "mul_": torch.mul,
    "__imul__": torch.mul,
}  # what a use of a parameter computes, where it happened in place

_DETACHES = ("detach", "data.__get__")

Key = tuple[int, ...]
"""(slot,) of the tape, or (slot, cell, t) inside a recurrent layer."""


@dataclass(frozen=True)
class Arguments:
    """Both kinds of arguments of a model at once, ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Node:
    """Values of some units on all examples."""

    value: Tensor  # as it was before its activation; part of the graph only in a differentiable replay
    edge: GradientEdge
    batch: int | None  # the dimension that holds the examples

    def shape_of_one(self) -> torch.Size:
        """Its shape on the tape, for one example."""
        shape = list(self.value.shape)
        if self.batch is not None:
            shape[self.batch] = 1
        return torch.Size(shape)


@dataclass
class Use:
    """One operation in which parameters are edges: ``function(*args)``, with some arguments depending on data."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[Tensor]  # those arguments that depend on parameters only
    batches: dict[int, int]  # id of an argument that depends on data -> its batch dimension
    edges: list[GradientEdge]  # of the result; of its steps, where there are several, which are stacked
    batch: int | None
    shape: torch.Size = field(default_factory=torch.Size)  # of the result


@dataclass
class Replay:
    """A forward pass on data.

    Attributes:
        nodes: the network's nodes.
        uses: where parameters are used.
        leaves: the parameters that ran, by name; they share the model's memory.
        count: the number of examples n.
        views: ids of tensors that are rearranged parameters.
    """

    nodes: dict[Key, Node]
    uses: list[Use]
    leaves: dict[str, Tensor]
    count: int
    views: set[int]


def replay(network: Network, inputs: Any, *, differentiable: bool = False) -> Replay:
    """Run the traced model on a batch.

    Args:
        network: a traced network.
        inputs: what the model is called with: a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments, or :class:`Arguments`; of the traced shapes, but for the number of examples.
        differentiable: nodes keep their part of the graph, which leads to the model's own parameters.

    Returns:
        What was found.

    Raises:
        UnmatchedForwardError: the forward pass is not the traced one, or cannot be followed on data.
    """
    network.check_current()
    args, kwargs, count = _arguments(network, inputs)
    shadow, leaves = _shadow(network, differentiable)
    mode = _Follower(network, leaves, count, differentiable, pytree.tree_leaves((args, kwargs)))
    with torch.inference_mode(False), torch.enable_grad(), _running(shadow, mode), mode:
        result = shadow(*args, **kwargs)
        returned = network.returned(result)
    mode.finish(returned)
    return Replay(mode.nodes, mode.uses, leaves, count, mode.views)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _arguments(network: Network, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """The model's arguments, detached, and the number of examples."""
    call = network.call
    exactly = (inputs.args, inputs.kwargs) if isinstance(inputs, Arguments) else None
    inputs = inputs if exactly is None else exactly
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    if not tensors:
        raise ValueError("the inputs hold no tensor: give what the model is called with")
    if call.states:
        raise UnmatchedForwardError(
            "the network was traced with a carried hidden state (states=...), which depends on earlier data; "
            "quantities that depend on data are not defined for it"
        )
    count = 1 if call.batch_dim is None else tensors[0].shape[call.batch_dim]
    if count == 0:
        raise ValueError("the batch is empty")
    given = pytree.tree_map_only(Tensor, lambda t: _widened(t.detach()), inputs)
    if exactly is not None:
        return *given, count
    if isinstance(given, dict):
        return (), dict(given), count
    return (tuple(given), {}, count) if isinstance(given, (tuple, list)) else ((given,), {}, count)


def first_examples(network: Network, given: Arguments, count: int | None) -> Arguments:
    """The arguments for the first ``count`` examples of a batch; all if None."""
    place = network.call.batch_dim
    first = next((t for t in pytree.tree_leaves((given.args, given.kwargs)) if isinstance(t, Tensor)), None)
    if count is None or place is None or first is None or first.dim() <= place or first.shape[place] <= count:
        return given
    size = first.shape[place]

    def shorter(t: Tensor) -> Tensor:
        # other arguments may hold the batch elsewhere, as the states of nn.RNN do
        found = next((d for d in (place, *range(t.dim())) if d < t.dim() and t.shape[d] == size), None)
        return t if found is None else t.narrow(found, 0, count)

    return Arguments(*pytree.tree_map_only(Tensor, shorter, (given.args, given.kwargs)))


def _shadow(network: Network, differentiable: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the model in evaluation form, on parameters that share the model's memory, and those by name."""
    leaves: dict[str, Tensor] = {}
    memo: dict[int, Any] = {}
    outside = {id(p) for name in network.call.outside for p in network.model.get_submodule(name).parameters()}
    for name, parameter in network.model.named_parameters():
        p = _widened(parameter)
        inside = name in network.parameters
        if not (differentiable and inside and parameter.requires_grad and p is parameter):
            p = nn.Parameter(_widened(parameter.detach()), requires_grad=id(parameter) not in outside)
        memo[id(parameter)] = p
        if inside:
            leaves[name] = p
    for buffer in network.model.buffers():
        memo[id(buffer)] = _widened(buffer.detach()).clone()
    return copy.deepcopy(network.model, memo).eval(), leaves


@contextmanager
def _running(shadow: nn.Module, mode: _Follower) -> Iterator[None]:
    """Follow calls of modules left outside, and run what torch.compile wraps as plain Python."""
    for name in mode.outside:
        module = shadow.get_submodule(name)
        forward = module.forward

        def run(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            return mode.run_outside(_forward, args, kwargs)

        module.forward = run
    if any(hasattr(module, "_orig_mod") for module in shadow.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


class _Follower(TorchFunctionMode):
    """Matches operations with the traced ones. Depends on data: *data*; on parameters only: *weight*."""

    def __init__(
        self, network: Network, leaves: dict[str, Tensor], count: int, differentiable: bool, inputs: list[Any]
    ) -> None:
        super().__init__()
        self.program, self.count, self.differentiable = network.program, count, differentiable
        self.batch, self.outside = network.call.batch_dim, network.call.outside
        self.nodes: dict[Key, Node] = {}
        self.uses: list[Use] = []
        self.views = {id(leaf) for leaf in leaves.values()}
        self._data = {id(t): t for t in inputs if isinstance(t, Tensor)}  # keeps them alive: ids stay unique
        self._weights: list[Tensor] = []  # likewise
        self._cut: dict[int, Tensor] = {}  # detached from the graph
        self._position = 0
        self._paused = False
        # on a path to an output; only one output of a recurrent layer may be, its first stands for its inside
        self._live = {slot for instruction in network.tape.instructions for slot in instruction.outputs}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = short_name(func)
        if self._paused or name in METADATA:
            return func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in ("rnn_relu", "rnn_relu_cell") and self._depends(tensors):
            return self._recurrent(name, args)
        if name == "batch_norm" and self._depends(tensors):
            return self._batch_norm(func, args, kwargs)
        result = func(*args, **kwargs)
        made = (
            [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            if result is not None
            else list(args[:1])
        )
        if not made:
            return result
        data = any(id(t) in self._data for t in tensors)
        if name in _DETACHES and tensors[0].requires_grad and not made[0].requires_grad:
            self._next(name)
            self._cut[id(made[0])] = made[0]
            return result
        if any(id(t) in self._cut for t in tensors):
            raise UnmatchedForwardError(
                f"'{name}' uses an activation that was detached: the path through it carries values but no gradients, "
                "so what it adds on data is not known; detach only what the model returns"
            )
        call = self._next(name) if made[0].requires_grad else None
        if call is not None and call.kind != "parameter":
            data = True
            weights = [t for t in tensors if self._is_weight(t)]
            if weights:
                self._note_use(call, name, func, args, kwargs, tensors, weights, made[0])
            self._note_nodes(call, made)
        for t in made:
            if data:
                self._data[id(t)] = t
            elif t.requires_grad:
                self._weights.append(t)
                if name in MOVEMENTS and id(tensors[0]) in self.views:
                    self.views.add(id(t))
        return result

    def _depends(self, tensors: list[Tensor]) -> bool:
        return any(t.requires_grad for t in tensors)

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and id(tensor) not in self._data

    def _next(self, name: str) -> Operation:
        """The traced operation that stands where the forward pass is now."""
        traced = self.program.operations
        call = traced[self._position] if self._position < len(traced) else None
        if call is None or call.name != name:
            expected = f"'{call.name}' in '{call.module}'" if call is not None else "the end"
            raise UnmatchedForwardError(
                f"operation {self._position} of the forward pass is '{name}' where tracing met {expected}: the model's "
                "code takes another way than it did when it was traced (in evaluation form); trace it again, or make "
                "its steps independent of the data"
            )
        self._position += 1
        return call

    def _batch_of(self, tensor: Tensor, known: int | None) -> int | None:
        """The batch dimension; that of a constant made for all examples is the inputs' own."""
        if known is None and self.batch is not None:
            place = self.batch
            if tensor.dim() > place and tensor.shape[place] == self.count:
                return place
        return known

    def _note_use(
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
        batch = self._batch_of(result, call.batch)
        if batch is None and self.batch is not None:
            raise UnmatchedForwardError(
                f"'{name}' in '{call.module}' makes a value that is the same for all examples, so what each of them "
                "adds to it is not known"
            )
        batches = {}
        for t, known in zip(tensors, call.arguments, strict=True):
            place = None if self._is_weight(t) else self._batch_of(t, known)
            if place is not None:
                batches[id(t)] = place
        function = _OUT_OF_PLACE.get(name, func)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t if self._is_weight(t) else t.detach(), (args, kwargs)
        )
        kept = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        batches = {
            id(new): batches[id(old)] for old, new in zip(tensors, kept, strict=True) if id(old) in batches
        }
        use = Use(
            name, function, args, kwargs, weights, batches, [get_gradient_edge(result)], batch, result.shape
        )
        self.uses.append(use)

    def _note_nodes(self, call: Operation, made: list[Tensor]) -> None:
        for slot, tensor in zip(call.results, made, strict=False):
            if slot in self.program.nodes:
                self.note_node((slot,), tensor, call.batch)

    def note_node(self, key: Key, tensor: Tensor, known: int | None) -> None:
        """Remember a node, by its first value: a ReLU in place would overwrite it."""
        if key in self.nodes or key[0] not in self._live:
            return
        batch = self._batch_of(tensor, known)
        if batch is None and self.batch is not None:
            raise UnmatchedForwardError("a node of the network has the same value for all examples")
        value = tensor.clone() if self.differentiable else tensor.detach().clone()
        self.nodes[key] = Node(value, get_gradient_edge(tensor), batch)

    def _leaves_as(self, slot: int, tensor: Tensor) -> None:
        """An output counts as it leaves the network, after its activation if it has one."""
        node = self.nodes.pop((slot,), None)
        if node is not None:
            self.note_node((slot,), tensor, node.batch)

    def run_outside(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module left outside: what leaves it is an input of the network."""
        if self._paused:
            return forward(*args, **kwargs)
        call = self._next("outside")
        entering = [
            t
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and t.requires_grad and not self._is_weight(t)
        ]
        self._paused = True  # what is done here is none of the model's operations
        try:
            for slot, tensor in zip(call.results, entering, strict=True):
                self._leaves_as(slot, tensor)
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            result = pytree.tree_map_only(Tensor, Tensor.detach, forward(*args, **kwargs))
        finally:
            self._paused = False
        self._data.update((id(t), t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result

    def finish(self, returned: list[Tensor]) -> None:
        """Check that the forward pass came to the end of the traced one, and met all nodes."""
        if self._position != len(self.program.operations):
            call = self.program.operations[self._position]
            raise UnmatchedForwardError(
                f"the forward pass ended before '{call.name}' in '{call.module}', which was traced"
            )
        missing = [s for s in self.program.nodes if s in self._live and (s,) not in self.nodes]
        if missing:
            raise UnmatchedForwardError(f"the forward pass did not show the values of {len(missing)} nodes")
        for slot, tensor in zip(self.program.outputs, returned, strict=True):
            if slot is not None:
                self._leaves_as(slot, tensor)

    # -- operations that are taken apart --------------------------------------------------------------------------

    def _batch_norm(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Fixed edges to the normalized unit, then one edge gamma and a bias."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        x, mean, var = given["input"], given.get("running_mean"), given.get("running_var")
        if mean is None or var is None:
            raise UnmatchedForwardError(
                "a BatchNorm without running statistics mixes the examples of a batch; use track_running_stats=True"
            )
        call = self._next("batch_norm")
        normal = func(x, mean, var, None, None, False, 0.0, given.get("eps", 1e-5))
        weight, bias = given.get("weight"), given.get("bias")
        shape = (1, -1) + (1,) * (x.dim() - 2)

        def affine(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
            y = x if gamma is None else x * gamma.reshape(shape)
            return y if beta is None else y + beta.reshape(shape)

        result = affine(normal, weight, bias)
        weights = [t for t in (weight, bias) if t is not None and self._is_weight(t)]
        if weights:
            batch = self._batch_of(result, call.batch)
            kept = normal.detach()
            batches = {} if batch is None else {id(kept): batch}
            edge = get_gradient_edge(result)
            self.uses.append(
                Use(
                    "batch_norm",
                    affine,
                    (kept, weight, bias),
                    {},
                    weights,
                    batches,
                    [edge],
                    batch,
                    result.shape,
                )
            )
        self._data[id(result)] = result
        self._note_nodes(call, [result])
        return result

    def _recurrent(self, name: str, args: tuple[Any, ...]) -> Any:
        """A recurrent layer, step by step, so that its nodes show."""
        call = self._next(name)
        if name == "rnn_relu_cell":
            x, h, *cell = args
            cell = [p for p in cell if p is not None]
            (state,) = self._steps(x.unsqueeze(0), h, cell, 0, lambda _: (call.results[0],), call.batch)
            self._data[id(state)] = state
            return state
        x, hx, params, has_biases, layers, _dropout, _train, bidirectional, batch_first = args
        if self._is_weight(hx):
            raise UnmatchedForwardError(
                "an initial state that is a parameter cannot be followed on data; write the loop by hand"
            )
        batched = x.dim() == 3
        if batched and batch_first:
            x = x.transpose(0, 1)
        each, directions, last = 4 if has_biases else 2, 2 if bidirectional else 1, []
        slot = call.results[0]
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                cell = list(params[at * each : (at + 1) * each])
                states = self._steps(
                    x, hx[at], cell, direction, lambda t, at=at: (slot, at, t), 0 if batched else None
                )
                last.append(states[0] if direction else states[-1])
                outputs.append(torch.stack(states))
            x = torch.cat(outputs, -1)
        h_n = torch.stack(last)
        out = x.transpose(0, 1) if batched and batch_first else x
        self._data.update({id(out): out, id(h_n): h_n})
        for s, tensor, place in zip(
            call.results, (out, h_n), (call.batch, 1 if batched else None), strict=False
        ):
            if s in self.program.nodes:
                self.note_node((s,), tensor, place)
        return out, h_n

    def _steps(
        self,
        x: Tensor,
        h: Tensor,
        cell: list[Tensor],
        direction: int,
        key: Callable[[int], Key],
        batch: int | None,
    ) -> list[Tensor]:
        """States h_t = [W_in x_t + W_rec h_{t-1} + b]_+ of one cell, ``x [T, ...]``."""
        w_in, w_rec, *biases = cell
        bias = biases[0] + biases[1] if biases else None
        u = F.linear(x, w_in, bias)
        states: list[Tensor] = [h] * len(u)
        before, edges = list(states), list[GradientEdge]()
        order = reversed(range(len(u))) if direction else range(len(u))
        for t in order:
            before[t] = h
            z = u[t] + F.linear(h, w_rec)
            edges.append(get_gradient_edge(z))
            self.note_node(key(t), z, batch)
            h = states[t] = F.relu(z)
        edges = edges[::-1] if direction else edges
        place = None if batch is None else batch + 1
        inputs, previous = x.detach(), torch.stack(before).detach()
        for data, weights in ((inputs, (w_in, *biases)), (previous, (w_rec,))):
            batches = {} if place is None else {id(data): place}
            use = Use("linear", _linear, (data, *weights), {}, list(weights), batches, edges, place, u.shape)
            self.uses.append(use)
        return states


def _linear(x: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
    return F.linear(x, weight, sum(biases[1:], biases[0]) if biases else None)
