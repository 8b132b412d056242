"""Vectors that are overwritten at every step, with what is read from them looked up once.

Fetching an entry anew at every step costs more than the arithmetic where a network is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """Places in a vector; where they are consecutive, entries are read and written without copying.

    Attributes:
        places: int64 ``[n]``.
        first: the first, where they count up by one; -1 otherwise.
        count: n.
    """

    places: Tensor
    first: int
    count: int

    @staticmethod
    def of(places: Tensor, device: torch.device) -> Index:
        """Return the index of places, given on the CPU."""
        count = len(places)
        first = int(places[0]) if count else 0
        run = torch.equal(places, torch.arange(first, first + count))
        return Index(places.to(device), first if run else -1, count)

    def view(self, values: Tensor) -> Tensor | None:
        """Return the entries, to be read and written; None where they are not consecutive."""
        return None if self.first < 0 else values.narrow(0, self.first, self.count)

    def take(self, values: Tensor) -> Tensor:
        """Return the entries; a view where possible."""
        view = self.view(values)
        return values.index_select(0, self.places) if view is None else view

    def put_(self, values: Tensor, entries: Tensor) -> None:
        """Overwrite the entries."""
        view = self.view(values)
        if view is None:
            values.index_copy_(0, self.places, entries)
        else:
            view.copy_(entries)


class Slots:
    """A vector, and entries of it that are asked for once and stay right.

    Args:
        values: the vector; it is overwritten in place.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._copies: list[tuple[Tensor, Tensor]] = []

    def at(self, index: Index) -> Tensor:
        """Entries of the vector as it is now and will be: a view, or a copy that :meth:`refresh` renews."""
        view = index.view(self.values)
        if view is not None:
            return view
        copy = self.values.index_select(0, index.places)
        self._copies.append((index.places, copy))
        return copy

    def refresh(self) -> None:
        """To be called when the vector was overwritten."""
        for places, copy in self._copies:
            torch.index_select(self.values, 0, places, out=copy)


def put_(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Overwrite elements by their flat indices."""
    # then put_ refuses, though no place gets two values
    if torch.are_deterministic_algorithms_enabled():
        flat = tensor.reshape(-1).index_copy(0, places, values)
        tensor.copy_(flat.view(tensor.shape))
    else:
        tensor.put_(places, values)
