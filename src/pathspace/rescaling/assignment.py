"""The assignment problem: which row goes with which column, so that the sum of what they have is the largest."""

from __future__ import annotations

import torch
from torch import Tensor


def best_assignment(values: Tensor) -> Tensor:
    """Return the column of every row, ``[n]``, such that the sum of ``values[row, column]`` is the largest possible.

    The Hungarian method with potentials (Kuhn 1955; shortest augmenting paths): exact, n^3
    operations at most, in n^2 calls of torch at most.

    Args:
        values: finite, ``[n, n]``.
    """
    cost = -values.detach().to("cpu", torch.float64)
    n = len(cost)
    of_row = torch.zeros(n, dtype=torch.float64)
    of_column = torch.zeros(n + 1, dtype=torch.float64)
    # column -> its row; the last column is the one from which a search begins
    row_of = [-1] * (n + 1)
    for row in range(n):
        row_of[n] = row
        _augment(cost, of_row, of_column, row_of)
    result = torch.empty(n, dtype=torch.long)
    for column in range(n):
        result[row_of[column]] = column
    return result


def _augment(cost: Tensor, of_row: Tensor, of_column: Tensor, row_of: list[int]) -> None:
    """Find a column for the row at the end of ``row_of``, by the shortest path through columns that have a row."""
    n = len(cost)
    least = torch.full((n,), torch.inf, dtype=torch.float64)
    before = torch.full((n,), n, dtype=torch.long)
    used: list[int] = []
    free = torch.ones(n, dtype=torch.bool)
    column = n
    while row_of[column] != -1:
        used.append(column)
        if column < n:
            free[column] = False
        row = row_of[column]
        reduced = cost[row] - of_row[row] - of_column[:n]
        better = free & (reduced < least)
        least = torch.where(better, reduced, least)
        before[better] = column
        open_columns = torch.where(free, least, torch.inf)
        nearest = int(open_columns.argmin())
        step = least[nearest].clone()
        of_column[used] -= step
        of_row[[row_of[c] for c in used]] += step
        least = torch.where(free, least - step, least)
        column = nearest
    while column != n:
        source = int(before[column])
        row_of[column] = row_of[source]
        column = source
