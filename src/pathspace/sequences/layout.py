"""The weights of a model in the layouts the compiled passes read, and memory they can use again.

Alphabet of this module: A symbols, N units, D largest number of edges that leave a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.text import IntArray

Array = NDArray[np.float64]


class Buffers:
    """Arrays by name, made once and handed out again: a fresh large array costs as much as a pass over it.

    Whoever asks for a name again overwrites what was there.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, *shape: int) -> Array:
        """Return the array of this name with arbitrary contents, new if the shape has changed."""
        found = self._arrays.get(name)
        if found is None or found.shape != shape:
            found = self._arrays[name] = np.empty(shape)
        return found


@dataclass(frozen=True, eq=False)
class Slots:
    """Edges of a sparse graph, D slots for each unit they leave.

    Args:
        bias: (A, N+1) weights from unit 0.
        weight: (A, D, N+1) weights, zero in empty slots.
        target: (D, N+1) targets, zero in empty slots.
    """

    bias: Array
    weight: Array
    target: IntArray


def slots(model: Parameters, tau: Array) -> Slots:
    """Return the contextual weights (A, E) of a sparse graph by slots."""
    graph = model.graph
    N = model.units
    A = len(tau)
    bias = np.zeros((A, N + 1))
    bias[:, 1:] = tau[:, graph.first[1:-1]]
    edge, unit, slot = _places(graph)
    weight = np.zeros((A, int(slot.max(initial=-1)) + 1, N + 1))
    target = np.zeros(weight.shape[1:], dtype=np.int64)
    weight[:, slot, unit] = tau[:, edge]
    target[slot, unit] = graph.targets[edge]
    return Slots(bias, weight, target)


def _places(graph: Graph) -> tuple[IntArray, IntArray, IntArray]:
    """Return each edge between units 1..N, the unit it leaves, and its slot there."""
    edge = graph.by_source
    unit = graph.sources[edge]
    return edge, unit, np.arange(len(edge)) - graph.first_out[unit]


def matrix(model: Parameters, tau: Array, backward: bool) -> Array:
    """Return the contextual weights (A, E) of a dense graph as matrices, columns padded to a multiple of 8.

    Row i, column j-1 for the way forward; row j-1, column i-1, without unit 0, for the way back.
    """
    graph = model.graph
    N = model.units
    result = np.zeros((len(tau), N if backward else N + 1, -(-N // 8) * 8))
    if backward:
        edge = graph.by_source
        result[:, graph.targets[edge] - 1, graph.sources[edge] - 1] = tau[:, edge]
    else:
        result[:, graph.sources, graph.targets - 1] = tau
    return result


def loops(model: Parameters, tau: Array) -> Array:
    """Return (A, N+1) the weight of the edge from each unit to itself, zero where there is none."""
    weight = np.zeros((len(tau), model.units + 1))
    has_loop = model.graph.loops >= 0
    weight[:, has_loop] = tau[:, model.graph.loops[has_loop]]
    return weight
