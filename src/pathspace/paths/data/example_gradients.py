"""Gradients of a parameter for single examples, J_p^i = sum over its edges (u -> v) of h_u^i delta_v^i.

Letters: i and j examples, n how many, P positions or times, p parameter, h ``[n, P, in]`` what a row of its weights is
multiplied with, delta ``[n, P, out]`` the gradient at the result of the use, J of m examples ``[m, *p.shape]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.trace.functions import tensors_in
from pathspace.paths.data.signs import Pairs
from pathspace.replay.arguments import mapped
from pathspace.replay.observed import Use

Examples = slice | Tensor
"""Some of the examples: a range, or their numbers."""

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_ALL = slice(None)
# defaults: input, weight, bias, stride, padding, dilation, groups
_CONVOLUTION = (None, None, None, 1, 0, 1, 1)

_CHANNEL_NORMS = frozenset(["batch_norm", "group_norm", "instance_norm"])  # gain and bias for each channel

UseOf = tuple[Use, Tensor, Tensor]
"""A use of a parameter, which of its arguments the parameter is (or is made into), and delta at its result."""


def summed_gradients(uses: list[UseOf], leaf: Tensor, examples: Examples, pairs: Pairs | None) -> Tensor:
    """J of some examples, or J^i - J^j of some pairs, ``[m, *leaf.shape]``; memory of its own."""
    parts = [_gradients(use, weight, delta, leaf, examples, pairs) for use, weight, delta in uses]
    return sum(parts[1:], parts[0])


def _gradients(
    use: Use, weight: Tensor, delta: Tensor, leaf: Tensor, examples: Examples, pairs: Pairs | None
) -> Tensor:
    J = _of_examples(use, weight, delta, examples if pairs is None else pairs.first[examples])
    if pairs is not None:
        J -= _of_examples(use, weight, delta, pairs.second[examples])
    if weight is leaf:
        return J
    return torch.autograd.grad(
        weight, leaf, J.reshape(-1, *weight.shape), retain_graph=True, is_grads_batched=True
    )[0]


def _of_examples(use: Use, weight: Tensor, delta: Tensor, examples: Examples) -> Tensor:
    """J of some examples, ``[m, *weight.shape]``, in memory of its own."""
    layer = sequences(use, weight, delta, examples)
    if layer is not None:
        h, d = layer
        return d.sum(1) if h is None else torch.bmm(d.transpose(1, 2), h).reshape(-1, *weight.shape)
    if use.name in _CHANNEL_NORMS and weight.dim() == 1 and use.batch == 0:
        J = some(delta, examples)
        if weight is use.args[1]:
            J = J * some(use.args[0], examples)
        return J.flatten(2).sum(2) if J.dim() > 2 else J.clone()
    if _has_rows(use):
        return _by_masks(use, weight, delta, examples)
    return _by_operation(use, weight, delta, examples).clone()  # it may be delta itself


def _has_rows(use: Use) -> bool:
    """Whether an argument repeats its parameter for every example, as ``p.expand(len(x), -1)`` does.

    It may only look so, where a dimension is as long as the batch: that costs time, except for convolutions memory.
    """
    place = use.batch
    if place is None or use.name.startswith("conv"):
        return False
    dims = len(use.shape) - (use.name == "stack")
    return any(w.dim() == dims and w.shape[place] == use.shape[place] > 1 for w in use.weights)


def of_argument(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], argument: Tensor
) -> Callable[[Tensor], Tensor]:
    """An operation as a function of one of its arguments."""

    def operation(value: Tensor) -> Tensor:
        args_now, kwargs_now = mapped(lambda t: value if t is argument else t.detach(), args, kwargs)
        return function(*args_now, **kwargs_now)

    return operation


def _by_masks(use: Use, weight: Tensor, delta: Tensor, examples: Examples) -> Tensor:
    """J of any operation that cannot be done on one example alone: its gradient with the others' delta erased."""
    batch = use.batch
    assert batch is not None
    operation = of_argument(use.function, use.args, use.kwargs, weight)
    back = torch.func.vjp(operation, weight.detach())[1]
    mask = torch.eye(delta.shape[batch], dtype=delta.dtype, device=delta.device)
    shape = [-1 if i == batch else 1 for i in range(delta.dim())]
    return torch.func.vmap(lambda one: back(delta * one.view(shape))[0])(some(mask, examples))


def _by_operation(use: Use, weight: Tensor, delta: Tensor, examples: Examples) -> Tensor:
    """J of any operation: its own gradient, one example at a time, all at once."""
    data = [t for t in tensors_in(use.args, use.kwargs) if id(t) in use.batches]
    batches = [use.batches[id(t)] for t in data]

    def one(d: Tensor, *values: Tensor) -> Tensor:
        ones = zip(data, values, batches, strict=True)
        one_of = {id(t): value.unsqueeze(batch) for t, value, batch in ones}
        arguments = mapped(lambda t: one_of.get(id(t), t), use.args, use.kwargs)
        back = torch.func.vjp(of_argument(use.function, *arguments, weight), weight.detach())[1]
        return back(d if use.batch is None else d.unsqueeze(use.batch))[0]

    if use.batch is None:
        return one(delta).unsqueeze(0)
    chosen = [some(lead(t, b), examples) for t, b in zip(data, batches, strict=True)]
    return torch.func.vmap(one)(some(lead(delta, use.batch), examples), *chosen)


def lead(tensor: Tensor, batch: int | None) -> Tensor:
    """The tensor with its examples in the first dimension."""
    if batch == 0:
        return tensor
    return tensor.unsqueeze(0) if batch is None else tensor.movedim(batch, 0)


def some(tensor: Tensor, examples: Examples) -> Tensor:
    """Some examples of a tensor that has them in the first dimension; whole rows are copied faster than by [...]."""
    return tensor[examples] if isinstance(examples, slice) else tensor.index_select(0, examples)


def sequences(
    use: Use, weight: Tensor, delta: Tensor, examples: Examples = _ALL
) -> tuple[Tensor | None, Tensor] | None:
    """H (None for a bias) and delta of a linear or convolutional layer; None for any other operation."""
    if use.kwargs or not isinstance(use.args[0], Tensor):
        return None
    x, matrix = use.args[0], use.args[1]
    batch = use.batches.get(id(x))
    if batch != use.batch or not isinstance(matrix, Tensor):
        return None
    is_matrix = weight is matrix
    if use.name == "linear" and matrix.dim() == 2:
        d = some(lead(delta, use.batch), examples)
        d = d.reshape(d.shape[0], d.shape[1:-1].numel(), matrix.shape[0])
        if not is_matrix:  # one number may be the bias of all units
            return (None, d) if weight.shape == matrix.shape[:1] else None
        h = some(lead(x, batch), examples)
        return h.reshape(h.shape[0], h.shape[1:-1].numel(), matrix.shape[1]), d
    if use.name in CONVOLUTIONS and batch == 0 and x.dim() == matrix.dim():
        d = some(delta, examples).flatten(2).transpose(1, 2)
        if not is_matrix:
            return None, d
        h = _patches(use, some(x, examples))
        return None if h is None else (h, d)
    return None


def _patches(use: Use, x: Tensor) -> Tensor | None:
    """What every output of a convolution of x reads, ``[n, P, in * taps]``; None for what is not known here."""
    _, matrix, _, stride, padding, dilation, groups = [*use.args, *_CONVOLUTION[len(use.args) :]]
    space = matrix.dim() - 2
    if groups != 1 or isinstance(padding, str):
        return None
    steps, gaps, borders = (
        (n,) * space if isinstance(n, int) else tuple(n) * (space // len(n))
        for n in (stride, dilation, padding)
    )
    padded = F.pad(x, [n for border in reversed(borders) for n in (border, border)]).contiguous()
    taps, strides = tuple(matrix.shape[2:]), padded.stride()
    places = tuple(
        (size - gap * (tap - 1) - 1) // step + 1
        for size, gap, tap, step in zip(padded.shape[2:], gaps, taps, steps, strict=True)
    )
    # element (i, channel, tap, place) is that at tap * dilation + place * stride
    windows = padded.as_strided(
        (*padded.shape[:2], *taps, *places),
        (
            *strides[:2],
            *(n * gap for n, gap in zip(strides[2:], gaps, strict=True)),
            *(n * step for n, step in zip(strides[2:], steps, strict=True)),
        ),
    )
    columns = padded.shape[1] * torch.Size(taps).numel()
    return windows.reshape(len(padded), columns, torch.Size(places).numel()).transpose(1, 2)
