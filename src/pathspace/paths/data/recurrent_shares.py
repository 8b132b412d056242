"""The two terms of the data-dependent kappa for recurrent layers with a linear readout, without a graph.

It is what ``data_dependent`` computes with random signs, for the same draws, to rounding. Both are pulled back by hand,
the seeds only through the examples whose products are taken:

    g^l_t   = alpha stat[z^l_t] + (1 - alpha) (W_in^2 g^{l-1}_t + W_rec^2 g^l_{t-1} + b^2)
    psi^l_t = (1 - alpha) ((W_rec^2)^T psi^l_{t+1} + (W_in^2 of the layer above)^T psi^{l+1}_t),   1 at outputs
    delta^l_t = s^l_t + 1[h^l_t > 0] o (W_rec^T delta^l_{t+1} + (W_in of the layer above)^T delta^{l+1}_t)
    s_o^i = eps_o^i sqrt(psi_o);    J^i = sum over t of delta_t^i (h_{t-1}^i)^T

    R = M: the mean of (J^i)^2;   R = C: of the squared differences in pairs (see ``edge_statistics``)

Letters: T time, n examples, m rows of seeds, H hidden, l layer, z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,
h^l_t = relu(z^l_t), h^0 the input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from pathspace.paths.data.chain_shares import Memory, seeds_of_rows
from pathspace.paths.data.data_dependent import Request, Shares
from pathspace.paths.data.edge_statistics import CHUNK, of_pairs
from pathspace.paths.data.node_measure import spread_of
from pathspace.replay.recurrent_chain import RecurrentPass, entering_values
from pathspace.squared.squares import Outer, memory_for


def recurrent_shares(
    seen: RecurrentPass,
    request: Request,
    generator: torch.Generator,
    names: Sequence[str],
    memory: Memory,
) -> Shares:
    """:func:`pathspace.paths.data.data_dependent.kappa_shares` with random signs, for a recurrent chain.

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
    return Shares(
        {name: path[name] for name in names if name in path},
        {name: data[name] for name in names},
        {},
        {},
        True,
    )


def _values(seen: RecurrentPass, layer: int, memory: Memory) -> Tensor:
    """The values z of all steps of a layer, ``[T, n, H]``."""
    cell, h = seen.chain.cells[layer], seen.states[layer]
    out = memory_for(h, memory, "values")
    z = entering_values(seen.x if layer == 0 else seen.states[layer - 1], cell, seen.leaves, out)
    before = h[:-1].reshape(-1, h.shape[2])
    z[1:].view(before.shape).addmm_(before, seen.leaves[cell.recurrent].t())
    return z


def _paths(
    seen: RecurrentPass, request: Request, memory: Memory
) -> tuple[dict[str, Tensor | Outer], list[Tensor]]:
    """The share of the paths, and psi of all layers, ``[T, H]``; nothing at alpha = 1."""
    if request.alpha == 1:
        return {}, []
    chain, leaves, rest = seen.chain, seen.leaves, 1 - request.alpha
    readout, out = chain.readout, leaves[chain.readout.weight]
    squares = {cell.weight: torch.mul(leaves[cell.weight], leaves[cell.weight]) for cell in chain.cells}
    g: list[Tensor] = []
    for layer, cell in enumerate(chain.cells):
        S = squares[cell.weight]
        made = g[-1] @ S.t() if layer else S.sum(1).expand(chain.steps, -1)
        for name in cell.biases:
            made = torch.addcmul(made, leaves[name], leaves[name])
        own = spread_of(_values(seen, layer, memory), 1, request.statistic).squeeze(1)
        own = own.mul_(request.alpha).add_(made, alpha=rest)
        _recur(own, leaves[cell.recurrent], rest)
        g.append(own)
    # what reaches the states of a layer from above
    last = torch.mul(out, out).sum(0).mul_(rest)
    above = last.new_zeros(chain.steps, len(last))
    (above if chain.every else above[-1]).copy_(last)
    psi: list[Tensor] = []
    for cell in reversed(chain.cells):
        _recur_back(above, leaves[cell.recurrent], rest)
        psi.insert(0, above)
        above = torch.mm(above, squares[cell.weight]).mul_(rest) if len(psi) < len(chain.cells) else above
    path: dict[str, Tensor | Outer] = {}
    for layer, cell in enumerate(chain.cells):
        own = psi[layer] * rest
        total = own.sum(0)
        if layer:
            path[cell.weight] = own.t() @ g[layer - 1]
        else:
            path[cell.weight] = Outer(total, total.new_ones(1).expand(seen.x.shape[2]))
        path[cell.recurrent] = own[1:].t() @ g[layer][:-1]
        path.update(dict.fromkeys(cell.biases, total))
    read = g[-1] if chain.every else g[-1][-1:]
    path[readout.weight] = Outer(last.new_full((len(out),), rest), read.sum(0))
    if readout.bias is not None:
        path[readout.bias] = last.new_full((len(out),), rest * len(read))
    return path, psi


def _recur(rows: Tensor, W: Tensor, factor: float) -> None:
    """Rows_t += factor W^2 rows_{t-1}, one after the other, in place; ``rows [T, H]``."""
    square = W * W
    for before, row in itertools.pairwise(rows.unbind(0)):
        row.addmv_(square, before, alpha=factor)


def _recur_back(rows: Tensor, W: Tensor, factor: float) -> None:
    """Rows_t += factor (W^2)^T rows_{t+1}, from the last one on, in place."""
    square = (W * W).t()
    for after, row in itertools.pairwise(rows.unbind(0)[::-1]):
        row.addmv_(square, after, alpha=factor)


def _seeds(
    seen: RecurrentPass,
    psi: list[Tensor],
    request: Request,
    generator: torch.Generator,
    memory: Memory,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Seeds of all layers and of the readout, ``[m, T, units]``, None for zero; and the numbers of their examples."""
    chain = seen.chain
    outputs, steps = len(seen.leaves[chain.readout.weight]), chain.steps if chain.every else 1
    end = seen.states[-1].new_ones(steps * outputs)
    hidden = [p.shape[1] for p in psi]
    flat = torch.cat([*(p.reshape(-1) for p in psi), end])
    # nodes without any weight have no signs drawn; at the far end of long sequences it may be below all numbers
    some = [row.any(1) for row in psi]
    whole = not psi or bool(torch.stack([own.all() for own in some]).all())
    places = None
    if not whole:
        used = [own.repeat_interleave(n) for own, n in zip(some, hidden, strict=True)]
        places = torch.cat([*used, torch.ones_like(end, dtype=torch.bool)]).nonzero().squeeze(1)
    seeds, chosen = seeds_of_rows(
        flat if places is None else flat[places], seen.count, request, generator, memory
    )
    if places is not None:
        spread = seeds.new_zeros(len(seeds), len(flat))
        seeds = spread.index_copy_(1, places, seeds)
    own = seeds.split([*(p.numel() for p in psi), len(end)], 1)
    layers = [s.view(len(s), chain.steps, n) for s, n in zip(own, hidden, strict=False)]
    return [*(layers or [None] * len(chain.cells)), own[-1].view(len(seeds), steps, outputs)], chosen


def _examples(h: Tensor, chosen: Tensor | None, memory: Memory, name: str) -> Tensor:
    """Some examples of a sequence ``[T, n, units]``, or all."""
    if chosen is None:
        return h
    few = h[:, :1].expand(-1, len(chosen), -1)
    return torch.index_select(h, 1, chosen, out=memory_for(few, memory, name))


def _pulled_back(
    seen: RecurrentPass, seeds: list[Tensor | None], states: list[Tensor], memory: Memory
) -> list[Tensor]:
    """Deltas of all layers and of the readout, ``[T, m, units]``."""
    chain, leaves = seen.chain, seen.leaves
    end = seeds[-1]
    assert end is not None
    deltas = [end.transpose(0, 1).contiguous()]
    weight, only_last = leaves[chain.readout.weight], not chain.every
    for cell, own, h in zip(chain.cells[::-1], seeds[-2::-1], states[::-1], strict=True):
        above = torch.matmul(deltas[0], weight)
        made = memory_for(h, memory, f"deltas, {cell.weight}")
        deltas.insert(0, _pulled_through(leaves[cell.recurrent], own, h, above, only_last, made))
        weight, only_last = leaves[cell.weight], False
    return deltas


def _pulled_through(
    recurrent: Tensor, seeds: Tensor | None, h: Tensor, above: Tensor, only_last: bool, made: Tensor
) -> Tensor:
    """Delta_t = s_t + 1[h_t > 0] o (W_rec^T delta_{t+1} + above_t), ``[T, m, H]``."""
    rows, gates = made.unbind(0), (h > 0).to(h.dtype).unbind(0)
    own = None if seeds is None else seeds.unbind(1)
    entering = above.unbind(0)
    back = entering[-1]
    for t in range(len(rows) - 1, -1, -1):
        if t < len(rows) - 1:
            back = (
                torch.mm(rows[t + 1], recurrent)
                if only_last
                else torch.addmm(entering[t], rows[t + 1], recurrent)
            )
        if own is None:
            torch.mul(back, gates[t], out=rows[t])
        else:
            torch.addcmul(own[t], back, gates[t], out=rows[t])
    return made


def _data(
    seen: RecurrentPass, deltas: list[Tensor], entering: list[Tensor], request: Request, memory: Memory
) -> dict[str, Tensor]:
    """The data term of all parameters."""
    chain, leaves = seen.chain, seen.leaves
    data: dict[str, Tensor] = {}

    def add(name: str, delta: Tensor, h: Tensor) -> None:
        out = memory_for(leaves[name], memory, f"{name}, data")
        data[name] = _of_matrix(delta, h, request, out)

    for cell, delta, below, h in zip(chain.cells, deltas, entering, entering[1:], strict=False):
        add(cell.weight, delta, below)
        add(cell.recurrent, delta[1:], h[:-1])
        for name in cell.biases:
            data[name] = _of_bias(delta, request)
    readout, delta = chain.readout, deltas[-1]
    add(readout.weight, delta, entering[-1] if chain.every else entering[-1][-1:])
    if readout.bias is not None:
        data[readout.bias] = _of_bias(delta, request)
    return data


def _of_matrix(delta: Tensor, h: Tensor, request: Request, out: Tensor) -> Tensor:
    """Of W from delta ``[T, m, out]`` and what it is multiplied with, ``[T, m, in]``."""
    pairs = request.statistic == "covariance"
    if not len(delta):
        return out.zero_()
    if request.sharing == "edges" or len(delta) == 1:  # a matrix of its own at every step
        if not pairs:
            return torch.mm(delta.square().flatten(0, 1).t(), h.square().flatten(0, 1), out=out)
        (s, t), (u, v) = _halves(delta), _halves(h)
        return of_pairs(u, v, s, t, 1.0, out)
    # J of a few examples at a time: they stay in the cache
    left, right = delta.permute(1, 2, 0), h.transpose(0, 1)
    count, made = len(left) // (2 if pairs else 1), None
    size = max(1, CHUNK // out.numel())
    for first in range(0, count, size):
        end = min(first + size, count)
        J = torch.bmm(left[first:end], right[first:end])
        if pairs:
            J.baddbmm_(left[count + first : count + end], right[count + first : count + end], alpha=-1)
        square = J.mul_(J)
        if made is None:
            made = torch.sum(square, 0, out=out)
        else:
            made += square.sum(0)
    return out.zero_() if made is None else made


def _of_bias(delta: Tensor, request: Request) -> Tensor:
    """Of a bias from delta ``[T, m, out]``."""
    J = delta if request.sharing == "edges" else delta.sum(0, keepdim=True)
    if request.statistic == "covariance":
        J = J.chunk(2, 1)
        J = J[0] - J[1]
    return J.square().sum((0, 1))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twice the half sums and half differences of the pairs of rows k and m/2 + k, at all steps."""
    a, b = x.chunk(2, 1)
    return (a + b).flatten(0, 1), (a - b).flatten(0, 1)
