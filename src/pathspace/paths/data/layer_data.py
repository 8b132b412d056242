"""What enters and what leaves the units of a layer, example by example, in the form of a linear map.

Letters: n examples, P positions or times, h ``[n, P, in]`` what a row of weights is multiplied with, delta
``[n, P, out]`` the gradient at the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.replay.observed import Use

Examples = slice | Tensor
"""Some of the examples: a range, or their numbers."""

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

_ALL = slice(None)
# defaults: input, weight, bias, stride, padding, dilation, groups
_CONVOLUTION = (None, None, None, 1, 0, 1, 1)


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
        d = d.reshape(d.shape[0], -1, matrix.shape[0])
        if not is_matrix:
            return None, d
        h = some(lead(x, batch), examples)
        return h.reshape(h.shape[0], -1, matrix.shape[1]), d
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
