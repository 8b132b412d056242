"""``paths.recurrent_shares`` with compiled loops between the products that make the values of all steps, and J.

It finds the same from the same draws, to rounding.

Letters: T steps, n examples, m rows of seeds, K units of a layer, D of what enters it; J^i the gradient of W_in and
W_rec, side by side, for example i or for the difference of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pathspace.compiled import chain_loops
from pathspace.compiled import recurrent_loops as loops
from pathspace.compiled.fused_signs import Signs
from pathspace.paths.data.chain_shares import Memory
from pathspace.paths.data.data_dependent import Request, Shares
from pathspace.paths.data.recurrent_shares import recurrent_shares
from pathspace.replay.recurrent_chain import RecurrentPass
from pathspace.squared.squares import Outer, memory_for

_CHUNK = 2**17  # elements at a time, of values or of J: they stay in the cache


class FusedRecurrent:
    """The estimates of one optimizer; it keeps memory and tables, so the path's terms are those of the last call."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._signs = Signs()

    def __deepcopy__(self, memo: dict[int, object]) -> FusedRecurrent:
        return type(self)()

    def shares(
        self,
        seen: RecurrentPass,
        request: Request,
        generator: torch.Generator,
        names: Sequence[str],
        memory: Memory,
    ) -> Shares:
        """See :func:`pathspace.paths.data.recurrent_shares.recurrent_shares`; the terms are those of all parameters."""
        if request.alpha < 1 and request.sharing == "parameters":
            with torch.inference_mode(False), torch.no_grad():
                data = self._data(seen, request, generator, memory)
            if data is not None:
                return Shares(self._path, data, {}, {}, True)
        return recurrent_shares(seen, request, generator, names, memory)

    def _data(
        self, seen: RecurrentPass, request: Request, generator: torch.Generator, memory: Memory
    ) -> dict[str, Tensor] | None:
        """The data term; None if the loops cannot read what was seen, or a node has no seed."""
        leaves, count, pairs = seen.leaves, seen.count, request.statistic == "covariance"
        if not all(p.is_contiguous() and p.dtype == seen.x.dtype for p in leaves.values()):
            return None
        below = self._lay_out(seen)
        m = self._signs.lay_out(count, request, self._psi)
        if (m, pairs) != self._rows:
            self._make_rows(m, pairs)
        t, psi = self._table, self._psi
        for row, joined, steps, parts in self._maps:
            for first, rows, values in parts:
                loops.advance(row, count, first, steps, pairs, psi)
                torch.mm(rows, joined, out=values)
            loops.advance(row, count, seen.chain.steps, steps, pairs, psi)
        if not loops.paths(t, request.alpha, psi):
            return None  # nodes without any weight have no signs drawn
        data = {name: memory_for(leaves[name], memory, place) for name, place in self._data_places}
        t[self._where_data] = [data[name].data_ptr() for name in self._names]
        chosen = self._signs.seed(self._seeds, psi, generator)
        loops.pull_back(t, chosen, count, pairs, psi)
        del below  # the table points to it until here
        for row, left, right, J, numbers, first in self._products:
            torch.bmm(left, right, out=J)
            loops.square(numbers, row, first)
        return data

    def _lay_out(self, seen: RecurrentPass) -> list[Tensor]:
        """Write addresses to the table; returns what must not be let go before it is read."""
        chain, n, T = seen.chain, seen.count, seen.chain.steps
        by_example = seen.x.transpose(0, 1)
        x = by_example if by_example.is_contiguous() else seen.x.contiguous()
        below = [x, *[h.contiguous() for h in seen.states]]
        known = chain, n, x.stride(), x.dtype, *[p.shape for p in seen.leaves.values()]
        if known != self._known:
            self._make(seen)
            self._table[0, [loops.OF_STEP, loops.OF_EXAMPLE]] = (1, T) if x is by_example else (n, 1)
            self._known = known
        t = self._table
        t[self._where] = [seen.leaves[name].data_ptr() for name in self._names]
        places = [h.data_ptr() for h in below]
        t[:-1, loops.STATES] = places[1:]
        places[-1] += self._unread
        t[:, loops.BELOW] = places
        return below

    def _make(self, seen: RecurrentPass) -> None:
        """Tables and memory for layers of some sizes."""
        chain, leaves, n, T = seen.chain, seen.leaves, seen.count, seen.chain.steps
        readout, last = chain.readout, len(chain.cells)
        t = self._table = np.zeros((last + 1, loops.SIZE), np.int64)
        one = seen.x.new_ones(1)
        self._held = [one]
        self._maps: list[tuple[np.ndarray, Tensor, int, list[tuple[int, Tensor, Tensor]]]] = []
        places = list[tuple[str, int, int]]()  # rows and columns of parameters in the table
        path = self._path = dict[str, Tensor | Outer]()

        def new(i: int, column: int, *shape: int) -> Tensor:
            made = one.new_empty(shape)
            self._held.append(made)
            t[i, column] = made.data_ptr()
            return made

        for i, cell in enumerate(chain.cells):
            K, D = leaves[cell.weight].shape
            t[i, : loops.WEIGHT] = K, D, T
            names = cell.weight, cell.recurrent, *cell.biases
            places += [(name, i, loops.WEIGHT + k) for k, name in enumerate(names)]
            some = max(1, min(T, _CHUNK // (n * (D + 2 * K))))
            rows, values = new(i, loops.ROWS, some * n, D + K), new(i, loops.VALUES, some * n, K)
            ends = [(first, min(some, T - first) * n) for first in range(0, T, some)]
            parts = [(first, rows[:end], values[:end]) for first, end in ends]
            self._maps.append((t[i], new(i, loops.JOINED, K, D + K).t(), some, parts))
            new(i, loops.GAMMA, T, K)
            new(i, loops.BIAS_DATA, K)  # where there is no bias
            total = new(i, loops.BIAS_PATH, K)
            path[cell.weight] = new(i, loops.PATH, K, D) if i else Outer(total, one.expand(D))
            path[cell.recurrent] = new(i, loops.RECURRENT_PATH, K, K)
            path.update(dict.fromkeys(cell.biases, total))
        out, width = leaves[readout.weight].shape
        t[last, : loops.WEIGHT] = out, width, T if chain.every else 1
        places.append((readout.weight, last, loops.WEIGHT))
        path[readout.weight] = Outer(new(last, loops.PATH, out), new(last, loops.RECURRENT_PATH, width))
        new(last, loops.BIAS_DATA, out)
        total = new(last, loops.BIAS_PATH, out)
        if readout.bias is not None:
            places.append((readout.bias, last, loops.BIAS))
            path[readout.bias] = total
        t[:, loops.OF_STEP], t[:, loops.OF_EXAMPLE] = n, 1
        self._unread = 0 if chain.every else (T - 1) * n * width * one.element_size()
        self._names = [name for name, _, _ in places]
        self._data_places = [(name, f"{name}, data") for name in self._names]
        rows, columns = np.array([place[1:] for place in places]).T
        self._where, self._where_data = (rows, columns), (rows, columns + loops.DATA - loops.WEIGHT)
        # all nodes side by side
        s = self._seeds = np.zeros((last + 1, chain_loops.SIZE), np.int64)
        s[:, chain_loops.UNITS] = t[:, loops.UNITS] * t[:, loops.STEPS]
        s[1:, chain_loops.PLACE] = np.cumsum(s[:-1, chain_loops.UNITS])
        psi = one.new_ones(int(s[:, chain_loops.UNITS].sum()))
        t[:, loops.PSI] = psi.data_ptr() + s[:, chain_loops.PLACE] * one.element_size()
        self._psi, self._rows = psi.numpy(), (-1, False)

    def _make_rows(self, m: int, pairs: bool) -> None:
        """Memory for so many rows of seeds, and the products that J is made by, a few examples at a time."""
        self._rows, count, t, one = (m, pairs), m // 2 if pairs else m, self._table, self._held[0]
        self._products = list[tuple[np.ndarray, Tensor, Tensor, Tensor, np.ndarray, bool]]()
        for row, seeds in zip(t, self._seeds, strict=True):
            K, D, T = row[: loops.WEIGHT].tolist()
            each, wide = 2 * T if pairs else T, D + K if row[loops.RECURRENT] else D
            delta, right = one.new_empty(count, each, K), one.new_empty(count, each, wide)
            row[loops.DELTA] = seeds[chain_loops.DELTA] = delta.data_ptr()
            row[loops.RIGHT] = right.data_ptr()
            size = max(1, min(_CHUNK // (K * wide), count))
            J = one.new_empty(size, K, wide)
            for first in range(0, max(1, count), size):
                left, entering = delta[first : first + size].transpose(1, 2), right[first : first + size]
                own = J[: len(entering)]
                self._products.append((row, left, entering, own, own.numpy(), first == 0))
