"""The written-out graph of a network, and what is open in it for given data.

Letters: P paths, E weights, n examples, I inputs, G gates, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pathspace.graph.capture import Capture, KeepsWhole, plain, wrapped
from pathspace.network import Network
from pathspace.network.call import Call, arguments_in, batch_in
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.eager import uncompiled
from pathspace.network.errors import UntraceableError, expect_weights
from pathspace.network.network import current_values
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.ops.listing import Listing
from pathspace.ops.terms import NOT_WRITTEN
from pathspace.paths.listing.captured import Handler, outside, write_down
from pathspace.paths.space.reduction import ReductionGraph, reduction_graph
from pathspace.squared.normalization import Normalization
from pathspace.squared.precision import AtLeast, wide_copy
from pathspace.torch_private import pytree


@dataclass(frozen=True, eq=False)
class UnrolledGraph:
    """Every unit at every time step and position as a node; made by :func:`unroll`.

    Node 0 is the bias node; an edge goes from a smaller to a larger number.

    Attributes:
        reduction: the graph of unit classes that it covers.
        num_nodes: how many nodes there are.
        inputs: nodes of the inputs, ``[I]``.
        outputs: nodes of the outputs, ``[O]``.
        source: node where each edge starts.
        target: node where it ends.
        weight: number of its weight in ``reduction``; -1 for a fixed edge.
        factor: what it multiplies with besides.
        gate: number of its gate; -1 for an edge that is always open.
        num_gates: G.
    """

    reduction: ReductionGraph
    num_nodes: int
    inputs: Tensor
    outputs: Tensor
    source: Tensor
    target: Tensor
    weight: Tensor
    factor: Tensor
    gate: Tensor
    num_gates: int

    @cached_property
    def leaving(self) -> list[list[int]]:
        """Numbers of the edges that leave each node."""
        result: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for edge, node in enumerate(self.source.tolist()):
            result[node].append(edge)
        return result

    @cached_property
    def ways_out(self) -> list[int]:
        """For every node, how many paths lead from it to an output."""
        ends = Counter(self.outputs.tolist())
        targets = self.target.tolist()
        ways = [0] * self.num_nodes
        for node in reversed(range(self.num_nodes)):
            ways[node] = ends[node] + sum(ways[targets[edge]] for edge in self.leaving[node])
        return ways

    @property
    def num_paths(self) -> int:
        """Number of paths from an input or the bias node to an output; exact, without listing them."""
        return self.ways_out[0] + sum(self.ways_out[node] for node in self.inputs.tolist())


@dataclass(frozen=True, eq=False)
class Activity:
    """Inputs, gates and outputs of an unrolled graph for each example.

    Attributes:
        inputs: values of the inputs, ``[n, I]``.
        gates: how far each gate is open, ``[n, G]``: 0 or 1, or a slope.
        outputs: what the model returned, ``[n, O]``.
    """

    inputs: Tensor
    gates: Tensor
    outputs: Tensor


@tables_on_the_cpu()
def unroll(network: Network) -> UnrolledGraph:
    """Write a traced network out: one node for every unit at every time step and position.

    The graph has the number of steps and positions of the example input that the network was traced
    with.

    Args:
        network: a traced network.

    Returns:
        The graph, on the CPU. It holds no weights but those outside the network, running statistics
        and constants.

    Raises:
        UntraceableError: an operation cannot be written out, or the graph is too large.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> ps.paths.unroll(ps.trace(model, torch.zeros(1, 2))).num_paths
        10
    """
    expect_weights(network)
    try:
        listing, graph, nodes, _ = _run(network, _example(network.call, 0), with_edges=True)
    except (
        IndexError,
        RuntimeError,
        UntraceableError,
    ):
        # a length, or a mask that hides everything
        listing, graph, nodes, _ = _run(network, _example(network.call, 1), with_edges=True)
    edges = listing.edges
    empty = torch.zeros(0, dtype=torch.long)
    return UnrolledGraph(
        reduction=graph,
        num_nodes=listing.num_nodes,
        inputs=torch.cat([empty, *listing.inputs]),
        outputs=nodes,
        source=torch.cat([empty, *edges.source]),
        target=torch.cat([empty, *edges.target]),
        weight=torch.cat([empty, *edges.weight]),
        factor=torch.cat([torch.zeros(0, dtype=torch.float64), *edges.factor]),
        gate=torch.cat([empty, *edges.gate]),
        num_gates=listing.num_gates,
    )


def _example(call: Call, whole: int) -> Any:
    """Return inputs of the form of the example input: random numbers, and the same whole number everywhere."""
    generator = torch.Generator().manual_seed(0)

    def real(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
        return torch.full(tensor.shape, whole, dtype=tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, real, next(examples(call, call.arguments)))


@tables_on_the_cpu()
def activity(
    network: Network, data: Any, parameters: Mapping[str, Tensor] | None = None
) -> Activity:
    """Compute which gates of the unrolled graph are open, example by example.

    Args:
        network: a traced network.
        data: what its model is called with, as the example input of :func:`pathspace.trace` was: as
            many steps and positions, any number of examples.
        parameters: weights to use instead of the model's own, by name.

    Returns:
        Inputs, gates and outputs, in float64 on the CPU.

    Raises:
        KeyError: ``parameters`` lacks a parameter of the network.
        ValueError: one of them has another shape, or the data are not of the form of the example
            input.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
        >>> model[0].weight.data = torch.tensor([[2.0]])
        >>> ps.paths.activity(ps.trace(model, torch.zeros(1, 1)), torch.tensor([[3.0], [-3.0]])).outputs.flatten()
        tensor([6., 0.], dtype=torch.float64)
    """
    expect_weights(network)
    inputs = []
    gates = []
    outputs = []
    for example in examples(network.call, data):
        listing, _, _, values = _run(network, example, with_edges=False, parameters=parameters)
        none = torch.zeros(0, dtype=torch.float64)
        inputs.append(torch.cat([none, *listing.input_values]))
        gates.append(torch.cat([none, *listing.gates]))
        outputs.append(values)
    return Activity(torch.stack(inputs), torch.stack(gates), torch.stack(outputs))


def examples(call: Call, data: Any) -> Iterator[Any]:
    """Yield the examples of a batch, each a batch of one, in float64."""
    traced, form = pytree.tree_flatten(call.arguments)
    leaves, other = pytree.tree_flatten(data)
    if form != other or not all(map(_is_alike, traced, leaves)):
        raise ValueError(
            "the data are not of the form of the example input that the network was traced with: expected "
            f"{_form_in_words(traced)}, got {_form_in_words(leaves)}. Give data as the model is called with "
            "them, or trace the model with such an input"
        )
    first = next(k for k in traced if isinstance(k, Tensor))
    dims = [batch_in(k, first, call.batch_dim) if isinstance(k, Tensor) else None for k in traced]
    count = _count(leaves, dims)
    for k, g, d in zip(traced, leaves, dims, strict=True):
        if isinstance(k, Tensor):
            _expect_sizes(k.shape, g.shape, d)
    for n in range(count):
        one = [g if d is None else g.narrow(d, n, 1) for g, d in zip(leaves, dims, strict=True)]
        yield pytree.tree_unflatten(one, form)


def _expect_sizes(traced: torch.Size, given: torch.Size, batch_dim: int | None) -> None:
    """Raise ValueError unless data have the steps and positions of the example input."""
    if _without(traced, batch_dim) != _without(given, batch_dim):
        raise ValueError(
            f"the data have the shape {tuple(given)}, the network was traced with {tuple(traced)}: steps and "
            "positions must agree; trace it with such an input"
        )


def _count(leaves: list[Any], dims: list[int | None]) -> int:
    """Return the number of examples in a batch; one if nothing holds examples."""
    lengths = {g.shape[d] for g, d in zip(leaves, dims, strict=True) if d is not None}
    if len(lengths) > 1:
        raise ValueError(f"the data hold {sorted(lengths)} examples; all tensors must hold as many")
    if lengths == {0}:
        raise ValueError("the batch is empty: give one example at least")
    return next(iter(lengths), 1)


def _is_alike(traced: Any, given: Any) -> bool:
    """Return whether both are no tensors, or both are tensors of as many dimensions and of a type alike."""
    if not isinstance(traced, Tensor) or not isinstance(given, Tensor):
        return isinstance(traced, Tensor) == isinstance(given, Tensor)
    return traced.dim() == given.dim() and traced.is_floating_point() == given.is_floating_point()


def _form_in_words(leaves: list[Any]) -> str:
    """Return what kinds of tensors and other arguments an input has."""
    parts = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kind = "real" if leaf.is_floating_point() else "whole"
            parts.append(f"a tensor of {leaf.dim()} dimensions with {kind} numbers")
        else:
            parts.append(type(leaf).__name__)
    return ", ".join(parts) or "nothing"


def _without(shape: torch.Size, dim: int | None) -> list[int]:
    """Return the sizes of all dimensions but one."""
    return [size for d, size in enumerate(shape) if d != dim]


def _check_sums(network: Network) -> None:
    """Refuse products, and a root mean square written by hand; layers of normalization are met later, or are none."""
    name = network.tape.product
    why = "it multiplies two activations or weights"
    for instruction in network.tape.instructions:
        kind = instruction.name.partition(" in ")[0]
        if (
            not name
            and isinstance(instruction.form, Normalization)
            and ("mul" in kind or "div" in kind)
        ):
            name = instruction.name
            why = "it divides by a statistic of what enters"
    if name:
        raise UntraceableError(
            name, "", f"{why}, so what it returns is no sum over paths", NOT_WRITTEN
        )


def _run(
    network: Network,
    example: Any,
    *,
    with_edges: bool,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[Listing, ReductionGraph, Tensor, Tensor]:
    """Run a copy of the model on one example; returns the list, the graph, the output nodes and their values."""
    current_values(network)
    values = current_values(network, parameters)
    _check_sums(network)
    graph = reduction_graph(network)
    capture = Capture()
    handler = Handler(capture, network.program.cuts)
    model = _copy_of_model(network, values, handler)
    listing = Listing(with_edges=with_edges)
    listing.buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    state = _state(model, network.call.outside)
    for name in network.parameters:
        own = plain(state[name])
        capture.learned.add(id(own))
        listing.bind_parameter(graph.number((name, (0,) * own.dim())) if own.numel() else 0, own)
    args, kwargs = _bound_arguments(network.call, example, listing, capture)
    with (
        torch.random.fork_rng(devices=[]),
        uncompiled(),
        capture.running(),
        AtLeast(torch.float64),
        KeepsWhole(handler),
    ):
        called = functional_call(model, state, tuple(args), kwargs)
        returned = [plain(t) for t in network.returned(called)]
    with torch.no_grad():
        write_down(capture.live(returned), listing)
    nodes, results = _outputs(listing, returned)
    return listing, graph, nodes, results


def _copy_of_model(network: Network, values: Mapping[str, Tensor], handler: Handler) -> nn.Module:
    """Return the model in float64 with some values of its parameters; modules outside run without a look inside."""
    model = evaluation_form_of(network.model).to("cpu", torch.float64)
    for name in network.parameters:
        model.get_parameter(name).data.copy_(values[name])
    for name in network.call.outside:
        outside(handler, model.get_submodule(name))
    return model


def _bound_arguments(
    call: Call, example: Any, listing: Listing, capture: Capture
) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of the model's arguments, whose elements are the inputs of a list; states are zero."""

    def bind(tensor: Tensor) -> Tensor:
        copy = wide_copy(tensor)
        listing.bind_data(copy)
        capture.derived.add(id(copy))
        return wrapped(copy)

    def zeros(tensor: Tensor) -> Tensor:
        return wrapped(torch.zeros_like(wide_copy(tensor)))

    def prepare(key: int | str, value: Any) -> Any:
        if key not in call.states:
            return pytree.tree_map_only(Tensor, bind, value)
        if not listing.with_edges:
            _expect_zero_state(key, value)
        return pytree.tree_map_only(Tensor, zeros, value)

    args, kwargs = arguments_in(example)
    return (
        [prepare(place, value) for place, value in enumerate(args)],
        {name: prepare(name, value) for name, value in kwargs.items()},
    )


def _expect_zero_state(key: int | str, value: Any) -> None:
    if any(bool(t.any()) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)):
        raise ValueError(f"the state {key!r} carried over from earlier data must be zero")


def _outputs(listing: Listing, returned: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output nodes and their values, each tensor once."""
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    for tensor in returned:
        outputs.update((id(t), (t, nodes)) for t, nodes in listing.before_the_end(tensor))
    outputs.update((id(t), (t, nodes)) for t, nodes in listing.entered)
    if not outputs:
        raise UntraceableError(
            "output", "", "no tensor that the model returns depends on its parameters"
        )
    nodes = torch.cat([nodes.flatten() for _, nodes in outputs.values()])
    values = torch.cat([t.detach().double().flatten() for t, _ in outputs.values()])
    return nodes, values


def _state(model: nn.Module, outside: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a copy, without those of modules left outside."""
    left: set[int] = set()
    for name in outside:
        left |= {id(t) for t in model.get_submodule(name).state_dict(keep_vars=True).values()}
    held = [*model.named_parameters(), *model.named_buffers()]
    return {key: wrapped(t.detach()) for key, t in held if id(t) not in left}
