"""``paths.chain_shares`` with compiled loops between its products of matrices.

It finds the same from the same draws, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pathspace.fused import chain_loops as loops
from pathspace.network.chain import ChainPass
from pathspace.network.recurrent_chain import RecurrentPass
from pathspace.network.squares import memory_for
from pathspace.paths.chain_shares import ChainShares, Memory, chain_shares
from pathspace.paths.data_dependent import Request, Shares
from pathspace.paths.node_measure import Statistic, spread_of
from pathspace.paths.recurrent_shares import PLAIN, Ways, recurrent_shares
from pathspace.paths.signs import random_bytes, random_pairs, random_part, size_of_part


class FusedChain:
    """The estimates of one optimizer; it keeps memory and tables."""

    def __init__(self) -> None:
        self._sizes: tuple[tuple[int, ...], ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> FusedChain:
        return type(self)()

    def shares(
        self, seen: ChainPass, request: Request, generator: torch.Generator, memory: Memory
    ) -> ChainShares:
        """See :func:`pathspace.paths.chain_shares.chain_shares`."""
        own = (*seen.entering, *seen.spreads, *seen.leaves.values())
        dtype = own[0].dtype
        readable = all(t.is_contiguous() and t.dtype == dtype for t in own)
        if request.alpha == 1 or not readable:
            return chain_shares(seen, request, generator, memory)
        with torch.inference_mode(False), torch.no_grad():
            return self._shares(seen, request, generator, memory)

    def _lay_out(self, seen: ChainPass, like: Tensor) -> None:
        """Tables and memory for layers of some sizes."""
        layers = seen.layers[::-1]
        sizes = tuple(tuple(seen.leaves[layer.weight].shape) for layer in layers)
        if sizes != self._sizes or self._psi.dtype != like.dtype:
            self._sizes, units = sizes, [size[0] for size in sizes]
            self._psi = like.new_empty(sum(units))
            self._g = [like.new_empty(size[1]) for size in sizes[:-1]] + [like.new_ones(1)]
            self._layers = np.zeros((len(sizes), 11), np.int64)
            self._layers[:, loops.UNITS : loops.PLACE] = sizes
            self._layers[:, loops.PLACE] = np.cumsum([0, *units[:-1]])
            self._layers[:, loops.GAMMA] = [g.data_ptr() for g in self._g]
        t = self._layers
        t[:, loops.WEIGHT] = [seen.leaves[layer.weight].data_ptr() for layer in layers]
        t[:, loops.BIAS] = [0 if x.bias is None else seen.leaves[x.bias].data_ptr() for x in layers]
        t[:, loops.SPREAD] = [*(s.data_ptr() for s in seen.spreads[::-1]), 0]
        t[:, loops.ENTERING] = [x.data_ptr() for x in seen.entering[::-1]]

    def _shares(
        self, seen: ChainPass, request: Request, generator: torch.Generator, memory: Memory
    ) -> ChainShares:
        like = seen.entering[0]
        self._lay_out(seen, like)
        layers, table, psi = seen.layers[::-1], self._layers, self._psi
        units = [size[0] for size in self._sizes]
        loops.paths(table, request.alpha, psi.numpy())
        pairs, draws = request.statistic == "covariance", _drawn(len(psi), seen.count, request, generator)
        rows, chosen = draws.rows, draws.rows if draws.chosen is None else draws.chosen
        deltas = [like.new_empty(0)] * len(units)
        for i, (name, wide_as) in enumerate(zip([x.weight for x in layers], self._sizes, strict=True)):
            deltas[i] = _room(memory, f"{name}, delta", len(rows), wide_as[0], like)
            table[i, loops.DELTA] = deltas[i].data_ptr()
        draws.fill(table, psi, memory)
        for i in range(1, len(units)):
            back = _room(memory, f"back {i}", len(rows), units[i], like)
            torch.mm(deltas[i - 1], seen.leaves[layers[i - 1].weight], out=back)
            loops.gate(table, i, back.numpy(), chosen, seen.count, True)
        biases, left, right = like.new_empty(len(psi)), list(deltas), list[Tensor]()
        several = 3 * (len(rows) // 2) if pairs else len(rows)
        for i, layer in enumerate(layers):
            right.append(_room(memory, f"{layer.weight}, right", several, self._sizes[i][1], like))
            table[i, loops.RIGHT] = right[i].data_ptr()
            if pairs:
                left[i] = _room(memory, f"{layer.weight}, left", several, units[i], like)
                table[i, loops.LEFT] = left[i].data_ptr()
        (loops.square_pairs if pairs else loops.square)(table, chosen, seen.count, biases.numpy())
        data = [
            torch.mm(a.t(), b, out=memory_for(seen.leaves[layer.weight], memory, f"{layer.weight}, data"))
            for layer, a, b in zip(layers, left, right, strict=True)
        ]
        leaving = psi * (1 - request.alpha)
        entering = [*self._g[:-1], self._g[-1].expand(self._sizes[-1][1])]
        return ChainShares(layers, leaving, entering, data, biases, units)


@dataclass(frozen=True)
class _Draws:
    """Random signs a_t b_w of rows of seeds, and which rows are taken."""

    weight: float  # of the sums of squares
    bytes: np.ndarray
    tall: int
    wide: int
    rows: np.ndarray  # of signs, for every row of seeds
    chosen: (
        np.ndarray | None
    )  # examples of the rows of seeds; None: they have the numbers of the rows of signs

    def fill(self, table: np.ndarray, psi: Tensor, memory: Memory) -> None:
        """Write seeds where a table of layers says."""
        signs = _room(memory, "signs", self.tall + self.wide, len(psi), psi).numpy()
        loops.seed(table, psi.numpy(), self.weight, self.bytes, self.wide, self.tall, self.rows, signs)


def _drawn(units: int, count: int, request: Request, generator: torch.Generator) -> _Draws:
    """Draw what ``seeds_of_rows`` draws, in its order."""
    chosen, size, part = None, size_of_part(count, request.part), None
    rows, weight = count, 1 / size
    if request.statistic == "covariance":
        found = random_pairs(count, generator, generator.device, part=request.part)
        chosen = torch.cat([found.first, found.second]).numpy()
        rows, weight = len(found.first), found.weight
    wide = max(1, math.isqrt(max(0, rows - 1)) + 1)
    tall = -(-rows // wide)
    drawn = random_bytes((tall + wide) * units, generator).numpy()
    if chosen is None and size < count:
        part = random_part(count, generator, generator.device)
    own = np.arange(rows) if part is None else part.numpy()
    return _Draws(weight, drawn, tall, wide, own if chosen is None else np.tile(own, 2), chosen)


def fused_seeds(
    psi: Tensor, count: int, request: Request, generator: torch.Generator, memory: Memory
) -> tuple[Tensor, Tensor | None]:
    """:func:`pathspace.paths.chain_shares.seeds_of_rows`, compiled."""
    draws = _drawn(len(psi), count, request, generator)
    made = _room(memory, "seeds", len(draws.rows), len(psi), psi)
    table = np.zeros((1, 11), np.int64)
    table[0, loops.UNITS], table[0, loops.DELTA] = len(psi), made.data_ptr()
    draws.fill(table, psi.contiguous(), memory)
    whole = draws.chosen is None and len(draws.rows) == count
    chosen = draws.rows if draws.chosen is None else draws.chosen
    return made, None if whole else torch.from_numpy(chosen)


def fused_recurrent_shares(
    seen: RecurrentPass, request: Request, generator: torch.Generator, names: Sequence[str], memory: Memory
) -> Shares:
    """:func:`pathspace.paths.recurrent_shares.recurrent_shares` with compiled loops."""
    cells = (seen.leaves[cell.recurrent] for cell in seen.chain.cells)
    ways = _WAYS if all(W.is_contiguous() for W in cells) else PLAIN
    return recurrent_shares(seen, request, generator, names, memory, ways)


def _forward(rows: Tensor, W: Tensor, factor: float) -> None:
    loops.recur(rows.numpy(), W.detach().numpy(), factor, np.empty(len(W), rows.numpy().dtype), False)


def _backward(rows: Tensor, W: Tensor, factor: float) -> None:
    loops.recur(rows.numpy(), W.detach().numpy(), factor, np.empty(len(W), rows.numpy().dtype), True)


_WAYS = Ways(_forward, _backward, fused_seeds)


def summary(z: Tensor, batch: int | None, *, statistic: Statistic) -> Tensor:
    """:func:`pathspace.paths.node_measure.spread_of`, compiled for rows of units."""
    if z.dim() != 2 or batch != 0 or not z.is_contiguous() or z.dtype not in (torch.float32, torch.float64):
        return spread_of(z, batch, statistic)
    both = z.new_empty(2, z.shape[1])
    rows = both.numpy()
    loops.spread(z.numpy(), statistic == "covariance", rows[0], rows[1])
    return both[1:]


def _room(memory: Memory, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Memory for a matrix, kept from call to call."""
    made = memory.get(name)
    if made is None or made.shape != (rows, columns) or made.dtype != like.dtype:
        made = memory[name] = like.new_empty(rows, columns)
    return made
