"""Powers of kappa' of one parameter: of outer products, of blocks of rows, and where no path has any mass.

    D'^exponent = (kappa' / c + damping mean / c)^exponent

Metrics raise whole tensors together (see ``metric``). Here are the parameters that need more.

Letters: c normalizer, F gauge (see ``gauge``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pathspace.metrics.gauge import Gauge
from pathspace.squared.sharding import is_sharded, local_shard, totals
from pathspace.squared.squares import Outer, dense


class Shift(NamedTuple):
    """Normalizer and damping of kappa': kappa' / normalizer + added.

    Attributes:
        normalizer: c.
        added: damping over c; a number or a tensor of one, like c.
        is_empty: whether no path has any mass.
    """

    normalizer: float | Tensor
    added: float | Tensor
    is_empty: bool


@dataclass(eq=False, slots=True)
class Power:
    """A power that kappa' of one parameter is raised to.

    Attributes:
        exponent: of D'.
        is_damped: whether the metric has damping.
        gauge: of the parameter.
    """

    exponent: float
    is_damped: bool
    gauge: Gauge

    def of(self, kappa: Tensor | Outer, shift: Shift) -> Tensor:
        """D'^exponent, in the memory of a tensor; 1 where no path has any mass."""
        if self.is_damped and shift.is_empty:
            shape = kappa.shape
            return torch.ones(shape, dtype=self.gauge.rows.dtype, device=self.gauge.rows.device)
        if isinstance(kappa, Tensor):
            return kappa.div_(shift.normalizer).add_(shift.added).pow_(self.exponent)
        rows = kappa.rows / shift.normalizer
        if not self.is_damped:
            return torch.outer(rows.pow(self.exponent), kappa.columns.pow(self.exponent))
        return torch.outer(rows, kappa.columns).add_(shift.added).pow_(self.exponent)

    def of_blocks(
        self,
        kappa: Tensor | Outer,
        sizes: Sequence[int],
        shifts: Sequence[Shift],
        parameter: Tensor,
    ) -> Tensor:
        """D'^exponent of a packed parameter, each of its blocks with a normalizer of its own.

        Args:
            kappa: of the rows in this process.
            sizes: rows of each block.
            shifts: one for each block.
            parameter: the parameter.
        """
        first, last = _own_rows(parameter, sum(sizes))
        pieces = []
        start = 0
        for size, shift in zip(sizes, shifts, strict=True):
            own = slice(max(start, first) - first, max(min(start + size, last) - first, 0))
            start += size
            if own.start < own.stop:
                pieces.append(self.of(kappa[own], shift))
        return torch.cat(pieces) if pieces else dense(kappa)

    def factor_of_outer(self, kappa: Outer, shift: Shift, k: int) -> Tensor:
        """F^k D'^exponent, where k is 0 or -2 times the exponent.

        Hence it is (F^q D')^exponent, where q = k / exponent. The matrix F^q D' is a sum of two
        outer products, which one call writes.
        """
        q = round(k / self.exponent)
        of_rows, of_columns = self.gauge.vectors(q, kappa.dtype)
        rows = [
            kappa.rows * (of_rows / shift.normalizer),
            (of_rows * shift.added).expand_as(kappa.rows),
        ]
        columns = [kappa.columns * of_columns, of_columns.expand_as(kappa.columns)]
        return (torch.stack(rows, 1) @ torch.stack(columns)).pow_(self.exponent)


def means_of_blocks(kappa: Tensor | Outer, sizes: Sequence[int], parameter: Tensor) -> list[float]:
    """Return the mean of kappa' of each block of rows of a packed parameter."""
    if isinstance(kappa, Outer):
        rows = kappa.rows.double() * kappa.columns.double().mean()
    else:
        rows = kappa.reshape(kappa.shape[0], -1).double().mean(1)
    block_of_row = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    local_blocks = local_shard(block_of_row.to(rows.device), parameter)
    sums = rows.new_zeros(len(sizes)).index_add_(0, local_blocks, rows)
    # every process has the sums of its own rows
    sums = totals(sums, [parameter] * len(sizes))
    return (sums / sums.new_tensor(sizes)).tolist()


def _own_rows(parameter: Tensor, count: int) -> tuple[int, int]:
    """Return the range of a parameter's rows in this process: the first row and the end, exclusive."""
    if not is_sharded(parameter):
        return 0, count
    rows = local_shard(torch.arange(count), parameter)
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
