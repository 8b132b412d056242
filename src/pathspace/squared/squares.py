"""Squared parameters and gradients with respect to them, in no larger a form than they have.

A gradient of the squared network in the matrix of a linear map is an outer product whenever the map is used once:
what enters times what leaves. And the map itself often needs no more of a squared matrix than its row sums. Keeping
both in that form saves most of the passes over memory that kappa would cost.

Letters: p parameter ``[n, m]``, q = p^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.squared.repeated import Repeated


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


class Square:
    """The square of a parameter, computed when somebody asks for it.

    Args:
        p: the parameter.
        kept: memory to square parameters in, by name, kept by the caller from one computation to the next.
        name: the parameter's.
        dtype: the type of the square; the parameter's if None.
        read_once: whether one instruction alone reads it, whose pullback may then put the gradient in its place.
    """

    __slots__ = ("_dense", "_kept", "_name", "_p", "_read_once", "dtype")

    def __init__(
        self,
        p: Tensor,
        kept: dict[str, Tensor] | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
        *,
        read_once: bool = False,
    ) -> None:
        self._p, self._kept, self._name, self._read_once = p, kept, name, read_once
        self._dense: Tensor | None = None
        self.dtype = p.dtype if dtype is None else dtype

    def like(self) -> Tensor:
        """A tensor of the type and on the device of the square, without data."""
        return self._p.new_empty(0, dtype=self.dtype)

    def dense(self) -> Tensor:
        """All of it; kept, unless it is of another type than the parameter and so larger."""
        if self.dtype != self._p.dtype:
            return self._p.detach().to(self.dtype).square_()
        if self._dense is None:
            if self._kept is None or self._p.dim() < 2:
                self._dense = self._p.square()
            else:
                self._dense = torch.square(self._p, out=memory_for(self._p, self._kept, self._name))
        return self._dense

    def reusable_buffer(self) -> Tensor | None:
        """Memory of the square that may be overwritten now, because nobody reads the square any more; in order."""
        free = self._read_once and self._kept is not None and self._p.dim() >= 2
        return self._dense if free and self._dense is not None and self._dense.is_contiguous() else None

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return self._p.shape

    def row_sums(self) -> Tensor:
        """The sums over the rows of a matrix, in one pass over the parameter."""
        norms = torch.linalg.vector_norm(self._p, dim=1, dtype=self.dtype)
        return norms.mul_(norms)

    def column_sums(self) -> Tensor:
        """The sums over the columns of a matrix."""
        q = self.dense()
        return torch.mv(q.t(), q.new_ones(q.shape[0]))


def memory_for(like: Tensor, kept: dict[str, Tensor], name: str) -> Tensor:
    """Memory of a tensor's shape and type that stays the same from call to call.

    Freeing it after every training step makes the allocator hand it back to the system and fetch it anew, which can
    cost more than the arithmetic.
    """
    memory = kept.get(name)
    if memory is None or (memory.shape, memory.dtype, memory.device) != (like.shape, like.dtype, like.device):
        memory = kept[name] = torch.empty_like(like)
    return memory


def dense(value: Tensor | Square | Outer | Repeated) -> Tensor:
    """The tensor that stands behind a value."""
    return value if isinstance(value, Tensor) else value.dense()


def single_value(t: Tensor) -> Tensor | None:
    """The one value of a tensor that is expanded from a single number; None for any other."""
    repeats = all(stride == 0 or size == 1 for size, stride in zip(t.shape, t.stride(), strict=True))
    return t[(0,) * t.dim()] if repeats and t.numel() else None


def single_row(t: Tensor) -> Tensor | None:
    """The one row (last dimension) of a tensor that has no more, or repeats it; None for any other."""
    if t.dim() == 1:
        return t
    lead = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    repeats = all(stride == 0 or size == 1 for size, stride in lead)
    return t[(0,) * (t.dim() - 1)] if repeats and t.numel() else None
