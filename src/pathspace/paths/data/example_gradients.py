"""Gradients of a parameter for single examples, J_p^i = sum over its edges (u -> v) of h_u^i delta_v^i.

Letters: i and j examples, n how many, P positions or times, p parameter, h ``[n, P, in]`` what a
row of its weights is multiplied with, delta ``[n, P, out]`` the gradient at the result of the use,
J of m examples ``[m, *p.shape]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.paths.data.signs import Pairs
from pathspace.replay.arguments import mapped
from pathspace.replay.observed import Use

Examples = slice | Tensor
"""Some of the examples: a range, or their numbers."""

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_ALL = slice(None)
# defaults: input, weight, bias, stride, padding, dilation, groups
_CONVOLUTION = (None, None, None, 1, 0, 1, 1)

# gain and bias for each channel
_CHANNEL_NORMS = frozenset(["batch_norm", "group_norm", "instance_norm"])

UseOf = tuple[Use, Tensor, Tensor]
"""A use of a parameter, which of its arguments the parameter is (or is made into), and delta at its result."""


def summed_gradients(
    uses: list[UseOf], leaf: Tensor, examples: Examples, pairs: Pairs | None
) -> Tensor:
    """Compute J of some examples, or J^i - J^j of some pairs, ``[m, *leaf.shape]``, in memory of its own."""
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
    """Compute J of some examples, ``[m, *weight.shape]``, in memory of its own."""
    layer = sequences(use, weight, delta, examples)
    if layer is not None:
        h, d = layer
        if h is None:
            return d.sum(1)
        return torch.bmm(d.transpose(1, 2), h).reshape(-1, *weight.shape)
    if use.name in _CHANNEL_NORMS and weight.dim() == 1:
        J = some(delta, examples)
        is_gain = weight is use.args[1]
        if is_gain:
            J = J * some(use.args[0], examples)
        if J.dim() < 3:
            return J.clone()
        # [m, channels, ...]
        return J.transpose(1, 2).flatten(2).sum(2)
    # it may be delta itself
    return _by_operation(use, weight, delta, examples).clone()


def of_argument(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], argument: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return an operation as a function of one of its arguments."""

    def operation(value: Tensor) -> Tensor:
        args_now, kwargs_now = mapped(
            lambda t: value if t is argument else t.detach(), args, kwargs
        )
        return function(*args_now, **kwargs_now)

    return operation


def on_batch(use: Use, argument: Tensor, data: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a use on all examples as a function of one of its arguments, with some values in place of its data."""
    every = torch.arange(use.shape[0])  # all arguments may be shared

    def operation(value: Tensor) -> Tensor:
        def one(_: Tensor, value: Tensor, *values: Tensor) -> Tensor:
            one_of = {id(t): v for t, v in zip(use.data, values, strict=True)} | {
                id(argument): value
            }
            args, kwargs = mapped(lambda t: one_of.get(id(t), t.detach()), use.args, use.kwargs)
            return use.function(*args, **kwargs)

        place = 0 if use.is_data(argument) else None
        return torch.func.vmap(one, in_dims=(0, place, *[0] * len(data)))(every, value, *data)

    return operation


def _by_operation(use: Use, weight: Tensor, delta: Tensor, examples: Examples) -> Tensor:
    """Compute J of any operation by its own gradient, for all examples at once."""

    def one(d: Tensor, *values: Tensor) -> Tensor:
        one_of = {id(t): value for t, value in zip(use.data, values, strict=True)}
        arguments = mapped(lambda t: one_of.get(id(t), t), use.args, use.kwargs)
        function = of_argument(use.function, *arguments, weight)
        backward = torch.func.vjp(function, weight.detach())[1]
        return backward(d)[0]

    chosen = [some(t, examples) for t in (delta, *use.data)]
    try:
        return torch.func.vmap(one)(*chosen)
    except RuntimeError:  # torch does not take some transposed convolutions of all examples at once
        return torch.stack([one(*values) for values in zip(*chosen, strict=True)])


def some(tensor: Tensor, examples: Examples) -> Tensor:
    """Return some examples of a tensor, along its first dimension; whole rows are copied faster than by [...]."""
    return tensor[examples] if isinstance(examples, slice) else tensor.index_select(0, examples)


def sequences(
    use: Use, weight: Tensor, delta: Tensor, examples: Examples = _ALL
) -> tuple[Tensor | None, Tensor] | None:
    """Return h (None for a bias) and delta of a linear or convolutional layer; None for any other operation."""
    if use.kwargs or not isinstance(use.args[0], Tensor):
        return None
    x = use.args[0]
    matrix = use.args[1]
    if any(x is w for w in use.weights) or not isinstance(matrix, Tensor):
        return None
    d = some(delta, examples)
    h = some(x, examples) if use.is_data(x) else x.expand(len(d), *x.shape)
    if use.name == "linear" and matrix.dim() == 2:
        return _of_linear(weight, matrix, h, d)
    if use.name in CONVOLUTIONS and h.dim() == matrix.dim() + 1:
        return _of_convolution(use, weight, matrix, h, d)
    return None


def _of_linear(
    weight: Tensor, matrix: Tensor, h: Tensor, d: Tensor
) -> tuple[Tensor | None, Tensor] | None:
    d = d.reshape(len(d), d.shape[1:-1].numel(), matrix.shape[0])
    if weight is matrix:
        return h.reshape(len(h), h.shape[1:-1].numel(), matrix.shape[1]), d
    # one number may be the bias of all units
    return (None, d) if weight.shape == matrix.shape[:1] else None


def _of_convolution(
    use: Use, weight: Tensor, matrix: Tensor, h: Tensor, d: Tensor
) -> tuple[Tensor | None, Tensor] | None:
    # [n, frames, channels, ...], where all but a few have one frame
    d = d.flatten(3).transpose(2, 3).flatten(1, 2)
    if weight is not matrix:
        return None, d
    patches = _patches(use, h.flatten(0, 1))
    return None if patches is None else (patches.reshape(len(h), -1, patches.shape[2]), d)


def _patches(use: Use, x: Tensor) -> Tensor | None:
    """Return the elements that each output of a convolution reads, ``[n, P, in * taps]``; None for unknown forms."""
    _, matrix, _, stride, padding, dilation, groups = [*use.args, *_CONVOLUTION[len(use.args) :]]
    space = matrix.dim() - 2
    if groups != 1 or isinstance(padding, str):
        return None
    steps = _per_dim(stride, space)
    gaps = _per_dim(dilation, space)
    borders: list[int] = []
    # torch's pad begins with the last dimension
    for border in reversed(_per_dim(padding, space)):
        borders += [border, border]
    padded = F.pad(x, borders).contiguous()
    taps = tuple(matrix.shape[2:])
    places = []
    strides_of_taps = []
    strides_of_places = []
    for dim in range(space):
        reach = gaps[dim] * (taps[dim] - 1) + 1
        places.append((padded.shape[2 + dim] - reach) // steps[dim] + 1)
        stride_in_memory = padded.stride(2 + dim)
        strides_of_taps.append(stride_in_memory * gaps[dim])
        strides_of_places.append(stride_in_memory * steps[dim])
    # element (i, channel, tap, place) is that at tap * dilation + place * stride
    windows = padded.as_strided(
        (*padded.shape[:2], *taps, *places),
        (*padded.stride()[:2], *strides_of_taps, *strides_of_places),
    )
    columns = padded.shape[1] * math.prod(taps)
    return windows.reshape(len(padded), columns, math.prod(places)).transpose(1, 2)


def _per_dim(given: int | Sequence[int], space: int) -> tuple[int, ...]:
    """Return a number for each dimension of space."""
    if isinstance(given, int):
        return (given,) * space
    return tuple(given) * (space // len(given))
