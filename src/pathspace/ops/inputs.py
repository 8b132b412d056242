"""Functions of the example alone: their results are inputs."""

from __future__ import annotations

from pathspace.graph.capture import Step
from pathspace.network.rules.scale_free import COMPARISONS, SIGNS
from pathspace.ops.affine import JOINS, write_affine
from pathspace.ops.family import Family
from pathspace.ops.listing import Listing

_MOVEMENTS = JOINS | {
    "view",
    "_unsafe_view",
    "reshape",
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "expand",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "unbind",
    "flip",
    "roll",
    "repeat",
    "index",
    "index_select",
    "clone",
    "detach",
    "alias",
    "unfold",
    "diagonal",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "rot90",
    "im2col",
    *(f"{kind}{n}d" for kind in ("reflection_pad", "replication_pad") for n in (1, 2, 3)),
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    "_to_copy",
    "as_strided",
    "repeat_interleave",
    "lift_fresh",
}
_RANDOM = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential")
"""Beginnings of the names of operations that draw random numbers."""
_ORDERS = frozenset(["argsort", "argmax"])
_KNOWN = COMPARISONS | SIGNS | _ORDERS


class OfInputs(Family):
    """A function of inputs and constants alone, and new tensors: an input, a constant, or an input that was moved."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether no activation and no weight has a part in the result."""
        if _is_random(step.name):
            return False
        if _is_factory(step.name):
            return True
        return not (listing.has_unit(step.tensors) or listing.has_weight(step.tensors))

    def listed(self, step: Step, listing: Listing) -> None:
        """Bind the result; a rearranged input that has nodes keeps them."""
        if not listing.has_data(step.tensors):
            return
        if self._moves_inputs(step, listing):
            write_affine(step, listing)
            listing.bind_data(step.result)
            return
        # a gate times the zeros that a recurrence begins with is no input
        is_start = step.name == "mul" and any(listing.is_zero(t) for t in step.tensors)
        if not is_start and not _is_factory(step.name):
            listing.bind_data(step.result)

    def _moves_inputs(self, step: Step, listing: Listing) -> bool:
        """Return whether the step moves inputs that have nodes, or joins some."""
        if step.name not in _MOVEMENTS:
            return False
        inputs = [t for t in step.tensors if listing.is_data(t)]
        if not all(t.is_floating_point() for t in inputs):
            return False
        return step.name in JOINS or any(listing.was_read(t) for t in inputs)


class Known(Family):
    """Functions of the example that count as inputs: comparisons, signs, orders and random numbers."""

    def takes(self, step: Step, listing: Listing) -> bool:
        """Return whether the step is one of these."""
        del listing
        return step.name in _KNOWN or _is_random(step.name)

    def listed(self, step: Step, listing: Listing) -> None:
        """Bind the result as an input."""
        listing.bind_data(step.result)


def _is_factory(name: str) -> bool:
    """Return whether an operation reads only the shape and type of a tensor."""
    return name.startswith("new_") or (name.endswith("_like") and not _is_random(name))


def _is_random(name: str) -> bool:
    return name.startswith(_RANDOM)
