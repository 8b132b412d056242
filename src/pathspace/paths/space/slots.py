"""Vectors that are overwritten at every step, with what is read from them looked up once.

Fetching an entry anew at every step costs more than the arithmetic where a network is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """The index of places, given on the CPU."""
        count = len(places)
        first = int(places[0]) if count else 0
        run = torch.equal(places, torch.arange(first, first + count))
        return Index(places.to(device), first if run else -1, count)

    def view(self, values: Tensor) -> Tensor | None:
        """The entries, to be read and written; None where they are not consecutive."""
        return None if self.first < 0 else values.narrow(0, self.first, self.count)

    def take(self, values: Tensor) -> Tensor:
        """The entries; a view where possible."""
        view = self.view(values)
        return values.index_select(0, self.places) if view is None else view

    def put_(self, values: Tensor, entries: Tensor) -> None:
        """Overwrite the entries."""
        if self.first < 0:
            values.index_copy_(0, self.places, entries)
        else:
            values.narrow(0, self.first, self.count).copy_(entries)


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


def gatherer(
    elements: Sequence[tuple[str, Tensor, Index]], like: Mapping[str, Tensor], out: Tensor
) -> Callable[[Mapping[str, Tensor]], object]:
    """A function that writes elements of tensors to a vector.

    Args:
        elements: names of tensors, flat indices of elements, and their places in the vector, which are consecutive.
        like: tensors of the types that it will be called with.
        out: the vector.
    """
    dtypes = {like[name].dtype for name, _, _ in elements}
    if len(dtypes) != 1:  # with types of their own
        views = [(name, places, among.take(out)) for name, places, among in elements]
        return lambda tensors: [view.copy_(tensors[name].take(places)) for name, places, view in views]
    memory = out if out.dtype in dtypes else out.to(dtypes.pop())
    rows = [(name, places, among.take(memory)) for name, places, among in elements]

    def gather(tensors: Mapping[str, Tensor]) -> None:
        for name, places, row in rows:
            torch.take(tensors[name], places, out=row)
        if memory is not out:
            out.copy_(memory)

    return gather


def put_(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Overwrite elements by their flat indices."""
    if torch.are_deterministic_algorithms_enabled():  # then put_ refuses, though no place gets two values
        flat = tensor.reshape(-1).index_copy(0, places, values)
        tensor.copy_(flat.view(tensor.shape))
    else:
        tensor.put_(places, values)
