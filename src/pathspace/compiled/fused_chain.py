"""``paths.chain_shares`` with compiled loops between its products of matrices.

It finds the same from the same draws, to rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pathspace.compiled import chain_loops as loops
from pathspace.compiled.fused_signs import Signs
from pathspace.paths.data.chain_shares import ChainShares, Memory, chain_shares
from pathspace.paths.data.data_dependent import Request
from pathspace.paths.data.node_measure import Statistic, spread_of
from pathspace.replay.chain import ChainPass
from pathspace.squared.squares import Outer, memory_for


class FusedChain:
    """The estimates of one optimizer; it keeps memory and tables, so the path's terms are those of the last call."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._signs = Signs()

    def __deepcopy__(self, memo: dict[int, object]) -> FusedChain:
        return type(self)()

    def shares(
        self, seen: ChainPass, request: Request, generator: torch.Generator, memory: Memory
    ) -> ChainShares:
        """See :func:`pathspace.paths.data.chain_shares.chain_shares`."""
        own = (*seen.entering, *seen.spreads, *seen.leaves.values())
        dtype = own[0].dtype
        for t in own:
            if t.dtype != dtype or not t.is_contiguous():
                return chain_shares(seen, request, generator, memory)
        if request.alpha == 1 or torch.is_inference_mode_enabled():
            return chain_shares(seen, request, generator, memory)
        with torch.no_grad():
            return self._shares(seen, request, generator, memory)

    def _shares(
        self, seen: ChainPass, request: Request, generator: torch.Generator, memory: Memory
    ) -> ChainShares:
        leaves, count = seen.leaves, seen.count
        known = seen.layers, seen.entering[0].dtype, [leaf.shape for leaf in leaves.values()]
        if known != self._known:
            self._make(seen)
            self._known = known
        rows, t, psi = self._signs.lay_out(count, request, self._psi), self._table, self._psi
        if (rows, self._signs.pairs) != self._rows:
            self._make_rows(rows, self._signs.pairs)
        spreads, entering = [*[s.data_ptr() for s in seen.spreads[::-1]], 0], seen.entering[::-1]
        t[:, loops.WEIGHT : loops.GAMMA] = [
            (leaves[W].data_ptr(), 0 if b is None else leaves[b].data_ptr(), spread, x.data_ptr())
            for (W, b), spread, x in zip(self._names, spreads, entering, strict=True)
        ]
        loops.paths(t, request.alpha, psi, self._leaving)
        chosen = self._signs.seed(t, psi, generator)
        for i, (above, name, back, numbers) in enumerate(self._pulled):
            torch.mm(above, leaves[name], out=back)
            loops.gate(t, i + 1, numbers, chosen, count, True)
        biases = self._ones.new_empty(len(psi))
        (loops.square_pairs if self._signs.pairs else loops.square)(t, chosen, count, biases.data_ptr(), psi)
        data = [
            torch.mm(left, right, out=memory_for(leaves[name], memory, place))
            for name, place, left, right in self._products
        ]
        leaving, entering, sizes, path = self._found
        return ChainShares(self._layers, leaving, entering, data, biases, sizes, path)

    def _make(self, seen: ChainPass) -> None:
        """Tables and memory for layers of some sizes."""
        layers, like = seen.layers[::-1], seen.entering[0]
        self._layers, self._rows = layers, (-1, False)
        self._names = [(layer.weight, layer.bias) for layer in layers]
        sizes = [seen.leaves[layer.weight].shape for layer in layers]
        units = [size[0] for size in sizes]
        self._ones = like.new_ones(1)
        self._g = [*[like.new_empty(size[1]) for size in sizes[:-1]], self._ones]
        t = self._table = np.zeros((len(sizes), loops.SIZE), np.int64)
        t[:, [loops.UNITS, loops.WIDTH]] = sizes
        t[1:, loops.PLACE] = np.cumsum(units[:-1])
        t[:, loops.GAMMA] = [g.data_ptr() for g in self._g]
        self._psi = np.empty(sum(units), like.numpy().dtype)
        self._leaving = np.empty_like(self._psi)
        leaving = torch.from_numpy(self._leaving)
        entering = [*self._g[:-1], self._g[-1].expand(sizes[-1][1])]
        path: dict[str, Tensor | Outer] = {}
        for layer, rows, columns in zip(layers, leaving.split(units), entering, strict=True):
            path[layer.weight] = Outer(rows, columns)
            if layer.bias is not None:
                path[layer.bias] = rows
        self._found = leaving, entering, units, path

    def _make_rows(self, rows: int, pairs: bool) -> None:
        """Memory for so many rows of seeds."""
        self._rows, t, like = (rows, pairs), self._table, self._ones
        factors = 3 * (rows // 2) if pairs else rows
        units, widths = t[:, loops.UNITS].tolist(), t[:, loops.WIDTH].tolist()
        self._deltas = [like.new_empty(rows, n) for n in units]
        left = [like.new_empty(factors, n) for n in units] if pairs else self._deltas
        right = [like.new_empty(factors, n) for n in widths]
        backs = [like.new_empty(rows, n) for n in units[1:]]
        for column, made in ((loops.DELTA, self._deltas), (loops.LEFT, left), (loops.RIGHT, right)):
            t[:, column] = [x.data_ptr() for x in made]
        weights = [layer.weight for layer in self._layers]
        ends = zip(self._deltas, weights, backs, strict=False)
        self._pulled = [(above, name, back, back.numpy()) for above, name, back in ends]
        ends = zip(weights, left, right, strict=True)
        self._products = [(name, f"{name}, data", a.t(), b) for name, a, b in ends]


class Summaries:
    """:func:`pathspace.paths.data.node_measure.spread_of`, compiled for rows of units.

    Args:
        statistic: which spread.
        count: how many results are kept; later ones take the place of the first. None: all.
    """

    def __init__(self, statistic: Statistic, count: int | None = None) -> None:
        self._statistic: Statistic = statistic
        self._kept: list[tuple[Tensor, np.ndarray] | None] = [None] * (count or 0)
        self._place = -1

    def __call__(self, z: Tensor, batch: int | None) -> Tensor:
        """The spread of values z over a dimension."""
        if (
            z.dim() != 2
            or batch != 0
            or not z.is_contiguous()
            or z.dtype not in (torch.float32, torch.float64)
        ):
            return spread_of(z, batch, self._statistic)
        (count, units), kept = z.shape, None
        if self._kept:
            self._place = (self._place + 1) % len(self._kept)
            kept = self._kept[self._place]
        if kept is None or kept[0].shape[1] != units or kept[0].dtype != z.dtype:
            made = z.new_empty(1, units)
            kept = made, made.numpy()[0]
            if self._kept:
                self._kept[self._place] = kept
        loops.spread(z.data_ptr(), count, self._statistic == "covariance", kept[1])
        return kept[0]
