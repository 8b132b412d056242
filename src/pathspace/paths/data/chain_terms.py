"""The two terms of the data-dependent kappa for chains of layers, linear or recurrent, without a graph.

It is what ``data_dependent`` computes with random signs, for the same draws, to rounding. Both are pulled back by hand,
the seeds only through the examples whose products are taken:

    g^l_t   = alpha stat[z^l_t] + (1 - alpha) (W_in^2 g^{l-1}_t + W_rec^2 g^l_{t-1} + b^2)
    psi^l_t = (1 - alpha) ((W_rec^2)^T psi^l_{t+1} + (W_in^2 of the layer above)^T psi^{l+1}_t),   1 at outputs
    delta^l_t = s^l_t + 1[h^l_t > 0] o (W_rec^T delta^l_{t+1} + (W_in of the layer above)^T delta^{l+1}_t)
    s_o^i = eps_o^i sqrt(psi_o);    J^i = sum over t of delta_t^i (h_{t-1}^i)^T

    R = M: the mean of (J^i)^2;   R = C: of the squared differences in pairs (see ``edge_statistics``)

A linear layer has one step t and no W_rec, so its J^i is an outer product, which is not formed.

Letters: T time, n examples, m rows of seeds, H hidden, l layer, z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,
h^l_t = relu(z^l_t), h^0 the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from pathspace.paths.data.data_dependent import KappaTerms, Request
from pathspace.paths.data.edge_statistics import CHUNK, of_pairs
from pathspace.paths.data.node_measure import spread_of
from pathspace.paths.data.signs import random_pairs, random_part, seed_rows, size_of_part
from pathspace.replay.chain import ChainPass
from pathspace.squared.squares import Outer, memory_for

Memory = dict[str, Tensor]


def chain_terms(
    seen: ChainPass, request: Request, generator: torch.Generator, names: Sequence[str], memory: Memory
) -> KappaTerms:
    """:func:`pathspace.paths.data.data_dependent.kappa_terms` with random signs, for a chain.

    Args:
        seen: a forward pass on data.
        request: what is wanted; no products of two parameters.
        generator: draws the signs.
        names: the parameters to return.
        memory: memory kept by the caller from one call to the next, which may overwrite what was returned.
    """
    with torch.inference_mode(False), torch.no_grad():
        path, psi = _paths(seen, request, memory)
        seeds, chosen = _seeds(seen, psi, request, generator, memory)
        x, *states = (
            _examples(h, chosen, memory, f"entering {i}") for i, h in enumerate((seen.x, *seen.states))
        )
        deltas = _pulled_back(seen, seeds, states, memory)
        data = _data(seen, deltas, [x, *states], request, memory)
    paths = {name: path[name] for name in names if name in path}
    return KappaTerms(paths, {name: data[name] for name in names}, {}, {}, True)


# -- the share of the paths ---------------------------------------------------------------------------------------


def _paths(
    seen: ChainPass, request: Request, memory: Memory
) -> tuple[dict[str, Tensor | Outer], list[Tensor]]:
    """The share of the paths, and psi of all layers, ``[T, units]``; at alpha = 1 psi of the readout alone."""
    chain, leaves, rest = seen.chain, seen.leaves, 1 - request.alpha
    out = leaves[chain.readout.weight]
    psi = [out.new_ones(1, 1).expand(chain.steps if chain.every else 1, len(out))]
    if request.alpha == 1:
        return {}, psi
    above_first = [(leaves[cell.weight], cell.weight) for cell in chain.layers[1:]]
    squares = [torch.square(W, out=memory_for(W, memory, name)) for W, name in above_first]
    g = [out.new_ones(1, 1).expand(chain.steps, seen.x.shape[2])]  # of what enters each layer
    for layer, cell in enumerate(chain.cells):
        if layer:
            entering = torch.mm(g[layer], squares[layer - 1].t())
        else:
            entering = torch.linalg.vector_norm(leaves[cell.weight], dim=1).square_()
        for name in cell.biases:
            entering.addcmul_(leaves[name], leaves[name])
        mass = torch.lerp(entering, _spread(seen, layer, request, memory), request.alpha)
        if cell.recurrent:
            _recur(mass.unbind(0), leaves[cell.recurrent], rest)
        g.append(mass)
    path: dict[str, Tensor | Outer] = {}
    for layer, cell in reversed(list(enumerate(chain.layers))):
        if cell.recurrent:
            _recur(psi[0].unbind(0)[::-1], leaves[cell.recurrent].t(), rest)
        flow = psi[0] * rest
        total, at_once = flow[0] if len(flow) == 1 else flow.sum(0), layer == 0 or len(flow) == 1
        path[cell.weight] = Outer(total, g[layer][-1]) if at_once else flow.t() @ g[layer]
        if cell.recurrent:
            path[cell.recurrent] = flow[1:].t() @ g[layer + 1][:-1]
        path.update(dict.fromkeys(cell.biases, total))
        if layer:
            above = torch.mm(flow, squares[layer - 1])
            psi.insert(0, above if len(above) == chain.steps else pad(above, (0, 0, chain.steps - 1, 0)))
    return path, psi


def _spread(seen: ChainPass, layer: int, request: Request, memory: Memory) -> Tensor:
    """Stat of the values z of a layer, ``[T, H]``."""
    cell = seen.chain.cells[layer]
    if cell.recurrent is None:
        return seen.spreads[layer]
    # z_t = W_in x_t + b + W_rec h_{t-1}
    h, x, leaves = seen.states[layer], seen.states[layer - 1] if layer else seen.x, seen.leaves
    z = memory_for(h, memory, "values")
    flat, W, created = x.reshape(-1, x.shape[2]), leaves[cell.weight].t(), z.view(-1, z.shape[2])
    if cell.biases:
        torch.addmm(leaves[cell.biases[0]] + leaves[cell.biases[1]], flat, W, out=created)
    else:
        torch.mm(flat, W, out=created)
    before = h[:-1].reshape(-1, h.shape[2])
    created[h.shape[1] :].addmm_(before, leaves[cell.recurrent].t())
    return spread_of(z, 1, request.statistic).squeeze(1)


def _recur(rows: Sequence[Tensor], W: Tensor, factor: float) -> None:
    """Rows_t += factor W^2 rows_{t-1}, one after the other, in place; rows ``[H]``."""
    square = W * W
    for before, row in itertools.pairwise(rows):
        row.addmv_(square, before, alpha=factor)


# -- seeds and what they become -----------------------------------------------------------------------------------


def _seeds(
    seen: ChainPass, psi: list[Tensor], request: Request, generator: torch.Generator, memory: Memory
) -> tuple[list[Tensor | None], Tensor | None]:
    """Seeds of all layers and of the readout, ``[m, T, units]``, None for zero; and the numbers of their examples."""
    flat, places = torch.cat([row.reshape(-1) for row in psi]), None
    # nodes without any weight have no signs drawn; at the far end of long sequences it may be below all numbers
    some = [row.any(1) for row in psi]
    if not bool(torch.cat(some).all()):
        used = [drawn.repeat_interleave(row.shape[1]) for drawn, row in zip(some, psi, strict=True)]
        places = torch.cat(used).nonzero().squeeze(1)
    seeds, chosen = _seeds_of_rows(
        flat if places is None else flat[places], seen.count, request, generator, memory
    )
    if places is not None:
        spread = seeds.new_zeros(len(seeds), len(flat))
        seeds = spread.index_copy_(1, places, seeds)
    parts = zip(seeds.split([row.numel() for row in psi], 1), psi, strict=True)
    result = [part.view(len(part), *row.shape) for part, row in parts]
    return [*[None] * (len(seen.chain.layers) - len(result)), *result], chosen


def _seeds_of_rows(
    psi: Tensor, count: int, request: Request, generator: torch.Generator, memory: Memory
) -> tuple[Tensor, Tensor | None]:
    """Seeds ``[m, units]``, and the numbers of their examples; None is all. They hold the factor of the sums.

    For the covariance the rows k and m/2 + k are those of a pair.
    """
    if request.statistic == "covariance":
        pairs = random_pairs(count, generator, psi.device, part=request.part)
        seeds = seed_rows((psi * pairs.weight).sqrt_(), len(pairs.first), generator, memory, request.place)
        return torch.cat([seeds, seeds]), torch.cat([pairs.first, pairs.second])
    size = size_of_part(count, request.part, request.place)
    seeds = seed_rows((psi * (1 / size)).sqrt_(), count, generator, memory, request.place)
    if size == count:
        return seeds, None
    chosen = random_part(count, generator, psi.device, request.place)
    return _examples(seeds[None], chosen, memory, "seeds of a part")[0], chosen


def _examples(h: Tensor, chosen: Tensor | None, memory: Memory, name: str) -> Tensor:
    """Some examples of ``[T, n, units]``, or all."""
    if chosen is None:
        return h
    few = h.narrow(1, 0, 1).expand(-1, len(chosen), -1)
    return torch.index_select(h, 1, chosen, out=memory_for(few, memory, name))


def _pulled_back(
    seen: ChainPass, seeds: list[Tensor | None], states: list[Tensor], memory: Memory
) -> list[Tensor]:
    """Deltas of all layers and of the readout, ``[T, m, units]``."""
    chain, leaves = seen.chain, seen.leaves
    end = seeds[-1]
    assert end is not None
    deltas = [end.transpose(0, 1).contiguous()]
    weight = leaves[chain.readout.weight]
    for cell, seed, h in zip(chain.cells[::-1], seeds[-2::-1], states[::-1], strict=True):
        above, created = torch.matmul(deltas[0], weight), memory_for(h, memory, f"deltas, {cell.weight}")
        if cell.recurrent:
            _pull_through(leaves[cell.recurrent], seed, h, above, created)
        else:
            torch.ops.aten.threshold_backward.grad_input(above, h, 0, grad_input=created)
            if seed is not None:
                created.add_(seed.transpose(0, 1))
        deltas.insert(0, created)
        weight = leaves[cell.weight]
    return deltas


def _pull_through(recurrent: Tensor, seeds: Tensor | None, h: Tensor, above: Tensor, deltas: Tensor) -> None:
    """Delta_t = s_t + 1[h_t > 0] o (W_rec^T delta_{t+1} + above_t), ``[T, m, H]``; above at all steps or the last."""
    rows, gates, entering = deltas.unbind(0), (h > 0).to(h.dtype).unbind(0), above.unbind(0)
    seed, back = None if seeds is None else seeds.unbind(1), entering[-1]
    for t in range(len(rows) - 1, -1, -1):
        if t < len(rows) - 1:
            after = rows[t + 1]
            back = (
                torch.mm(after, recurrent)
                if len(entering) == 1
                else torch.addmm(entering[t], after, recurrent)
            )
        if seed is None:
            torch.mul(back, gates[t], out=rows[t])
        else:
            torch.addcmul(seed[t], back, gates[t], out=rows[t])


# -- the data term ------------------------------------------------------------------------------------------------


def _data(
    seen: ChainPass, deltas: list[Tensor], entering: list[Tensor], request: Request, memory: Memory
) -> dict[str, Tensor]:
    """The data term of all parameters."""
    data: dict[str, Tensor] = {}
    in_pairs = request.statistic == "covariance"
    for layer, (cell, delta) in enumerate(zip(seen.chain.layers, deltas, strict=True)):
        h = entering[layer] if len(delta) == seen.chain.steps else entering[layer][-1:]
        uses = [(cell.weight, delta, h)]
        if cell.recurrent:
            uses.append((cell.recurrent, delta[1:], entering[layer + 1][:-1]))
        by_steps = request.sharing == "edges" or len(delta) == 1  # a matrix of its own at every step
        parts = _parts(delta if by_steps else delta.sum(0, keepdim=True), in_pairs)
        for name, left, right in uses:
            out = memory_for(seen.leaves[name], memory, f"{name}, data")
            if by_steps:
                lefts = parts if left is delta else _parts(left, in_pairs)
                data[name] = _of_products(lefts, _parts(right, in_pairs), memory, name, out)
            else:
                data[name] = _of_sums(left, right, in_pairs, out)
        for name in cell.biases:
            data[name] = (parts[-1] * parts[-1]).sum((0, 1))
    return data


def _parts(x: Tensor, in_pairs: bool) -> tuple[Tensor, ...]:
    """X itself; or twice the half sums and half differences of the pairs of rows k and m/2 + k, at all steps."""
    if not in_pairs:
        return (x,)
    a, b = x.chunk(2, 1)
    return a + b, a - b


def _of_products(
    delta: tuple[Tensor, ...], h: tuple[Tensor, ...], memory: Memory, name: str, out: Tensor
) -> Tensor:
    """The sum over steps and rows of (delta h^T)^2, or of the squared differences in pairs."""
    if len(delta) == 2:
        (s, t), (u, v) = delta, h
        return of_pairs(u, v, s, t, 1.0, out, memory, name)
    left, right = ((x * x).flatten(0, 1) for (x,) in (delta, h))
    return torch.mm(left.t(), right, out=out)


def _of_sums(delta: Tensor, h: Tensor, in_pairs: bool, out: Tensor) -> Tensor:
    """The same of the sums over the steps, for some rows at a time: they stay in the cache."""
    left, right = delta.permute(1, 2, 0), h.transpose(0, 1)
    count, created = len(left) // (2 if in_pairs else 1), None
    size = max(1, CHUNK // out.numel())
    for first in range(0, count, size):
        end = min(first + size, count)
        J = torch.bmm(left[first:end], right[first:end])
        if in_pairs:
            J.baddbmm_(left[count + first : count + end], right[count + first : count + end], alpha=-1)
        square = J.mul_(J)
        if created is None:
            created = torch.sum(square, 0, out=out)
        else:
            created += square.sum(0)
    return out.zero_() if created is None else created
