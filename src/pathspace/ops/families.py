"""The families of operations of a captured pass, which :func:`listed` asks one after the other."""

from __future__ import annotations

from pathspace.graph.capture import Step
from pathspace.ops.accumulation import AddAt, ReduceAt
from pathspace.ops.activations import Activations
from pathspace.ops.affine import Affine
from pathspace.ops.choices import ByData, Choice
from pathspace.ops.embedding import Embedding
from pathspace.ops.endings import Ending, Statistics
from pathspace.ops.family import Family
from pathspace.ops.inputs import Known, OfInputs
from pathspace.ops.listing import Listing
from pathspace.ops.maxima import LargerOfTwo, Largest, Order
from pathspace.ops.selection import Gather, Index, Rows
from pathspace.ops.weights import OfWeights

FAMILIES: tuple[Family, ...] = (
    Ending(),
    OfInputs(),
    Known(),
    Statistics(),
    Embedding(),
    Activations(),
    Order(),
    LargerOfTwo(),
    Largest(),
    Choice(),
    ByData(),
    Gather(),
    Rows(),
    Index(),
    AddAt(),
    ReduceAt(),
    OfWeights(),
    Affine(),
)
"""The first family that takes a step reads it; the last one takes all."""


def listed(step: Step, listing: Listing) -> None:
    """Write down the edges of one step."""
    for family in FAMILIES:
        if family.takes(step, listing):
            family.listed(step, listing)
            return
