"""The graph of a network: which units feed which.

Alphabet of this module: N units numbered 1..N, unit 0 always on and feeding every unit, E edges
(the edges from unit 0 included), d outgoing edges drawn per unit. Edges are sorted by target, then
by source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Graph:
    """Edges of a network of ``units`` units, sorted by target and then by source.

    Args:
        units: N, without the always-on unit 0.
        sources: (E,) source of each edge, 0..N.
        targets: (E,) target of each edge, 1..N.

    Example:
        >>> ring = Graph.from_edges(2, [(1, 2), (2, 1)])
        >>> ring.sources.tolist(), ring.targets.tolist()
        ([0, 2, 0, 1], [1, 1, 2, 2])
    """

    units: int
    sources: IntArray
    targets: IntArray

    @classmethod
    def from_edges(cls, units: int, edges: Iterable[tuple[int, int]]) -> Graph:
        """Return the graph with these edges between units 1..N; the edges from unit 0 are added.

        Raises:
            ValueError: if a unit is outside 1..N, or ``units`` is not positive.
        """
        _check_units(units)
        chosen = np.array([(int(i), int(j)) for i, j in edges], dtype=np.int64).reshape(-1, 2)
        outside = ((chosen < 1) | (chosen > units)).any(axis=1)
        if outside.any():
            i, j = chosen[np.argmax(outside)].tolist()
            raise ValueError(f"edge ({i}, {j}) leaves the units 1..{units}")
        return cls._of(units, chosen[:, 0], chosen[:, 1])

    @classmethod
    def _of(cls, units: int, sources: IntArray, targets: IntArray) -> Graph:
        """Return the graph with edges between units 1..N, in any order, and those from unit 0."""
        # one number for each edge, by whose order edges are sorted by target, then by source
        width = units + 1
        keys = np.concatenate([targets * width + sources, np.arange(1, width) * width])
        keys.sort()
        keys = keys[np.diff(keys, prepend=-1) > 0]
        return cls(units, keys % width, keys // width)

    @classmethod
    def full(cls, units: int) -> Graph:
        """Return the graph with all N^2 edges."""
        _check_units(units)
        sources = np.tile(np.arange(units + 1), units)
        return cls(units, sources, np.repeat(np.arange(1, units + 1), units + 1))

    @classmethod
    def random(cls, units: int, degree: int, rng: np.random.Generator) -> Graph:
        """Return a graph where each unit feeds itself and ``degree - 1`` other units drawn at random.

        Raises:
            ValueError: if ``degree`` is not in 1..N.
        """
        _check_units(units)
        if not 1 <= degree <= units:
            raise ValueError(
                f"each of {units} units can feed 1 to {units} units, got connectivity {degree}"
            )
        numbers = np.arange(1, units + 1)
        targets = np.empty((units, degree), dtype=np.int64)
        targets[:, 0] = numbers
        for i in range(1, units + 1):
            # numbers 0..N-2 stand for the other units in order
            others = rng.choice(units - 1, degree - 1, replace=False) + 1
            targets[i - 1, 1:] = others + (others >= i)
        return cls._of(units, np.repeat(numbers, degree), targets.reshape(-1))

    @property
    def edges(self) -> int:
        """Number of edges E, those from unit 0 included."""
        return len(self.sources)

    @cached_property
    def first(self) -> IntArray:
        """(N+2,) the edges into unit j are first[j] .. first[j+1]-1; first[0] = first[1] = 0."""
        return np.searchsorted(self.targets, np.arange(self.units + 2)).astype(np.int64)

    @cached_property
    def triangle(self) -> IntArray:
        """(N+2,) offsets of the packed lower triangles, one square matrix per unit over the edges into it."""
        size = np.diff(self.first)
        return np.concatenate([[0], np.cumsum(size * (size + 1) // 2)]).astype(np.int64)

    @cached_property
    def loops(self) -> IntArray:
        """(N+1,) the edge from each unit to itself, or -1."""
        found = np.full(self.units + 1, -1, dtype=np.int64)
        loop = np.flatnonzero(self.sources == self.targets)
        found[self.sources[loop]] = loop
        return found

    @cached_property
    def by_source(self) -> IntArray:
        """(E - N,) the edges that do not come from unit 0, sorted by source."""
        order = np.argsort(self.sources, kind="stable")
        return order[self.units :].astype(np.int64)

    @cached_property
    def first_out(self) -> IntArray:
        """(N+2,) the entries of ``by_source`` that leave unit i are first_out[i] .. first_out[i+1]-1."""
        return np.searchsorted(self.sources[self.by_source], np.arange(self.units + 2)).astype(
            np.int64
        )

    @cached_property
    def is_dense(self) -> bool:
        """True if there are so many edges that whole matrices are faster than lists of edges."""
        return 3 * (self.edges - self.units) >= self.units**2


def _check_units(units: int) -> None:
    """Raise ValueError if there is no unit."""
    if units < 1:
        raise ValueError(f"a network needs at least one unit, got units={units}")
