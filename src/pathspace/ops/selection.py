"""Elements that data pick: edges from all that may be picked, of which the picked one is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pathspace.graph.capture import Step
from pathspace.ops.family import GatedFamily, Gates, gates_of_linear
from pathspace.ops.listing import Listing


class Gather(GatedFamily):
    """``gather`` at indices that are data."""

    names = frozenset(["gather"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether the indices are data."""
        return len(step.args) > 2 and listing.is_data(step.args[2])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from all elements along the dimension."""
        del listing
        x, dim, index = step.args[:3]
        dim %= x.dim()
        part = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))

        def any_of(unit: Tensor) -> Tensor:
            summed = unit.reshape(x.shape).sum(dim, keepdim=True)
            return summed[part].expand(index.shape)

        def picked(unit: Tensor) -> Tensor:
            return unit.reshape(x.shape).gather(dim, index)

        return (x,), gates_of_linear(any_of, picked, x.numel())


class Rows(GatedFamily):
    """``index_select`` at indices that are data."""

    names = frozenset(["index_select"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether the indices are data."""
        return len(step.args) > 2 and listing.is_data(step.args[2])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from all elements along the dimension."""
        del listing
        x, dim, index = step.args
        return (x,), _rows(x, dim, lambda h: h.index_select(dim, index))


class Index(GatedFamily):
    """``x[:, places]`` and ``x[rows, places]`` with places that are data."""

    names = frozenset(["index"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether some places are data."""
        return any(listing.is_data(item) for item in step.args[1])

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return edges from all elements along the dimension of the places."""
        x: Tensor = step.args[0]
        items: Sequence[Tensor | None] = step.args[1]
        index = tuple(slice(None) if item is None else item for item in items)
        dim = next(d for d, item in enumerate(items) if listing.is_data(item))
        several = sum(item is not None for item in items) > 1
        if not several:
            return (x,), _rows(x, dim, lambda h: h[index])
        shape = x[index].shape

        def any_of(unit: Tensor) -> Tensor:
            return unit.reshape(x.shape).sum(dim).expand(shape)

        def picked(unit: Tensor) -> Tensor:
            return unit.reshape(x.shape)[index]

        return (x,), gates_of_linear(any_of, picked, x.numel())


def _rows(x: Tensor, dim: int, pick: Callable[[Tensor], Tensor]) -> Gates:
    """Return edges to each picked element from all elements along ``dim`` with the same other indices.

    Args:
        x: the tensor.
        dim: the dimension along which data pick elements.
        pick: what picks them; it keeps the order of the other dimensions.
    """
    dim %= x.dim()
    others = max(1, x.numel() // x.shape[dim])
    count = pick(x).numel() // others
    after = x.shape[dim + 1 :].numel()

    def any_of(unit: Tensor) -> Tensor:
        summed = unit.reshape(x.shape).sum(dim)
        return summed.reshape(-1, 1, after).expand(-1, count, -1)

    def picked(unit: Tensor) -> Tensor:
        return pick(unit.reshape(x.shape))

    return gates_of_linear(any_of, picked, x.numel())
