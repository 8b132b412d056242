"""The two terms of the data-dependent kappa for chains of recurrent layers, without a graph.

It is what ``data_dependent`` computes with random signs, for the same draws, to rounding. Both are
pulled back by hand, the seeds only through the examples whose products are taken:

    g^l_t   = alpha stat[z^l_t] + (1 - alpha) (W_in^2 g^{l-1}_t + W_rec^2 g^l_{t-1} + b^2)
    psi^l_t = (1 - alpha) ((W_rec^2)^T psi^l_{t+1} + (W_in^2 of the layer above)^T psi^{l+1}_t),   1 at outputs
    delta^l_t = s^l_t + 1[h^l_t > 0] o (W_rec^T delta^l_{t+1} + (W_in of the layer above)^T delta^{l+1}_t)
    s_o^i = eps_o^i sqrt(psi_o);    J^i = sum over t of delta_t^i (h_{t-1}^i)^T   (see ``edge_statistics``)

Letters: T time, n examples, m rows of seeds, H hidden, l layer, z^l_t = W_in h^{l-1}_t + W_rec
h^l_{t-1} + b, h^l_t = relu(z^l_t), h^0 the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from pathspace.paths.data.data_dependent import KappaTerms, Request
from pathspace.paths.data.edge_statistics import Seeded, statistics
from pathspace.paths.data.node_measure import spread_of
from pathspace.paths.data.signs import Pairs, random_pairs, random_part, seed_rows
from pathspace.replay.chain import ChainPass
from pathspace.replay.observed import Use
from pathspace.replay.replay import Replay
from pathspace.squared.squares import Outer


def chain_terms(
    seen: ChainPass, request: Request, generator: torch.Generator, names: Sequence[str]
) -> KappaTerms:
    """Compute :func:`pathspace.paths.data.data_dependent.kappa_terms` with random signs, for a chain.

    Args:
        seen: a forward pass on data.
        request: what is wanted; no products of two parameters.
        generator: draws the signs.
        names: the parameters to return.
    """
    with torch.inference_mode(False), torch.no_grad():
        path, psi = _paths(seen, request)
        seeds, chosen, pairs = _seeds(seen, psi, request, generator)
        read = [seen.x, *seen.states]
        if chosen is not None:
            read = [h.index_select(1, chosen) for h in read]
        x, *states = read
        deltas = _pulled_back(seen, seeds, states)
        seeded = _seeded(seen, deltas, [x, *states], x.shape[1], pairs)
        data = statistics(seeded, request.statistic, request.sharing, names)
    return KappaTerms({name: path[name] for name in names if name in path}, data, {}, {}, True)


# -- the share of the paths ------------------------------------------------------------------------


def _paths(seen: ChainPass, request: Request) -> tuple[dict[str, Tensor | Outer], list[Tensor]]:
    """Compute the term of the paths, and psi of all layers, ``[T, units]``; at alpha = 1 only psi of the readout."""
    chain = seen.chain
    leaves = seen.leaves
    rest = 1 - request.alpha
    out = leaves[chain.readout.weight]
    psi = [out.new_ones(1, 1).expand(chain.steps if chain.every else 1, len(out))]
    if request.alpha == 1:
        return {}, psi
    squares = [leaves[cell.weight].square() for cell in chain.layers[1:]]
    g = _masses(seen, request, squares)
    path: dict[str, Tensor | Outer] = {}
    for layer, cell in reversed(list(enumerate(chain.layers))):
        if cell.recurrent:
            _recur(psi[0].unbind(0)[::-1], leaves[cell.recurrent].t(), rest)
        flow = psi[0] * rest
        total = flow[0] if len(flow) == 1 else flow.sum(0)
        at_once = layer == 0 or len(flow) == 1
        path[cell.weight] = Outer(total, g[layer][-1]) if at_once else flow.t() @ g[layer]
        if cell.recurrent:
            path[cell.recurrent] = flow[1:].t() @ g[layer + 1][:-1]
        path.update(dict.fromkeys(cell.biases, total))
        if layer:
            below = torch.mm(flow, squares[layer - 1])
            if len(below) != chain.steps:
                # the readout sees the last step alone
                below = pad(below, (0, 0, chain.steps - 1, 0))
            psi.insert(0, below)
    return path, psi


def _masses(seen: ChainPass, request: Request, squares: Sequence[Tensor]) -> list[Tensor]:
    """Compute the mass g of what enters each layer, ``[T, units]``.

    Args:
        seen: the forward pass.
        request: what is wanted.
        squares: of the weights of all layers but the first.
    """
    chain = seen.chain
    leaves = seen.leaves
    g = [leaves[chain.readout.weight].new_ones(1, 1).expand(chain.steps, seen.x.shape[2])]
    for layer, cell in enumerate(chain.cells):
        if layer:
            entering = torch.mm(g[layer], squares[layer - 1].t())
        else:
            entering = torch.linalg.vector_norm(leaves[cell.weight], dim=1).square_()
        for name in cell.biases:
            entering.addcmul_(leaves[name], leaves[name])
        mass = torch.lerp(entering, _spread(seen, layer, request), request.alpha)
        _recur(mass.unbind(0), leaves[cell.recurrent], 1 - request.alpha)
        g.append(mass)
    return g


def _spread(seen: ChainPass, layer: int, request: Request) -> Tensor:
    """Compute the statistic over examples of the values z of a layer before its activation, ``[T, H]``."""
    cell = seen.chain.cells[layer]
    leaves = seen.leaves
    h = seen.states[layer]
    x = seen.states[layer - 1] if layer else seen.x
    bias = None
    if cell.biases:
        bias = leaves[cell.biases[0]] + leaves[cell.biases[1]]
    # z_t = W_in x_t + b + W_rec h_{t-1}, all steps and examples in one product
    examples = h.shape[1]
    before = h[:-1].reshape(-1, h.shape[2])
    z = linear(x.reshape(-1, x.shape[2]), leaves[cell.weight], bias)
    z[examples:].addmm_(before, leaves[cell.recurrent].t())
    spread = spread_of(z.view(h.shape), 1, request.statistic)
    return spread.squeeze(1)


def _recur(rows: Sequence[Tensor], W: Tensor, factor: float) -> None:
    """Add factor W^2 rows_{t-1} to rows_t, one step after the other, in place; rows ``[H]``."""
    square = W * W
    for before, row in itertools.pairwise(rows):
        row.addmv_(square, before, alpha=factor)


# -- seeds and what they become --------------------------------------------------------------------


def _seeds(
    seen: ChainPass, psi: list[Tensor], request: Request, generator: torch.Generator
) -> tuple[list[Tensor | None], Tensor | None, Pairs | None]:
    """Draw seeds of all layers and the readout, ``[m, T, units]``, None for zero, with their examples and pairs."""
    flat = torch.cat([row.reshape(-1) for row in psi])
    places = _places_with_weight(psi)
    drawn = flat if places is None else flat[places]
    seeds, chosen, pairs = _seeds_of_rows(drawn, seen.count, request, generator)
    if places is not None:
        spread = seeds.new_zeros(len(seeds), len(flat))
        seeds = spread.index_copy_(1, places, seeds)
    result: list[Tensor | None] = [None] * (len(seen.chain.layers) - len(psi))
    parts = seeds.split([row.numel() for row in psi], 1)
    for part, row in zip(parts, psi, strict=True):
        result.append(part.view(len(part), *row.shape))
    return result, chosen, pairs


def _places_with_weight(psi: list[Tensor]) -> Tensor | None:
    """Return the nodes that signs are drawn for; None for all.

    Nodes of a step without any weight have none: at the far end of long sequences it may be below
    all numbers.
    """
    some = [row.any(1) for row in psi]
    if bool(torch.cat(some).all()):
        return None
    used = [drawn.repeat_interleave(row.shape[1]) for drawn, row in zip(some, psi, strict=True)]
    return torch.cat(used).nonzero().squeeze(1)


def _seeds_of_rows(
    psi: Tensor, count: int, request: Request, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Pairs | None]:
    """Draw seeds ``[m, units]``; return the numbers of their examples, None for all, and pairs for the covariance."""
    device = psi.device
    if request.statistic == "covariance":
        drawn = random_pairs(count, generator, device, part=request.part)
        half = len(drawn.first)
        seeds = seed_rows(psi.sqrt(), half, generator, request.place)
        rows = torch.arange(2 * half, device=device)
        pairs = Pairs(rows[:half], rows[half:], rows[:0], count)
        chosen = torch.cat([drawn.first, drawn.second])
        return torch.cat([seeds, seeds]), chosen, pairs
    seeds = seed_rows(psi.sqrt(), count, generator, request.place)
    if not request.part:
        return seeds, None, None
    chosen = random_part(count, generator, device, request.place)
    if chosen is None:
        return seeds, None, None
    return seeds.index_select(0, chosen), chosen, None


def _pulled_back(seen: ChainPass, seeds: list[Tensor | None], states: list[Tensor]) -> list[Tensor]:
    """Compute the deltas of all layers and of the readout, ``[T, m, units]``."""
    chain = seen.chain
    leaves = seen.leaves
    end = seeds[-1]
    assert end is not None
    deltas = [end.transpose(0, 1).contiguous()]
    weight = leaves[chain.readout.weight]
    for cell, seed, h in zip(chain.cells[::-1], seeds[-2::-1], states[::-1], strict=True):
        above = torch.matmul(deltas[0], weight)
        created = torch.empty_like(h)
        _pull_through(leaves[cell.recurrent], seed, h, above, created)
        deltas.insert(0, created)
        weight = leaves[cell.weight]
    return deltas


def _pull_through(
    recurrent: Tensor, seeds: Tensor | None, h: Tensor, above: Tensor, deltas: Tensor
) -> None:
    """Compute delta_t = s_t + 1[h_t > 0] o (W_rec^T delta_{t+1} + above_t) ``[T, m, H]``; above of all steps or 1."""
    rows = deltas.unbind(0)
    gates = (h > 0).to(h.dtype).unbind(0)
    entering = above.unbind(0)
    seed = None if seeds is None else seeds.unbind(1)
    back = entering[-1]
    for t in range(len(rows) - 1, -1, -1):
        if t < len(rows) - 1:
            after = rows[t + 1]
            alone = len(entering) == 1
            back = (
                torch.mm(after, recurrent) if alone else torch.addmm(entering[t], after, recurrent)
            )
        if seed is None:
            torch.mul(back, gates[t], out=rows[t])
        else:
            torch.addcmul(seed[t], back, gates[t], out=rows[t])


def _seeded(
    seen: ChainPass, deltas: list[Tensor], entering: list[Tensor], count: int, pairs: Pairs | None
) -> Seeded:
    """Return the layers as uses of their parameters, with the seeds pulled back to their results."""
    chain = seen.chain
    leaves = seen.leaves
    uses: list[Use] = []
    results: list[Tensor | None] = []
    for layer, (cell, delta) in enumerate(zip(chain.layers, deltas, strict=True)):
        h = entering[layer] if len(delta) == chain.steps else entering[layer][-1:]
        parts = [(h, delta, (cell.weight, *cell.biases))]
        if cell.recurrent and chain.steps > 1:
            parts.append((entering[layer + 1][:-1], delta[1:], (cell.recurrent,)))
        for x, result, names in parts:
            weights = [leaves[name] for name in names]
            x = x.transpose(0, 1)
            result = result.transpose(0, 1)
            uses.append(Use("linear", linear, (x, *weights), {}, weights, [x], [], result.shape))
            results.append(result)
    return Seeded(Replay({}, uses, leaves, count, set()), results, pairs)
