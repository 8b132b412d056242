"""Outer products kept as their factors.

A gradient of the squared network in the matrix of a linear map is an outer product whenever the map
is used once: what enters times what leaves.
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
        """Return the matrix, in memory of its own."""
        return torch.outer(self.rows, self.columns)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        return torch.Size([len(self.rows), len(self.columns)])

    def __getitem__(self, rows: slice) -> Outer:
        """Return some rows."""
        return Outer(self.rows[rows], self.columns)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.rows.dtype


def dense(value: Tensor | Outer) -> Tensor:
    """Return the tensor that stands behind a value."""
    return value if isinstance(value, Tensor) else value.dense()
