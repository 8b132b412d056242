"""The examples of a batch, while a model is traced with two of them.

The network is that of one example. A second pass, with two examples, shows whether the model treats
them independently. Each tensor has the examples along one dimension, in a *pattern*: one element
each, ``[0, 1]``, or, after a reshape merged the batch with T steps, ``[0, 0, 0, 1, 1, 1]`` or ``[0,
1, 0, 1, 0, 1]``. If a movement spreads the examples over several dimensions, or puts them along one
that does not grow with the batch, it has mixed elements of different examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathspace.network.trace.scales import without_repeats
from pathspace.network.trace.values import Value

Moved = tuple[str, str, torch.Size]
"""A movement: its name, the path of its module, and the shape it made."""


class Examples:
    """The examples of one pass.

    Args:
        count: how many there are; with one there is nothing to follow.
        earlier: the movements of the pass with one example.
        guessing: whether that pass takes, after a reshape, a dimension of one for the batch where
            it may be another.

    Attributes:
        moved: the movements of this pass.
        doubtful: whether it is not known where some tensor has the batch, so that a second pass is
            needed.
        merged: whether some tensor has the batch and something else in one dimension.
    """

    def __init__(
        self, count: int = 1, earlier: Sequence[Moved] = (), *, guessing: bool = True
    ) -> None:
        self.guessing = guessing
        self.count = count
        self.doubtful = False
        self.merged = False
        self.moved: list[Moved] = []
        self._earlier = earlier

    def single(self) -> torch.Size | None:
        """Return the shape that the latest movement made of one example; None if that pass did something else."""
        place = len(self.moved) - 1
        if place >= len(self._earlier) or self._earlier[place][:2] != self.moved[place][:2]:
            return None
        return self._earlier[place][2]

    def each(self) -> Tensor:
        """Return the pattern with one element for each example."""
        return torch.arange(self.count)

    def pattern(self, pattern: Tensor) -> Tensor | None:
        """Return a pattern as values store it: None for one element each."""
        if torch.equal(pattern, self.each()):
            return None
        self.merged = True
        return pattern

    def places(self, value: Value) -> Tensor | None:
        """Return the example of every element of a tensor, ``[*shape]``; None if it is unknown."""
        if value.batch is None:
            return None
        pattern = self.each() if value.examples is None else value.examples
        if len(pattern) != value.shape[value.batch]:
            return None
        wide = [1] * len(value.shape)
        wide[value.batch] = len(pattern)
        return pattern.reshape(wide).expand(value.shape)

    def written(
        self, base: Value, elements: Tensor, source: Value
    ) -> tuple[int | None, Tensor | None]:
        """Return the batch dimension of a tensor after a write, and the pattern of the examples in it.

        Args:
            base: the tensor, if it holds the same for all examples so far.
            elements: the indices of what is written, in the flattened tensor.
            source: what is written, which those indices fit.
        """
        if base.batch is not None or source.batch is None or base.kind != "input":
            return base.batch, base.examples
        self.doubtful = True
        at_source = self.places(source) if self.count > 1 else None
        if at_source is None:
            return None, None
        flat = torch.full((base.labels.numel(),), -1)
        flat[elements] = at_source
        places = flat.reshape(base.shape)
        for d in range(places.dim()):  # what was not written belongs to all
            rows = places.movedim(d, 0).reshape(places.shape[d], -1)
            highest = rows.amax(1)
            lowest = rows.masked_fill(rows < 0, self.count).amin(1)
            if torch.equal(highest, lowest) and (result := along(highest)) is not None:
                return d, self.pattern(result[1])
        return None, None


def along(places: Tensor) -> tuple[int, Tensor] | None:
    """Return the dimension along which examples lie, and their pattern; None if they are mixed.

    Args:
        places: the example of every element.
    """
    small = without_repeats(places)
    varied = [
        d
        for d, size in enumerate(small.shape)
        if size > 1 and bool((small != small.narrow(d, 0, 1)).any())
    ]
    if len(varied) != 1:
        return None
    pattern = small.movedim(varied[0], 0).reshape(small.shape[varied[0]], -1)[:, 0]
    often = pattern.bincount()
    # in another order, or more of one than of another
    if pattern[0] != 0 or bool((often != often[0]).any()):
        return None
    return varied[0], pattern
