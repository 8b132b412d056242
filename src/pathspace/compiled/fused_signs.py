"""Random signs of rows of seeds for compiled loops, as ``paths.signs`` draws them."""

from __future__ import annotations

import math

import numpy as np
import torch

from pathspace.compiled import chain_loops as loops
from pathspace.paths.data.data_dependent import Request
from pathspace.paths.data.signs import count_of_pairs, random_bytes, size_of_part, weight_of_pairs


class Signs:
    """Draws what ``chain_shares.seeds_of_rows`` draws, in its order; keeps memory from one time to the next."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()

    def lay_out(self, count: int, request: Request, psi: np.ndarray) -> int:
        """How many rows of seeds there will be; those of a pair are next to each other.

        Args:
            count: the number of examples.
            request: what is wanted.
            psi: of all units that have seeds.
        """
        known = count, request.statistic, request.part, len(psi), psi.dtype
        if known != self._known:
            self._known, self._count = known, count
            self.pairs = request.statistic == "covariance"
            # rows of signs, and of seeds: two for every pair, or those of some examples
            rows = count_of_pairs(count, request.part) if self.pairs else count
            self._taken = 2 * rows if self.pairs else size_of_part(count, request.part)
            self._weight = weight_of_pairs(rows, count) if self.pairs else 1 / self._taken
            self._wide = max(1, math.isqrt(max(0, rows - 1)) + 1)
            tall = -(-rows // self._wide)
            self._all = np.arange(count)
            self._chosen = np.empty(self._taken, np.int64)
            self._signs = np.empty((tall + self._wide, len(psi)), psi.dtype)
        return self._taken

    def seed(self, table: np.ndarray, psi: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Write the seeds where a table of layers says; returns the numbers of their examples."""
        order = self._all
        if self.pairs:
            order = torch.randperm(self._count, generator=generator).numpy()
        drawn = random_bytes(self._signs.size, generator).numpy()
        if not self.pairs and self._taken < self._count:
            order = torch.randperm(self._count, generator=generator).numpy()
        chosen, signs = self._chosen, self._signs
        loops.seed(table, psi, self._weight, drawn, self._wide, order, self.pairs, chosen, signs)
        return chosen
