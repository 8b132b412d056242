"""Families of operations of a captured pass, and the edges of the paths through them.

Each family has methods for the readers of a pass, so far :meth:`Family.listed`. The first family in
:data:`FAMILIES` that takes a step reads it.

Letters: h activations, w weights, o an element of a result, i of an operand.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.network.errors import UntraceableError
from pathspace.network.rules.elementwise import counted
from pathspace.network.rules.scale_free import COMPARISONS, SIGNS
from pathspace.network.trace.functions import CLAMPS, ENDINGS
from pathspace.ops.affine import NOT_WRITTEN, Operation, Terms, check_terms, floats, single, split
from pathspace.ops.gates import REDUCED, Gated, chosen, gated, gated_by_data, is_relu
from pathspace.ops.listing import NONE, Listing, Weights


class Family(Protocol):
    """Operations that are alike to every reader of a captured pass."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether a step is one of the family."""
        ...

    def listed(self, step: Step, listing: Listing) -> None:
        """Write down the edges of a step."""
        ...


def _units(step: Step, listing: Listing) -> bool:
    return any(listing.is_unit(t) for t in step.tensors)


def _weights(step: Step, listing: Listing) -> bool:
    return any(listing.is_weight(t) for t in step.tensors)


def _data(step: Step, listing: Listing) -> bool:
    return any(listing.is_data(t) for t in step.tensors)


class Ending:
    """Functions after the last parameter that are no sums of paths: their inputs are the outputs of the network."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is a function of such a thing, or makes one."""
        tensors = step.tensors
        if any(id(t) in listing.tails for t in tensors):
            return True
        return _units(step, listing) and self._ends(step, listing, tensors)

    def _ends(self, step: Step, listing: Listing, tensors: Sequence[Tensor]) -> bool:
        name = step.name
        if name in CLAMPS:
            return not is_relu(step.args, step.kwargs)
        units = [listing.is_unit(t) for t in tensors]
        if name in _PRODUCTS:
            return sum(units[-2:]) > 1
        if name == "mul":
            return sum(units) > 1
        if name == "div":
            return sum(units) > 1 or (units[-1] and step.args[0] is not tensors[-1])
        return name in ENDINGS or name in ("_softmax", "_log_softmax")

    def listed(self, step: Step, listing: Listing) -> None:
        """Remember what entered."""
        if _weights(step, listing):
            why = "a parameter meets what is no sum of paths, such as a weight made by relu or abs"
            raise UntraceableError(step.name, "", why, NOT_WRITTEN)
        entered = [node for t in step.tensors for node in listing.before_the_end(t)]
        for t in pytree.tree_leaves(step.result):
            if isinstance(t, Tensor):
                listing.tails[id(t)] = entered


class OfInputs:
    """A function of inputs and constants alone, and new tensors: an input, a constant, or an input that was moved."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether no activation and no weight has a part in the result."""
        made = not (_units(step, listing) or _weights(step, listing)) or _is_factory(step.name)
        return made and not _is_random(step.name)

    def listed(self, step: Step, listing: Listing) -> None:
        """Bind the result; a rearranged input that has nodes keeps them."""
        tensors = step.tensors
        if self._moves_inputs(step, tensors, listing):
            _affine(step, listing)
            listing.bind_data(step.result)
            return
        # a gate times the zeros that a recurrence begins with is no input
        start = step.name == "mul" and any(map(listing.is_zero, tensors))
        if _data(step, listing) and not start and not _is_factory(step.name):
            listing.bind_data(step.result)

    def _moves_inputs(self, step: Step, tensors: Sequence[Tensor], listing: Listing) -> bool:
        inputs = [t for t in tensors if listing.is_data(t)]
        moves = step.name in _JOINS or any(map(listing.was_read, inputs))
        real = all(t.is_floating_point() for t in inputs)
        return moves and bool(inputs) and step.name in _MOVEMENTS and real


class Known:
    """Functions of the example that count as inputs: comparisons, signs, orders and random numbers."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is one of these."""
        del listing
        name = step.name
        return (
            name in COMPARISONS
            or name in SIGNS
            or _is_random(name)
            or name in ("argsort", "argmax")
        )

    def listed(self, step: Step, listing: Listing) -> None:
        """Bind the result as an input."""
        listing.bind_data(step.result)


class Statistics:
    """Layers that divide by a statistic of what enters."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is such a layer."""
        del listing
        return step.name in ("layer_norm", "rms_norm", "group_norm")

    def listed(self, step: Step, listing: Listing) -> None:
        """Refuse it."""
        del listing
        why = "it divides by a statistic of what enters, which is no fixed factor of a path"
        raise UntraceableError(step.name, "", why, NOT_WRITTEN)


class Embedding:
    """Rows of a table: a linear map of one-hot inputs."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether rows of a table of weights are named by inputs."""
        if step.name == "embedding":
            return listing.is_weight(step.args[0]) and listing.is_data(step.args[1])
        if step.name != "index" or not listing.is_weight(step.args[0]):
            return False
        return (
            len(step.args[1]) == 1 and listing.is_data(step.args[1][0]) and step.args[0].dim() == 2
        )

    def listed(self, step: Step, listing: Listing) -> None:
        """Write an edge from each word at each place to each feature there."""
        table, tokens = step.args[:2]
        tokens = tokens if isinstance(tokens, Tensor) else tokens[0]
        weights = listing.weights[id(table)]
        words, width = table.shape
        sources = listing.new_nodes(torch.Size([tokens.numel(), words]))
        nodes = listing.new_nodes(step.result.shape)
        listing.inputs.append(sources.flatten())
        listing.input_values.append(functional.one_hot(tokens.flatten(), words).flatten().double())
        shape = (tokens.numel(), words, width)
        columns = (
            sources[:, :, None],
            nodes.reshape(-1, 1, width),
            weights.numbers,
            weights.factors,
        )
        listing.add_edges(*(t.expand(shape) for t in columns))
        listing.bind_nodes(step.result, nodes)


class Gate:
    """Edges that data open and close: ReLU and its kin, maxima, masks, choices and factors that are inputs."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step has gates."""
        return self._gate(step, listing) is not None

    def _gate(self, step: Step, listing: Listing) -> Gated | None:
        gate = gated(step.name, step.function, step.args, step.kwargs)
        if gate is not None:
            return gate
        data = _data(step, listing)
        if not (data or step.name in REDUCED) or (
            _weights(step, listing) and step.name not in _PICKS
        ):
            return None
        if step.name == "index_put" and listing.is_data(step.args[1][0]):
            x, (mask, *_), item = step.args[:3]
            return chosen(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), item, x)
        name = step.name
        function = step.function
        args = step.args
        if name == "index":
            name = "__getitem__"
            function = operator.getitem
            args = (args[0], tuple(slice(None) if i is None else i for i in args[1]))
        return gated_by_data(name, function, args, step.kwargs, listing.is_unit, listing.is_data)

    def listed(self, step: Step, listing: Listing) -> None:
        """Write an edge for each gate."""
        gate = self._gate(step, listing)
        assert gate is not None
        sources = torch.cat([listing.sources(t).flatten() for t in gate.operands])
        o, i, opened = gate.edges
        first = step.result if isinstance(step.result, Tensor) else step.result[0]
        nodes = listing.new_nodes(first.shape)
        numbers = listing.add_gates(opened)
        ones = torch.ones(len(o), dtype=torch.float64)
        listing.add_edges(sources[i], nodes.flatten()[o], NONE, ones, numbers)
        if not isinstance(step.result, Tensor):  # a maximum and its indices
            listing.bind_data(step.result[1:])
        listing.bind_nodes(first, nodes)


class OfWeights:
    """A view of a parameter, or a parameter times a constant."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether neither activations nor inputs have a part in it."""
        return not (_units(step, listing) or _data(step, listing) or step.name in _PRODUCTS)

    def listed(self, step: Step, listing: Listing) -> None:
        """Find which weight each element of the result is, and its factor."""
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        place, operand = next((p, t) for p, t in enumerate(leaves) if listing.is_weight(t))
        weights = listing.weights[id(operand)]
        pieces = floats(step.result)
        if not pieces:
            return
        operation = Operation(step.function, step.args, step.kwargs, [place])
        zeros = torch.zeros(operand.numel(), dtype=torch.float64)
        terms = listing.terms(operation, [zeros], 1)
        values = single(terms, 0)
        constant = terms.constant
        if values.target.unique().numel() != len(values.target) or bool(constant.any()):
            raise UntraceableError(step.name, "", "its result is no view of a parameter")
        numbers = torch.zeros(len(constant), dtype=torch.long)
        factors = torch.zeros_like(constant)
        numbers[values.target] = weights.numbers.flatten()[values.source]
        factors[values.target] = values.factor * weights.factors.flatten()[values.source]
        for piece, n, f in zip(pieces, split(numbers, pieces), split(factors, pieces), strict=True):
            listing.bind_weights(piece, Weights(n, f))


class Affine:
    """Everything else: affine in the activations and in the parameters."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return that it is."""
        del step, listing
        return True

    def listed(self, step: Step, listing: Listing) -> None:
        """Find the terms by probing, and write an edge for each."""
        _affine(step, listing)


def _affine(step: Step, listing: Listing) -> None:
    pieces = floats(step.result)
    operands = _operands(step, listing)
    sources = [listing.sources(t).flatten() for _, t in operands.activations]
    if not pieces:  # where a maximum is: known from the example
        listing.bind_data(step.result)
        return
    actual = torch.cat([t.detach().double().reshape(-1) for t in pieces])
    nodes = _affine_nodes(step, listing, operands, sources, actual)
    for piece, part in zip(pieces, split(nodes, pieces), strict=True):
        listing.bind_nodes(piece, part)


@dataclass(frozen=True)
class _Operands:
    """The operands of an affine operation, with their places among its arguments.

    Attributes:
        activations: units and inputs; a parameter that stands in for one.
        weights: the other parameters.
    """

    activations: list[tuple[int, Tensor]]
    weights: list[tuple[int, Tensor]]


def _operands(step: Step, listing: Listing) -> _Operands:
    """Return the operands of an affine operation."""
    whole_numbers = step.name in _NUMBERS
    activations: list[tuple[int, Tensor]] = []
    weights: list[tuple[int, Tensor]] = []
    for place, t in enumerate(pytree.tree_leaves((step.args, step.kwargs))):
        if not isinstance(t, Tensor):
            continue
        if listing.is_weight(t):
            weights.append((place, t))
        if listing.is_unit(t) or (listing.is_data(t) and (t.is_floating_point() or whole_numbers)):
            activations.append((place, t))
    if step.name in _PRODUCTS and not activations and len(weights) > 1:
        # a parameter in the place of activations
        activations.append(weights.pop(-2))
    return _Operands(activations, weights)


def _affine_nodes(
    step: Step, listing: Listing, operands: _Operands, sources: Sequence[Tensor], actual: Tensor
) -> Tensor:
    """Return nodes for the result of an affine operation, and write an edge for each of its terms if wanted."""
    if not listing.with_edges:
        return listing.new_nodes(actual.shape)
    variables = [*operands.activations, *operands.weights]
    values = [t.detach().double().flatten() for _, t in variables]
    count = len(operands.activations)
    terms = listing.terms(
        Operation(step.function, step.args, step.kwargs, [p for p, _ in variables]), values, count
    )
    check_terms(step.name, terms, values, count, actual)
    if step.name in (*_PICKS, "add", "sub"):
        terms = replace(terms, constant=counted(terms.constant))
    weights = [listing.weights[id(t)] for _, t in operands.weights]
    return _placed(terms, sources, weights, listing)


def _placed(
    terms: Terms, sources: Sequence[Tensor], weights: Sequence[Weights], listing: Listing
) -> Tensor:
    """Return nodes for the result of an affine operation: the old ones where it only moves them."""
    moved = _moved(terms, sources)
    if moved is not None:
        return moved
    nodes = listing.new_nodes(torch.Size([len(terms.constant)]))
    (where,) = terms.constant.nonzero(as_tuple=True)
    listing.add_edges(torch.zeros_like(where), nodes[where], NONE, terms.constant[where])
    for a, r in terms.fixed:
        listing.add_edges(sources[a][r.source], nodes[r.target], NONE, r.factor)
    for b, r in terms.biased:
        used, factors = (t.flatten()[r.source] for t in (weights[b].numbers, weights[b].factors))
        listing.add_edges(torch.zeros_like(used), nodes[r.target], used, r.factor * factors)
    for a, b, r in terms.mixed:
        used, factors = (t.flatten()[r.member] for t in (weights[b].numbers, weights[b].factors))
        listing.add_edges(sources[a][r.source], nodes[r.target], used, r.factor * factors)
    return nodes


def _moved(terms: Terms, sources: Sequence[Tensor]) -> Tensor | None:
    """Return the nodes of the operands in their new places, if the operation does nothing but move them."""
    if not terms.fixed or terms.mixed or terms.biased or bool(terms.constant.any()):
        return None
    size = len(terms.constant)
    target = torch.cat([r.target for _, r in terms.fixed])
    factor = torch.cat([r.factor for _, r in terms.fixed])
    once = len(target) == size and target.unique().numel() == size
    if not once or not bool((factor == 1).all()):
        return None
    nodes = torch.empty(size, dtype=torch.long)
    nodes[target] = torch.cat([sources[a][r.source] for a, r in terms.fixed])
    return nodes


def _is_factory(name: str) -> bool:
    """Return whether an operation reads only the shape and type of a tensor."""
    return name.startswith("new_") or (name.endswith("_like") and not _is_random(name))


def _is_random(name: str) -> bool:
    return name.startswith(("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential"))


_JOINS = frozenset(
    ["cat", "stack", "constant_pad_nd", "slice_scatter", "select_scatter", "index_put", "copy"]
)
_MOVEMENTS = _JOINS | {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze"),
    *("expand", "slice", "select", "split", "split_with_sizes", "unbind", "flip", "roll"),
    *("repeat", "index", "index_select", "clone", "detach", "alias", "unfold", "diagonal"),
    *(
        "pixel_shuffle",
        "pixel_unshuffle",
        "_to_copy",
        "as_strided",
        "repeat_interleave",
        "lift_fresh",
    ),
}
_NUMBERS = _JOINS | {"add", "sub", "mul", "rsub"}
"""What takes whole numbers as numbers, not as places."""
_PICKS = (
    "where",
    "masked_fill",
    "gather",
    "index_select",
    "index",
    "index_put",
)  # also of what is learned
_PRODUCTS = frozenset(["mm", "mv", "bmm", "addmm", "addmv", "baddbmm", "dot"])

FAMILIES: tuple[Family, ...] = (
    Ending(),
    OfInputs(),
    Known(),
    Statistics(),
    Embedding(),
    Gate(),
    OfWeights(),
    Affine(),
)
"""In the order in which they are asked."""


def listed(step: Step, listing: Listing) -> None:
    """Write down the edges of one step."""
    for family in FAMILIES:
        if family.takes(step, listing):
            family.listed(step, listing)
            return
