"""The two terms of the data-dependent kappa for a chain of linear maps and ReLUs, without a graph, in few operations.

It is what ``data_dependent`` computes with random signs, for the same draws, to rounding. Seeds are pulled back by
hand, and only through the examples whose products are taken; all units lie side by side, so that one operation serves
all layers:

    delta_L = s_L,    delta_l = s_l + 1[h_l > 0] o (W_{l+1}^T delta_{l+1}),    s_l^i = eps_l^i sqrt(psi_l)

    R = M: data of W_l = (1/n) sum over i of (delta_l^i)^2 (h_{l-1}^i)^2^T;    of b_l with h = 1
    R = C: the same of the differences in pairs (see ``edge_statistics``)

Letters: l layer, L the last, n examples, m rows of seeds, D units, z_l = W_l h_{l-1} + b_l, g_l = gamma^2 of layer l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.paths.data.data_dependent import Request, Shares
from pathspace.paths.data.signs import random_pairs, random_part, seed_rows, size_of_part
from pathspace.replay.chain import ChainPass, Layer
from pathspace.squared.squares import Outer, memory_for

Memory = dict[str, Tensor]


@dataclass
class ChainShares:
    """The two terms of kappa for all layers, each from the last one to the first.

    Attributes:
        layers: the layers, in that order.
        leaving: (1 - alpha) psi of all units side by side, ``[D]``; None at alpha = 1.
        entering: g_{l-1}, ``[in]``; the first layer's has stride zero.
        weights: the data term of W_l, ``[out, in]``.
        biases: that of b_l, all units side by side, ``[D]``; also where there is no bias.
        sizes: the number of units of each layer.
        path: the first term by name, if it was put together before.
    """

    layers: tuple[Layer, ...]
    leaving: Tensor | None
    entering: list[Tensor]
    weights: list[Tensor]
    biases: Tensor
    sizes: list[int]
    path: dict[str, Tensor | Outer] | None = None

    def by_name(self) -> Shares:
        """The terms of all parameters, as of any network."""
        data: dict[str, Tensor] = {}
        for layer, weight, bias in zip(self.layers, self.weights, self.biases.split(self.sizes), strict=True):
            data[layer.weight] = weight
            if layer.bias is not None:
                data[layer.bias] = bias
        return Shares(self._path() if self.path is None else self.path, data, {}, {}, True)

    def _path(self) -> dict[str, Tensor | Outer]:
        path: dict[str, Tensor | Outer] = {}
        if self.leaving is not None:
            ends = zip(self.layers, self.leaving.split(self.sizes), self.entering, strict=True)
            for layer, leaving, entering in ends:
                path[layer.weight] = Outer(leaving, entering)
                if layer.bias is not None:
                    path[layer.bias] = leaving
        return path


def chain_shares(
    seen: ChainPass, request: Request, generator: torch.Generator, memory: Memory
) -> ChainShares:
    """:func:`pathspace.paths.data.data_dependent.kappa_shares` with random signs, for a chain.

    Args:
        seen: a forward pass on data.
        request: what is wanted; no products of two parameters.
        generator: draws the signs.
        memory: memory kept by the caller from one call to the next, which may overwrite what was returned.
    """
    with torch.inference_mode(False), torch.no_grad():
        layers = seen.layers[::-1]
        W = [seen.leaves[layer.weight] for layer in layers]
        sizes = [len(w) for w in W]
        entering, psi = _paths(seen, W, request.alpha, memory)
        deltas, chosen = seeds_of_rows(psi, seen.count, request, generator, memory)
        h = [_rows(x, chosen, memory, f"entering {i}") for i, x in enumerate(seen.entering[::-1])]
        deltas = _pulled_back(deltas, W, sizes, h)
        data, biases = (_of_pairs if request.statistic == "covariance" else _of_squares)(
            layers, W, deltas, sizes, h, memory
        )
        leaving = psi.mul_(1 - request.alpha) if request.alpha < 1 else None
    return ChainShares(layers, leaving, entering, data, biases, sizes)


def _paths(seen: ChainPass, W: list[Tensor], alpha: float, memory: Memory) -> tuple[list[Tensor], Tensor]:
    """g_{l-1} of all layers, and psi of all units; both from the last on, and at alpha = 1 of the last alone."""
    if alpha == 1:
        return [], W[0].new_ones(len(W[0]))
    last = len(W) - 1
    squares = [
        torch.square(w, out=memory_for(w, memory, layer.weight))
        for w, layer in zip(W[:last], seen.layers[:0:-1], strict=True)
    ]
    # g_l = alpha stat[z_l] + (1 - alpha) (W_l^2 g_{l-1} + b_l^2)
    g = [W[last].new_ones(1).expand(W[last].shape[1])]
    for i, layer in enumerate(seen.layers[:last]):
        if i == 0:
            own = torch.linalg.vector_norm(W[last], dim=1)
            own.mul_(own)
        else:
            own = torch.mv(squares[last - i], g[-1])
        if layer.bias is not None:
            bias = seen.leaves[layer.bias]
            own.addcmul_(bias, bias)
        g.append(own.lerp_(seen.spreads[i].reshape(-1), alpha))
    # psi_l = (1 - alpha) (W_{l+1}^2)^T psi_{l+1}
    psi = W[0].new_ones(sum(map(len, W)))
    parts = psi.split([len(w) for w in W])
    for above, square, own in zip(parts, squares, parts[1:], strict=False):
        torch.addmv(own, square.t(), above, beta=0, alpha=1 - alpha, out=own)
    return g[::-1], psi


def seeds_of_rows(
    psi: Tensor, count: int, request: Request, generator: torch.Generator, memory: Memory
) -> tuple[Tensor, Tensor | None]:
    """Seeds ``[m, units]``, and the numbers of their examples; None is all. They hold the factor of the sums.

    For the covariance the rows k and m/2 + k are those of a pair.
    """
    if request.statistic == "covariance":
        pairs = random_pairs(count, generator, psi.device, part=request.part)
        seeds = seed_rows((psi * pairs.weight).sqrt_(), len(pairs.first), generator, memory)
        return torch.cat([seeds, seeds]), torch.cat([pairs.first, pairs.second])
    size = size_of_part(count, request.part)
    seeds = seed_rows((psi * (1 / size)).sqrt_(), count, generator, memory)
    if size == count:
        return seeds, None
    chosen = random_part(count, generator, psi.device)
    return _rows(seeds, chosen, memory, "seeds of a part"), chosen


def _rows(x: Tensor, chosen: Tensor | None, memory: Memory, name: str) -> Tensor:
    """Some rows of a matrix, or all."""
    if chosen is None:
        return x
    return torch.index_select(x, 0, chosen, out=memory_for(x[: len(chosen)], memory, name))


def _pulled_back(seeds: Tensor, W: list[Tensor], sizes: list[int], h: list[Tensor]) -> Tensor:
    """Deltas of all units, ``[m, D]``; written over the seeds where all units have some."""
    total = sum(sizes)
    everywhere = seeds.shape[1] == total
    deltas = seeds if everywhere else seeds.new_empty(len(seeds), total)
    parts = deltas.split(sizes, 1)
    if not everywhere:
        parts[0].copy_(seeds)
    for above, w, after, own in zip(parts, W, h, parts[1:], strict=False):
        back = torch.mm(above, w)
        # 1[h > 0] o (W^T delta)
        torch.ops.aten.threshold_backward.grad_input(back, after, 0, grad_input=back)
        if everywhere:
            own.add_(back)
        else:
            own.copy_(back)
    return deltas


def _of_squares(
    layers: Sequence[Layer],
    W: list[Tensor],
    deltas: Tensor,
    sizes: list[int],
    h: list[Tensor],
    memory: Memory,
) -> tuple[list[Tensor], Tensor]:
    """The sums of squares: of all W_l, and of all b_l side by side."""
    squares = deltas.mul_(deltas)
    data = [
        torch.mm(left.contiguous().t(), x * x, out=memory_for(w, memory, f"{layer.weight}, data"))
        for layer, w, left, x in zip(layers, W, squares.split(sizes, 1), h, strict=True)
    ]
    return data, squares.sum(0)


def _of_pairs(
    layers: Sequence[Layer],
    W: list[Tensor],
    deltas: Tensor,
    sizes: list[int],
    h: list[Tensor],
    memory: Memory,
) -> tuple[list[Tensor], Tensor]:
    """The sums of (J^i - J^j)^2 = (s v + t u)^2 / 4, with twice the half sums s, u and half differences t, v."""
    left = _products(*_halves(deltas), memory, "leaving")
    count = len(deltas) // 2
    biases = left[count : 2 * count].sum(0)
    left[2 * count :].mul_(2)
    data = []
    for i, (layer, w, own) in enumerate(zip(layers, W, left.split(sizes, 1), strict=True)):
        u, v = _halves(h[i])
        right = _products(v, u, memory, f"entering {i}, products")
        out = memory_for(w, memory, f"{layer.weight}, data")
        data.append(torch.addmm(out, own.contiguous().t(), right, beta=0, alpha=1 / 4, out=out))
    return data, biases


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twice the half sums and half differences of the rows k and m/2 + k."""
    a, b = x.chunk(2)
    return a + b, a - b


def _products(a: Tensor, b: Tensor, memory: Memory, name: str) -> Tensor:
    """The rows of a^2, b^2 and a b, one below the other."""
    count = len(a)
    made = memory_for(a[:1].expand(3 * count, -1), memory, name)
    torch.mul(a, a, out=made[:count])
    torch.mul(b, b, out=made[count : 2 * count])
    torch.mul(a, b, out=made[2 * count :])
    return made
