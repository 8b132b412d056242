"""Second moments and variances, over examples, of what the edges of a parameter pass on.

    J_p^i  = sum over the edges e = (u -> v) of p of h_u^i delta_v^i       delta_v^i = d(seeded values)/dz_v^i
    "parameters": stat_i[J_p^i];      "edges": sum over e of stat_i[h_u^i delta_v^i]

A variance is the second moment less the squared mean or, where examples were seeded in pairs (see
``signs``), the mean of (J^i - J^j)^2 / 2 over the pairs. For a matrix that is used once on every
example no J is formed: with the half sums s, u and half differences t, v of delta and h in a pair,

    mean square: (1/n) (delta o delta)^T (h o h)
    pairs:       (J^i - J^j)^2 = 4 (s v + t u)^2 = 4 (s^2 v^2 + t^2 u^2 + 2 (s t) (u v))

For others the J of single examples are formed, a chunk of them at a time.

Letters: n examples, h ``[n, P, in]`` and delta ``[n, P, out]`` at P positions or times, p
parameter, J of all examples ``[n, *p.shape]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.trace.functions import tensors_in
from pathspace.paths.data.example_gradients import (
    CONVOLUTIONS,
    Examples,
    UseOf,
    on_batch,
    sequences,
    summed_gradients,
)
from pathspace.paths.data.node_measure import Statistic
from pathspace.paths.data.signs import Pairs
from pathspace.replay.arguments import mapped
from pathspace.replay.observed import Use
from pathspace.replay.replay import Replay
from pathspace.replay.special import NORMALIZATIONS

Sharing = Literal["parameters", "edges"]

_ROUNDING = 32  # in units of the last place: of a mean square, less the squared mean

CHUNK = 2**19  # elements at a time, of J and of what it is made from: they stay in the cache

# linear in the data and in the parameters, so that squares of edges are the operation on squares
_BILINEAR = frozenset(
    ["linear", "matmul", "mm", "mv", "__rmatmul__", "addmm", "addmv", "embedding"]
    + [*NORMALIZATIONS]
    + [*("add", "add_", "__setitem__", "copy_")]
    + ["mul", "mul_"]
    + [f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)]
)


@dataclass(frozen=True)
class Seeded:
    """The uses of parameters with the gradients delta of one seeding of the nodes."""

    replayed: Replay
    deltas: list[Tensor | None]  # of each use's result
    # examples with the same seeds, if a variance is taken from pairs
    pairs: Pairs | None = None
    # numbers of the examples over which a mean square is taken; None for all
    part: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of examples over which a mean square is taken."""
        return self.replayed.count if self.part is None else len(self.part)

    def rows(self, x: Tensor) -> Tensor:
        """Return the selected examples of a tensor whose first dimension holds examples."""
        return x if self.part is None else x.index_select(0, self.part)

    @staticmethod
    def of(
        replayed: Replay,
        seeds: Mapping[tuple[int, ...], Tensor],
        pairs: Pairs | None = None,
        part: Tensor | None = None,
    ) -> Seeded:
        """Pull seeds at the nodes back to the results of all uses."""
        edges: dict[GradientEdge, int] = {}
        for use in replayed.uses:
            for edge in use.edges:
                edges.setdefault(edge, len(edges))
        keys = list(seeds)
        gradients = torch.autograd.grad(
            [replayed.nodes[key].edge for key in keys],  # type: ignore[arg-type]
            list(edges),  # type: ignore[arg-type]
            [seeds[key] for key in keys],
            retain_graph=True,
            allow_unused=True,
        )
        deltas = []
        for use in replayed.uses:
            parts = [gradients[edges[edge]] for edge in use.edges]
            deltas.append(_delta(use, parts))
        return Seeded(replayed, deltas, pairs, part)


def _delta(use: Use, parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the gradient at the result of a use, of which a loop has a part for each step; None for zero."""
    present = next((g for g in parts if g is not None), None)
    if present is None or len(present.shape) == len(use.shape):
        return present
    zero = torch.zeros_like(present)
    return torch.stack([zero if g is None else g for g in parts], 1)


def statistics(
    seeded: Seeded, statistic: Statistic, sharing: Sharing, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Compute stat of every parameter's J, or the sum of stat over its edges.

    Args:
        seeded: uses of parameters, and the gradients at their results.
        statistic: mean square or variance over the examples.
        sharing: whether the edges of a parameter are added before or after the statistic.
        names: the parameters to return; all if None.

    Returns:
        Parameter name -> tensor of its shape. Rounding may leave a variance just below zero.

    Raises:
        UnmatchedForwardError: ``sharing="edges"`` for an operation whose edges cannot be told
            apart.
    """
    leaves = seeded.replayed.leaves
    names = list(leaves) if names is None else names
    with torch.no_grad():
        uses = _uses(seeded, names)
        if sharing == "edges":
            return {name: _of_edges(seeded, leaves[name], uses[name], statistic) for name in names}
        return {name: _of_parameter(seeded, leaves[name], uses[name], statistic) for name in names}


def products(seeded: Seeded, name: str, other: str, statistic: Statistic) -> Tensor:
    """Compute the mean product, or the covariance, of J of a parameter and of a bias, by row.

    Args:
        seeded: uses of parameters, and the gradients at their results.
        name: the parameter, ``[out, ...]``.
        other: the bias, ``[out]``.
        statistic: mean product or covariance over the examples.

    Returns:
        A tensor of the shape of the parameter.
    """
    leaf = seeded.replayed.leaves[name]
    bias = seeded.replayed.leaves[other]
    with torch.no_grad():
        both = _uses(seeded, (name, other))
        uses = both[name]
        biases = both[other]
        if not uses or not biases:
            return torch.zeros_like(leaf)
        factors = _factors(seeded, leaf, bias, uses, biases)
        if factors is not None and seeded.pairs is not None:
            return _product_of_pairs(factors, seeded.pairs).reshape(leaf.shape)
        if factors is None:
            sums = _sums_by_example(seeded, leaf, bias, uses, biases)
        else:
            sums = _sums_of_factors(factors, leaf)
        if seeded.pairs is not None:
            return sums.product * seeded.pairs.weight
        n = seeded.count
        if statistic == "second_moment":
            return sums.product / n
        # E[J J_0] - E[J] E[J_0]
        mean_of_bias = (sums.bias / n).reshape(_by_row(leaf))
        return sums.product / n - (sums.weight / n) * mean_of_bias


class _Sums(NamedTuple):
    """Sums over examples, or pairs of them: of J J_0 and J, of the shape of the weight, and of J_0 ``[out]``."""

    product: Tensor
    weight: Tensor
    bias: Tensor


def _by_row(leaf: Tensor) -> tuple[int, ...]:
    """Return the shape in which a number for each row broadcasts to a parameter."""
    return (-1,) + (1,) * (leaf.dim() - 1)


def _sums_of_factors(factors: Factors, leaf: Tensor) -> _Sums:
    """Return the sums where J = delta h^T of every example; no J is formed."""
    h, delta, delta_0 = factors
    product = ((delta * delta_0).t() @ h).reshape(leaf.shape)
    weight = (delta.t() @ h).reshape(leaf.shape)
    return _Sums(product, weight, delta_0.sum(0))


def _sums_by_example(
    seeded: Seeded, leaf: Tensor, bias: Tensor, uses: list[UseOf], biases: list[UseOf]
) -> _Sums:
    """Return the sums from the J of every example or pair, a chunk of them at a time."""
    sums = _Sums(torch.zeros_like(leaf), torch.zeros_like(leaf), torch.zeros_like(bias))
    rows = _by_row(leaf)[1:]
    for examples in _chunks(seeded, leaf, uses):
        J = summed_gradients(uses, leaf, examples, seeded.pairs)
        J0 = summed_gradients(biases, bias, examples, seeded.pairs)
        sums.product.add_((J * J0.reshape(len(J0), -1, *rows)).sum(0))
        sums.weight.add_(J.sum(0))
        sums.bias.add_(J0.sum(0))
    return sums


Factors = tuple[Tensor, Tensor, Tensor]
"""h ``[n, in]``, delta ``[n, out]`` of a weight, and delta_0 ``[n, out]`` of a bias."""


def _factors(
    seeded: Seeded, leaf: Tensor, bias: Tensor, uses: Sequence[UseOf], biases: Sequence[UseOf]
) -> Factors | None:
    """Return the factors of J of a weight and of a bias, if both are outer products; None otherwise."""
    if not len(uses) == len(biases) == 1 or uses[0][1] is not leaf or biases[0][1] is not bias:
        return None
    once = _used_once(*uses[0])
    bias_once = _used_once(*biases[0])
    if once is None or bias_once is None:
        return None
    h, delta = once
    _, delta_0 = bias_once
    if h is None:
        return None
    return seeded.rows(h[:, 0]), seeded.rows(delta[:, 0]), seeded.rows(delta_0[:, 0])


def _product_of_pairs(factors: Factors, pairs: Pairs) -> Tensor:
    """Return the covariance of J of a weight and of a bias, from the differences of pairs of examples."""
    h, delta, delta_0 = factors
    i = pairs.first
    j = pairs.second
    difference = _halves(delta_0, pairs)[1]
    left = torch.cat(
        [delta.index_select(0, i) * difference, delta.index_select(0, j) * -difference]
    )
    product = left.t() @ h.index_select(0, torch.cat([i, j]))
    return product.mul_(pairs.weight)


def _uses(seeded: Seeded, names: Sequence[str]) -> dict[str, list[UseOf]]:
    """Return the uses of some parameters, or of the values made of them."""
    leaves = seeded.replayed.leaves
    name_of = {id(leaves[name]): name for name in names}
    result: dict[str, list[UseOf]] = {name: [] for name in names}
    makers: dict[int, list[str]] = {}
    for use, delta in zip(seeded.replayed.uses, seeded.deltas, strict=True):
        if delta is None:
            continue
        for weight in use.weights:
            if weight.is_leaf:
                name = name_of.get(id(weight))
                of = [] if name is None else [name]
            else:
                if id(weight) not in makers:
                    makers[id(weight)] = [name for name in names if _depends(weight, leaves[name])]
                of = makers[id(weight)]
            for name in of:
                result[name].append((use, weight, delta))
    return result


def _depends(tensor: Tensor, leaf: Tensor) -> bool:
    zeros = torch.zeros_like(tensor)
    return (
        torch.autograd.grad(tensor, leaf, zeros, retain_graph=True, allow_unused=True)[0]
        is not None
    )


# -- edges added first -----------------------------------------------------------------------------


def _of_parameter(seeded: Seeded, leaf: Tensor, uses: list[UseOf], statistic: Statistic) -> Tensor:
    n = seeded.count
    pairs = seeded.pairs
    if not uses:
        return torch.zeros_like(leaf)
    if len(uses) == 1 and uses[0][1] is leaf:
        once = _used_once(*uses[0])
        if once is not None:
            return _edges_of_layer(seeded, *once, statistic).reshape(leaf.shape)
    square = torch.zeros_like(leaf)
    mean = torch.zeros_like(leaf)
    for examples in _chunks(seeded, leaf, uses):
        J = summed_gradients(uses, leaf, examples, pairs)
        if statistic == "covariance" and pairs is None:
            mean += J.sum(0)
        square += J.square_().sum(0)
    if pairs is not None:
        return square.mul_(pairs.weight)
    square = square / n
    mean = mean / n
    return (
        square
        if statistic == "second_moment"
        else _without_rounding(square - mean.square(), square)
    )


def _without_rounding(variance: Tensor, second: Tensor) -> Tensor:
    """Replace a variance by zero where it is within rounding of the mean square: steps divide by it."""
    return torch.where(variance > _ROUNDING * torch.finfo(second.dtype).eps * second, variance, 0.0)


def _used_once(use: Use, weight: Tensor, delta: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """Return h ``[n, 1, in]`` and delta ``[n, 1, out]`` where J is their outer product; None where it is not."""
    if weight is use.args[1] and use.name != "linear" and delta.shape[3:].numel() > 1:
        return None  # a convolution: no need to look at what it reads
    layer = sequences(use, weight, delta)
    if layer is None:
        return None
    h, d = layer
    if h is None:
        return None, d.sum(1, keepdim=True)
    return layer if d.shape[1] == 1 else None


def _halves(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return twice the half sum and the half difference of pairs of rows."""
    a = x.index_select(0, pairs.first)
    b = x.index_select(0, pairs.second)
    return a + b, a.sub_(b)


def _of_pairs(u: Tensor | None, v: Tensor | None, s: Tensor, t: Tensor, weight: float) -> Tensor:
    """Compute the sum of (J^i - J^j)^2 over pairs, times a weight."""
    if u is None or v is None:
        return t.square().sum(0).mul_(weight)
    # with twice the halves, (J^i - J^j)^2 = (s v + t u)^2 / 4
    left = torch.cat([s * s, t * t, 2 * s * t])
    right = torch.cat([v * v, u * u, u * v])
    return (left.t() @ right).mul_(weight / 4)


def _chunks(seeded: Seeded, leaf: Tensor, uses: Sequence[UseOf]) -> Iterator[Examples]:
    """Yield examples, or numbers of pairs, one chunk at a time."""
    total = seeded.count if seeded.pairs is None else len(seeded.pairs.first)
    # what a convolution reads is written out, too
    read = [
        use.shape[3:].numel() * leaf[0].numel()
        for use, w, _ in uses
        if w is leaf and use.name in CONVOLUTIONS
    ]
    size = max(1, CHUNK // max(1, leaf.numel() + max(read, default=0)))
    for first in range(0, total, size):
        chunk = slice(first, min(first + size, total))
        yield chunk if seeded.part is None else seeded.part[chunk]


# -- every edge by itself --------------------------------------------------------------------------


def _of_edges(seeded: Seeded, leaf: Tensor, uses: list[UseOf], statistic: Statistic) -> Tensor:
    result = torch.zeros_like(leaf)
    for use, weight, delta in uses:
        layer = sequences(use, weight, delta)
        if layer is not None:
            value = _edges_of_layer(seeded, *layer, statistic).reshape(weight.shape)
        elif statistic == "second_moment" and use.name in _BILINEAR:
            value = _squared_operation(use, weight, _only(delta, seeded.part)) / seeded.count
        else:
            raise UnmatchedForwardError(
                f"sharing='edges' with statistic={statistic!r} is not known for '{use.name}'; use sharing='parameters'"
            )
        if weight is not leaf:
            if id(weight) not in seeded.replayed.views:
                raise UnmatchedForwardError(
                    f"sharing='edges' needs parameters as they are, or rearranged; '{use.name}' takes one that was "
                    "computed with; use sharing='parameters'"
                )
            value = torch.autograd.grad(weight, leaf, value, retain_graph=True)[0]
        result += value
    return result


def _edges_of_layer(
    seeded: Seeded, h: Tensor | None, delta: Tensor, statistic: Statistic
) -> Tensor:
    """Sum over positions of stat of delta h^T."""
    n = seeded.count
    pairs = seeded.pairs
    if pairs is not None:  # a pair at every position
        s, t = (x.flatten(0, 1) for x in _halves(delta, pairs))
        u, v = (None, None) if h is None else (x.flatten(0, 1) for x in _halves(h, pairs))
        return _of_pairs(u, v, s, t, pairs.weight)
    delta = seeded.rows(delta)
    h = None if h is None else seeded.rows(h)
    squares = delta.square().flatten(0, 1).t()
    second = squares.sum(1, keepdim=True) if h is None else squares @ h.square().flatten(0, 1)
    second.div_(n)
    if statistic == "second_moment":
        return second
    h = delta.new_ones(*delta.shape[:2], 1) if h is None else h
    means = torch.einsum("npo,npi->poi", delta, h).div_(n)
    return _without_rounding(second - means.square().sum(0), second)


def _only(delta: Tensor, part: Tensor | None) -> Tensor:
    """Return delta with zeros at all other examples."""
    if part is None:
        return delta
    result = torch.zeros_like(delta)
    return result.index_copy_(0, part, delta.index_select(0, part))


def _squared_operation(use: Use, weight: Tensor, delta: Tensor) -> Tensor:
    """Sum over examples and edges of (h delta)^2: the gradient of the operation on squares."""
    # add, addmm and index_add multiply by these
    factors = {name: use.kwargs[name] ** 2 for name in ("alpha", "beta") if name in use.kwargs}
    squares = {
        id(t): t.detach().square()
        for t in tensors_in(use.args, use.kwargs)
        if t.is_floating_point()
    }
    data = [squares.get(id(t), t) for t in use.data]
    args, kwargs = mapped(
        lambda t: t if t is weight or use.is_data(t) else squares.get(id(t), t),
        use.args,
        {**use.kwargs, **factors},
    )
    operation = on_batch(replace(use, args=args, kwargs=kwargs), weight, data)
    return torch.func.vjp(operation, weight.detach())[1](delta.square())[0]
