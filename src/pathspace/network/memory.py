"""Memory that several tensors share: a tensor and its views, so that writing into one changes the others.

A write is only noted. What a tensor holds after it is found when somebody asks: nothing new for a view of other
elements, else what the owner of the memory holds now, seen through the same view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pathspace.network.values import Value

View = Callable[[Tensor], Tensor]
"""From a tensor of the owner's shape to what a view of it shows."""


def whole(t: Tensor) -> Tensor:
    """The view of all."""
    return t


class Memory:
    """The memory of one tensor, its owner, and of all views of it.

    Attributes:
        members: how many tensors show it.
        version: how many writes there were while several did.
        owner: the value of all of it, up to the writes that are pending.
        pending: (elements, their new value) for each write since.
        unsure: the last write through a view that may have been a copy.
    """

    __slots__ = ("_last_write", "members", "owner", "pending", "unsure", "version")

    def __init__(self) -> None:
        self.members, self.version, self.unsure = 1, 0, 0
        self.owner: Value | None = None
        self.pending: list[tuple[Tensor, Value]] = []
        self._last_write: Tensor | None = None  # of every element

    def share(self, value: Value) -> None:
        """One more tensor shows what ``value`` does."""
        if self.owner is None:  # up to now there was one tensor
            self.owner = value
        self.members += 1

    def elements(self, view: View) -> Tensor:
        """Which elements a view shows."""
        assert self.owner is not None
        return view(torch.arange(self.owner.labels.numel()).reshape(self.owner.shape))

    def write(self, elements: Tensor | None, value: Value) -> None:
        """Note that elements have a new value; None where it is not known which, or whether."""
        assert self.owner is not None
        self.version += 1
        if elements is None:
            self.unsure = self.version
            return
        if self._last_write is None:
            self._last_write = torch.zeros(self.owner.labels.numel(), dtype=torch.long)
        self._last_write[elements.reshape(-1)] = self.version
        self.pending.append((elements, value))

    def changed(self, view: View, version: int) -> bool:
        """Whether a view shows anything that was written after a version."""
        return self._last_write is not None and bool((self._last_write[self.elements(view)] > version).any())


def put(elements: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that replaces some elements of a tensor."""
    places = elements.reshape(-1)

    def replaced(old: Tensor, new: Tensor) -> Tensor:
        result = old.reshape(-1).clone()
        result[places.to(old.device)] = new.expand(elements.shape).reshape(-1)
        return result.reshape(old.shape)

    return replaced
