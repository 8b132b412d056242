"""Functions that are no sums of paths: those after the last parameter, and divisions by statistics."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.network.errors import UntraceableError
from pathspace.network.trace.functions import CLAMPS, ENDINGS
from pathspace.ops.activations import is_homogeneous
from pathspace.ops.affine import PRODUCTS
from pathspace.ops.family import Family
from pathspace.ops.listing import Listing
from pathspace.ops.terms import NOT_WRITTEN

_ENDINGS = ENDINGS | CLAMPS | {"_softmax", "_log_softmax"}
_OF_FACTORS = PRODUCTS | {"mul", "div"}


class Ending(Family):
    """Functions after the last parameter that are no sums of paths: their inputs are the outputs of the network."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is no sum of paths, or reads the result of one that is none."""
        if any(id(t) in listing.tails for t in step.tensors):
            return True
        if not listing.has_unit(step.tensors):
            return False
        if step.name in _OF_FACTORS:
            return self._multiplies_units(step, listing)
        return step.name in _ENDINGS and not is_homogeneous(step)

    def _multiplies_units(self, step: Step, listing: Listing) -> bool:
        """Return whether a product is one of two activations, or a quotient is by an activation."""
        factors = step.tensors[-2:] if step.name in PRODUCTS else step.tensors
        if step.name == "div" and listing.is_unit(factors[-1]) and step.args[0] is not factors[-1]:
            return True
        return sum(listing.is_unit(t) for t in factors) > 1

    def listed(self, step: Step, listing: Listing) -> None:
        """Remember what entered."""
        if listing.has_weight(step.tensors):
            why = "a parameter meets what is no sum of paths, such as a weight made by relu or abs"
            raise UntraceableError(step.name, "", why, NOT_WRITTEN)
        entered = [node for t in step.tensors for node in listing.before_the_end(t)]
        for t in pytree.tree_leaves(step.result):
            if isinstance(t, Tensor):
                listing.tails[id(t)] = entered


class Statistics(Family):
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
