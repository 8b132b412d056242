"""Outer products kept as their factors, and memory that is kept from call to call.

A gradient of the squared network in the matrix of a linear map is an outer product whenever the map is used once:
what enters times what leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """The matrix ``rows[:, None] * columns[None, :]``; a factor with one value has stride zero."""

    rows: Tensor  # [n]
    columns: Tensor  # [m]

    def dense(self) -> Tensor:
        """The matrix, in memory of its own."""
        return torch.outer(self.rows, self.columns)

    @property
    def shape(self) -> torch.Size:
        """Its two sides."""
        return torch.Size((self.rows.shape[0], self.columns.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.rows.dtype

    def to(self, dtype: torch.dtype) -> Outer:
        """The same in another type."""
        return Outer(self.rows.to(dtype), self.columns.to(dtype))


def memory_for(like: Tensor, kept: dict[str, Tensor], name: str) -> Tensor:
    """Memory of a tensor's shape and type that stays the same from call to call.

    Freeing it after every training step makes the allocator hand it back to the system and fetch it anew, which can
    cost more than the arithmetic.
    """
    memory = kept.get(name)
    if memory is None or (memory.shape, memory.dtype, memory.device) != (like.shape, like.dtype, like.device):
        memory = kept[name] = torch.empty_like(like)
    return memory


def dense(value: Tensor | Outer) -> Tensor:
    """The tensor that stands behind a value."""
    return value if isinstance(value, Tensor) else value.dense()
