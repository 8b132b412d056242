"""Operations that are affine in the activations and in the parameters: their terms are found by probing.

Letters: h activations, w weights, o an element of a result, i of an operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.network.rules.elementwise import counted
from pathspace.ops.family import Family
from pathspace.ops.listing import NONE, Listing, Weights
from pathspace.ops.terms import Operation, Terms, check_terms, floats, split

JOINS = frozenset(
    ["cat", "stack", "constant_pad_nd", "slice_scatter", "select_scatter", "index_put", "copy"]
)
PRODUCTS = frozenset(["mm", "mv", "bmm", "addmm", "addmv", "baddbmm", "dot"])
_OF_NUMBERS = JOINS | {"add", "sub", "mul", "rsub"}
"""Operations that take whole numbers as numbers, not as places."""
_FILLS = frozenset(
    ["where", "masked_fill", "gather", "index_select", "index", "index_put", "add", "sub"]
)
"""Operations whose constants may be masks."""


class Affine(Family):
    """Everything else: affine in the activations and in the parameters."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return that it is."""
        del step, listing
        return True

    def listed(self, step: Step, listing: Listing) -> None:
        """Find the terms by probing, and write an edge for each."""
        write_affine(step, listing)


def write_affine(step: Step, listing: Listing) -> None:
    """Write down the edges of an affine operation."""
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
    activations: list[tuple[int, Tensor]] = []
    weights: list[tuple[int, Tensor]] = []
    for place, leaf in enumerate(pytree.tree_leaves((step.args, step.kwargs))):
        if not isinstance(leaf, Tensor):
            continue
        if listing.is_weight(leaf):
            weights.append((place, leaf))
        if _is_activation(leaf, step, listing):
            activations.append((place, leaf))
    if step.name in PRODUCTS and not activations and len(weights) > 1:
        # a parameter in the place of activations
        activations.append(weights.pop(-2))
    return _Operands(activations, weights)


def _is_activation(tensor: Tensor, step: Step, listing: Listing) -> bool:
    """Return whether an operand is a unit, or an input that is read as a number."""
    if listing.is_unit(tensor):
        return True
    is_number = tensor.is_floating_point() or step.name in _OF_NUMBERS
    return is_number and listing.is_data(tensor)


def _affine_nodes(
    step: Step, listing: Listing, operands: _Operands, sources: Sequence[Tensor], actual: Tensor
) -> Tensor:
    """Return nodes for the result of an affine operation, and write an edge for each of its terms if wanted."""
    if not listing.with_edges:
        return listing.new_nodes(actual.shape)
    variables = [*operands.activations, *operands.weights]
    places = [place for place, _ in variables]
    values = [t.detach().double().flatten() for _, t in variables]
    count = len(operands.activations)
    operation = Operation(step.function, step.args, step.kwargs, places)
    terms = listing.terms(operation, values, count)
    check_terms(step.name, terms, values, count, actual)
    if step.name in _FILLS:
        terms = replace(terms, constant=counted(terms.constant))
    moved = _moved(terms, sources)
    if moved is not None:
        return moved
    weights = [listing.weights[id(t)] for _, t in operands.weights]
    return _new_nodes(terms, sources, weights, listing)


def _new_nodes(
    terms: Terms, sources: Sequence[Tensor], weights: Sequence[Weights], listing: Listing
) -> Tensor:
    """Return new nodes for the result of an affine operation, and write an edge for each of its terms."""
    nodes = listing.new_nodes(torch.Size([len(terms.constant)]))
    (where,) = terms.constant.nonzero(as_tuple=True)
    bias = torch.zeros_like(where)
    listing.add_edges(bias, nodes[where], NONE, terms.constant[where])
    for a, reads in terms.fixed:
        listing.add_edges(sources[a][reads.source], nodes[reads.target], NONE, reads.factor)
    for b, reads in terms.biased:
        used = weights[b].at(reads.source)
        bias = torch.zeros_like(used.numbers)
        factor = reads.factor * used.factors
        listing.add_edges(bias, nodes[reads.target], used.numbers, factor)
    for a, b, reads in terms.mixed:
        used = weights[b].at(reads.member)
        factor = reads.factor * used.factors
        listing.add_edges(sources[a][reads.source], nodes[reads.target], used.numbers, factor)
    return nodes


def _moved(terms: Terms, sources: Sequence[Tensor]) -> Tensor | None:
    """Return the nodes of the operands in their new places, if the operation does nothing but move them."""
    if not terms.fixed or terms.mixed or terms.biased or bool(terms.constant.any()):
        return None
    size = len(terms.constant)
    target = torch.cat([reads.target for _, reads in terms.fixed])
    factor = torch.cat([reads.factor for _, reads in terms.fixed])
    each_once = len(target) == size and target.unique().numel() == size
    if not each_once or not bool((factor == 1).all()):
        return None
    nodes = torch.empty(size, dtype=torch.long)
    nodes[target] = torch.cat([sources[a][reads.source] for a, reads in terms.fixed])
    return nodes
