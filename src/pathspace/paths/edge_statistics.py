"""Second moments and variances, over examples, of what the edges of a parameter pass on.

    J_p^i  = sum over the edges e = (u -> v) of p of h_u^i delta_v^i       delta_v^i = d(seeded values)/dz_v^i
    "parameters": stat_i[J_p^i];      "edges": sum over e of stat_i[h_u^i delta_v^i]

For a matrix that is used once on every example, stat is a product of two matrices, (1/n) (delta o delta)^T (h o h); for
others the J of single examples are formed, a chunk of them at a time.

Letters: n examples, h ``[n, P, in]`` and delta ``[n, P, out]`` at P positions or times, p parameter, J of all examples
``[n, *p.shape]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.observed import Use
from pathspace.network.replay import Replay
from pathspace.paths.node_measure import Statistic

Sharing = Literal["parameters", "edges"]

_CHUNK = 2**22  # elements of J at a time
_BILINEAR = frozenset(
    ["linear", "matmul", "mm", "mv", "__matmul__", "__rmatmul__", "addmm", "addmv", "embedding", "batch_norm"]
    + [
        "add",
        "add_",
        "__add__",
        "__radd__",
        "__iadd__",
        "mul",
        "mul_",
        "multiply",
        "__mul__",
        "__rmul__",
        "__imul__",
    ]
    + [f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)]
)  # linear in the data and in the parameters, so that squares of edges are the operation on squares


_CONVOLUTION = (
    None,
    None,
    None,
    1,
    0,
    1,
    1,
)  # defaults: input, weight, bias, stride, padding, dilation, groups


@dataclass(frozen=True)
class Seeded:
    """The uses of parameters with the gradients delta of one seeding of the nodes."""

    found: Replay
    deltas: list[Tensor | None]  # of each use's result

    @staticmethod
    def of(found: Replay, seeds: dict[tuple[int, ...], Tensor]) -> Seeded:
        """Pull seeds at the nodes back to the results of all uses."""
        edges: dict[GradientEdge, int] = {}
        for use in found.uses:
            for edge in use.edges:
                edges.setdefault(edge, len(edges))
        keys = list(seeds)
        gradients = torch.autograd.grad(
            [found.nodes[key].edge for key in keys],  # type: ignore[arg-type]
            list(edges),  # type: ignore[arg-type]
            [seeds[key] for key in keys],
            retain_graph=True,
            allow_unused=True,
        )
        deltas: list[Tensor | None] = []
        for use in found.uses:
            parts = [gradients[edges[edge]] for edge in use.edges]
            present = next((g for g in parts if g is not None), None)
            if present is None:
                deltas.append(None)
            elif len(parts) == 1:
                deltas.append(present.reshape(use.shape))
            else:
                zero = torch.zeros_like(present)
                deltas.append(torch.stack([zero if g is None else g for g in parts]).reshape(use.shape))
        return Seeded(found, deltas)


def statistics(
    seeded: Seeded, statistic: Statistic, sharing: Sharing, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Stat of every parameter's J, or the sum of stat over its edges.

    Args:
        seeded: uses of parameters, and the gradients at their results.
        statistic: mean square or variance over the examples.
        sharing: whether the edges of a parameter are added before or after the statistic.
        names: the parameters to return; all if None.

    Returns:
        Parameter name -> tensor of its shape.

    Raises:
        UnmatchedForwardError: ``sharing="edges"`` for an operation whose edges cannot be told apart.
    """
    compute = _of_edges if sharing == "edges" else _of_parameter
    leaves = seeded.found.leaves
    with torch.no_grad():
        return {
            name: compute(seeded, leaves[name], statistic) for name in (leaves if names is None else names)
        }


def products(seeded: Seeded, name: str, other: str, statistic: Statistic) -> Tensor:
    """Mean product, or covariance, of J of a parameter ``[out, ...]`` and J of another one ``[out]``, row by row."""
    n = seeded.found.count
    leaf, bias = seeded.found.leaves[name], seeded.found.leaves[other]
    with torch.no_grad():
        uses, biases = list(_uses_of(seeded, leaf)), list(_uses_of(seeded, bias))
        if not uses or not biases:
            return torch.zeros_like(leaf)
        product, mean, bias_mean = torch.zeros_like(leaf), torch.zeros_like(leaf), torch.zeros_like(bias)
        rows = (-1,) + (1,) * (leaf.dim() - 1)
        chunk = max(1, _CHUNK // max(1, leaf.numel()))
        single = len(uses) == len(biases) == 1 and uses[0][1] is leaf and biases[0][1] is bias
        once = _used_once(*uses[0]) if single else None
        bias_once = _used_once(*biases[0]) if once is not None else None
        if once is not None and bias_once is not None and once[0] is not None:
            h, delta = once[0], once[1]
            product = ((delta * bias_once[1]).t() @ h).reshape(leaf.shape)
            mean, bias_mean = (delta.t() @ h).reshape(leaf.shape), bias_once[1].sum(0)
        else:
            for first in range(0, n, chunk):
                examples = slice(first, min(first + chunk, n))
                J, J0 = (
                    torch.stack([_example_gradients(u, w, d, p, examples) for u, w, d in found]).sum(0)
                    for found, p in ((uses, leaf), (biases, bias))
                )
                product += (J * J0.reshape(len(J0), *rows[:1], *rows[1:])).sum(0)
                mean += J.sum(0)
                bias_mean += J0.sum(0)
        if statistic == "second_moment":
            return product / n
        return product / n - (mean / n) * (bias_mean / n).reshape(rows)


def _uses_of(seeded: Seeded, leaf: Tensor) -> Iterator[tuple[Use, Tensor, Tensor]]:
    """The uses of a parameter, or of what is made of it: (use, the argument, delta)."""
    made_of: dict[int, bool] = {}
    for use, delta in zip(seeded.found.uses, seeded.deltas, strict=True):
        for weight in use.weights:
            if id(weight) not in made_of:
                made_of[id(weight)] = weight is leaf or _depends(weight, leaf)
            if delta is not None and made_of[id(weight)]:
                yield use, weight, delta


def _depends(made: Tensor, leaf: Tensor) -> bool:
    if made.is_leaf:
        return False
    return (
        torch.autograd.grad(made, leaf, torch.zeros_like(made), retain_graph=True, allow_unused=True)[0]
        is not None
    )


# -- edges added first --------------------------------------------------------------------------------------------


def _of_parameter(seeded: Seeded, leaf: Tensor, statistic: Statistic) -> Tensor:
    uses = list(_uses_of(seeded, leaf))
    n = seeded.found.count
    if not uses:
        return torch.zeros_like(leaf)
    if len(uses) == 1 and uses[0][1] is leaf:
        once = _used_once(*uses[0])
        if once is not None:
            return _from_product(*once, n, statistic).reshape(leaf.shape)
    square, mean = torch.zeros_like(leaf), torch.zeros_like(leaf)
    chunk = max(1, _CHUNK // max(1, leaf.numel()))
    for first in range(0, n, chunk):
        examples = slice(first, min(first + chunk, n))
        J = sum(_example_gradients(use, weight, delta, leaf, examples) for use, weight, delta in uses)
        assert isinstance(J, Tensor)
        square += J.square().sum(0)
        if statistic == "covariance":
            mean += J.sum(0)
    return _combined(square / n, mean / n, statistic)


def _combined(second: Tensor, mean: Tensor, statistic: Statistic) -> Tensor:
    # variance as the difference of moments: rounding may leave it just below zero
    return second if statistic == "second_moment" else (second - mean.square()).clamp_min_(0)


def _lead(tensor: Tensor, batch: int | None) -> Tensor:
    return tensor.unsqueeze(0) if batch is None else tensor.movedim(batch, 0)


def _sequences(use: Use, weight: Tensor, delta: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """H ``[n, P, in]`` (None for a bias) and delta ``[n, P, out]`` of a linear or convolutional layer."""
    if use.kwargs or not isinstance(use.args[0], Tensor):
        return None
    x, matrix = use.args[0], use.args[1]
    batch = use.batches.get(id(x))
    if batch != use.batch or not isinstance(matrix, Tensor):
        return None
    is_matrix = weight is matrix
    if use.name == "linear" and matrix.dim() == 2:
        d = _lead(delta, use.batch)
        d = d.reshape(d.shape[0], -1, matrix.shape[0])
        if not is_matrix:
            return None, d
        h = _lead(x, batch)
        return h.reshape(h.shape[0], -1, matrix.shape[1]), d
    if use.name in ("conv1d", "conv2d", "conv3d") and batch == 0 and x.dim() == matrix.dim():
        d = delta.flatten(2).transpose(1, 2)
        if not is_matrix:
            return None, d
        h = _patches(use)
        return None if h is None else (h, d)
    return None


def _patches(use: Use) -> Tensor | None:
    """What every output of a convolution reads, ``[n, P, in * taps]``; None for what the unfolding does not know."""
    given: list[Any] = [*use.args, *_CONVOLUTION[len(use.args) :]]
    x, matrix, _, stride, padding, dilation, groups = given
    if groups != 1 or isinstance(padding, str) or matrix.dim() == 5:
        return None
    sizes = [(n, n) if isinstance(n, int) else tuple(n) for n in (padding, stride, dilation)]
    kernel = tuple(matrix.shape[2:])
    if matrix.dim() == 3:  # one dimension as two
        x, kernel = x.unsqueeze(2), (1, *kernel)
        sizes = [(first, n[-1]) for first, n in zip((0, 1, 1), sizes, strict=True)]
    return F.unfold(x, kernel, dilation=sizes[2], padding=sizes[0], stride=sizes[1]).transpose(1, 2)


def _used_once(use: Use, weight: Tensor, delta: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """H ``[n, in]`` and delta ``[n, out]`` where J is their outer product; None where it is not."""
    found = _sequences(use, weight, delta)
    if found is None:
        return None
    h, d = found
    if h is None:
        return None, d.sum(1)
    return (h[:, 0], d[:, 0]) if d.shape[1] == 1 else None


def _from_product(h: Tensor | None, delta: Tensor, n: int, statistic: Statistic) -> Tensor:
    """Stat of delta h^T: (1/n) (delta o delta)^T (h o h), less the squared mean."""
    if h is None:
        h = delta.new_ones(len(delta), 1)
    second = (delta.square().t() @ h.square()).div_(n)
    if statistic == "second_moment":
        return second
    return _combined(second, (delta.t() @ h).div_(n), statistic)


def _example_gradients(use: Use, weight: Tensor, delta: Tensor, leaf: Tensor, examples: slice) -> Tensor:
    """J of some examples, ``[m, *leaf.shape]``."""
    found = _sequences(use, weight, delta)
    if found is not None:
        h, d = found[0], found[1][examples]
        J = d.sum(1) if h is None else torch.bmm(d.transpose(1, 2), h[examples]).reshape(-1, *weight.shape)
    elif use.name == "batch_norm" and weight.dim() == 1 and use.batch == 0:
        J = delta[examples] if weight is not use.args[1] else delta[examples] * use.args[0][examples]
        J = J.flatten(2).sum(2) if J.dim() > 2 else J
    else:
        J = _by_operation(use, weight, delta, examples)
    if weight is leaf:
        return J
    return torch.autograd.grad(
        weight, leaf, J.reshape(-1, *weight.shape), retain_graph=True, is_grads_batched=True
    )[0]


def _by_operation(use: Use, weight: Tensor, delta: Tensor, examples: slice) -> Tensor:
    """J of any operation: its own gradient, one example at a time, all at once."""
    leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
    data = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and id(x) in use.batches]
    batches = [use.batches[id(leaves[i])] for i in data]
    place = next(i for i, x in enumerate(leaves) if x is weight)

    def one(d: Tensor, *values: Tensor) -> Tensor:
        def operation(w: Tensor) -> Tensor:
            given = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
            for i, value, batch in zip(data, values, batches, strict=True):
                given[i] = value.unsqueeze(batch)
            given[place] = w
            args, kwargs = pytree.tree_unflatten(given, spec)
            return use.function(*args, **kwargs)

        return torch.func.vjp(operation, weight.detach())[1](
            d if use.batch is None else d.unsqueeze(use.batch)
        )[0]

    chosen = [_lead(leaves[i], b)[examples] for i, b in zip(data, batches, strict=True)]
    if use.batch is None:
        return one(delta).unsqueeze(0)
    return torch.func.vmap(one)(_lead(delta, use.batch)[examples], *chosen)


# -- every edge by itself -----------------------------------------------------------------------------------------


def _of_edges(seeded: Seeded, leaf: Tensor, statistic: Statistic) -> Tensor:
    result = torch.zeros_like(leaf)
    n = seeded.found.count
    for use, weight, delta in _uses_of(seeded, leaf):
        found = _sequences(use, weight, delta)
        if found is not None:
            value = _edges_of_layer(*found, n, statistic).reshape(weight.shape)
        elif statistic == "second_moment" and use.name in _BILINEAR:
            value = _squared_operation(use, weight, delta) / n
        else:
            raise UnmatchedForwardError(
                f"sharing='edges' with statistic={statistic!r} is not known for '{use.name}'; use sharing='parameters'"
            )
        if weight is not leaf:
            if id(weight) not in seeded.found.views:
                raise UnmatchedForwardError(
                    f"sharing='edges' needs parameters as they are, or rearranged; '{use.name}' takes one that was "
                    "computed with; use sharing='parameters'"
                )
            value = torch.autograd.grad(weight, leaf, value, retain_graph=True)[0]
        result += value
    return result


def _edges_of_layer(h: Tensor | None, delta: Tensor, n: int, statistic: Statistic) -> Tensor:
    """Sum over positions of stat of delta h^T."""
    if h is None:
        h = delta.new_ones(*delta.shape[:2], 1)
    second = torch.einsum("npo,npi->oi", delta.square(), h.square()).div_(n)
    if statistic == "second_moment":
        return second
    means = torch.einsum("npo,npi->poi", delta, h).div_(n)
    return (second - means.square().sum(0)).clamp_min_(0)


def _squared_operation(use: Use, weight: Tensor, delta: Tensor) -> Tensor:
    """Sum over examples and edges of (h delta)^2: the gradient of the operation on squares."""

    def squared(x: object) -> object:
        return x.detach().square() if isinstance(x, Tensor) and x.is_floating_point() else x

    leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
    place = next(i for i, x in enumerate(leaves) if x is weight)
    given = [squared(x) for x in leaves]

    def operation(w: Tensor) -> Tensor:
        args, kwargs = pytree.tree_unflatten([*given[:place], w, *given[place + 1 :]], spec)
        return use.function(*args, **kwargs)

    return torch.func.vjp(operation, weight.detach())[1](delta.square())[0]
