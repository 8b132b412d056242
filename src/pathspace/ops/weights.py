"""Views of parameters, and products of one with a constant."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.network.errors import UntraceableError
from pathspace.ops.affine import PRODUCTS
from pathspace.ops.family import Family
from pathspace.ops.listing import Listing, Weights
from pathspace.ops.terms import Operation, floats, single, split


class OfWeights(Family):
    """A view of a parameter, or a parameter times a constant."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether neither activations nor inputs have a part in it."""
        if step.name in PRODUCTS:
            return False
        return not (listing.has_unit(step.tensors) or listing.has_data(step.tensors))

    def listed(self, step: Step, listing: Listing) -> None:
        """Find which weight each element of the result is, and its factor."""
        pieces = floats(step.result)
        if not pieces:
            return
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        place = next(p for p, leaf in enumerate(leaves) if listing.is_weight(leaf))
        operand = leaves[place]
        operation = Operation(step.function, step.args, step.kwargs, [place])
        zeros = torch.zeros(operand.numel(), dtype=torch.float64)
        terms = listing.terms(operation, [zeros], 1)
        values = single(terms, 0)
        constant = terms.constant
        if values.target.unique().numel() != len(values.target) or bool(constant.any()):
            raise UntraceableError(step.name, "", "its result is no view of a parameter")
        used = listing.weights[id(operand)].at(values.source)
        numbers = torch.zeros(len(constant), dtype=torch.long)
        factors = torch.zeros_like(constant)
        numbers[values.target] = used.numbers
        factors[values.target] = values.factor * used.factors
        parts = zip(split(numbers, pieces), split(factors, pieces), strict=True)
        for piece, (some, their_factors) in zip(pieces, parts, strict=True):
            listing.bind_weights(piece, Weights(some, their_factors))
