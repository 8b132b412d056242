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
        """Find which weight each element of the results is, and its factor.

        Raises:
            UntraceableError: an element of a result is a sum of weights.
        """
        results = floats(step.result)
        if not results:
            return
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        place = next(p for p, leaf in enumerate(leaves) if listing.is_weight(leaf))
        operand = leaves[place]
        operation = Operation(step.function, step.args, step.kwargs, [place])
        zeros = torch.zeros(operand.numel(), dtype=torch.float64)
        terms = listing.terms(operation, [zeros], 1)
        reads = single(terms, 0)
        has_sums = reads.target.unique().numel() != len(reads.target)
        if has_sums or bool(terms.constant.any()):
            raise UntraceableError(step.name, "", "its result is no view of a parameter")
        read = listing.weights[id(operand)].at(reads.source)
        # an element that reads no weight is weight 0 times 0
        numbers = torch.zeros(len(terms.constant), dtype=torch.long)
        factors = torch.zeros_like(terms.constant)
        numbers[reads.target] = read.numbers
        factors[reads.target] = reads.factor * read.factors
        numbers_of = split(numbers, results)
        factors_of = split(factors, results)
        for result, own_numbers, own_factors in zip(results, numbers_of, factors_of, strict=True):
            listing.bind_weights(result, Weights(own_numbers, own_factors))
