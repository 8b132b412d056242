"""ATen operations, which exported programs call, as the functions that tracing has rules for.

Most ATen operations have the name and the arguments of a function that is traced: ``aten.linear``,
``aten.relu``, ``aten.view``. Here are those that do not, each written as such a function. A trace
and the passes on data run these.

Letters: N examples, C channels, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._ops import OpOverloadPacket

from pathspace.network.errors import NoRule

_BAG_MODES = ("sum", "mean", "max")


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Return ``aten.batch_norm``, whose parameters come before the statistics."""
    del cudnn_enabled
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Return ``aten.instance_norm``, whose parameters come before the statistics."""
    del cudnn_enabled
    return F.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Tensor:
    """Return ``aten.layer_norm``."""
    del cudnn_enable
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Return ``aten.group_norm``."""
    del cudnn_enabled
    return F.group_norm(input, num_groups, weight, bias, eps)


def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``aten._native_batch_norm_legit_no_training``: the result, and two statistics that are not used."""
    result = F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return result, torch.zeros(0), torch.zeros(0)


def native_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``aten.native_layer_norm``: the result, and two statistics that are not used."""
    result = F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    return result, torch.zeros(0), torch.zeros(0)


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    examples: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``aten.native_group_norm``: the result, and two statistics that are not used."""
    del examples, channels, positions
    return F.group_norm(input, groups, weight, bias, eps), torch.zeros(0), torch.zeros(0)


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return ``aten.embedding``, whose table comes first."""
    del padding_idx, scale_grad_by_freq, sparse
    return F.embedding(indices, weight)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``aten.embedding_bag``, whose table comes first: the result, and three tensors that are not used."""
    result = F.embedding_bag(
        indices,
        weight,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=_BAG_MODES[mode],
        sparse=sparse,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    unused = torch.zeros(0)
    return result, unused, unused, unused


def slice_along(
    input: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return ``aten.slice``: ``input[:, ..., start:end:step]``."""
    # a program says 0 and the largest number where the code said nothing, as of the examples
    first = None if start == 0 else start
    last = None if end is not None and end >= input.shape[dim] else end
    before = [slice(None)] * (dim % input.dim())
    return input[(*before, slice(first, last, None if step == 1 else step))]


def index(input: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Return ``aten.index``, in which None stands for a whole dimension."""
    return input[tuple(slice(None) if i is None else i for i in indices)]


def index_put(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Return ``aten.index_put``: a copy with ``values`` at the indices.

    Raises:
        NoRule: it adds values at indices of dimensions that are not adjacent.
    """
    if accumulate and not _has_mask(indices):
        return _add_at(input, indices, values)
    return index_put_(input.clone(), indices, values, accumulate)


def index_put_(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Return ``input`` after ``aten.index_put_`` wrote ``values`` at the indices.

    Raises:
        NoRule: see :func:`index_put`.
    """
    if accumulate and not _has_mask(indices):
        return input.copy_(_add_at(input, indices, values))
    places = tuple(slice(None) if i is None else i for i in indices)
    input[places] = input[places] + values if accumulate else values
    return input


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Return whether one of the indices is a mask, which names no element twice."""
    return any(i is not None and i.dtype == torch.bool for i in indices)


def _add_at(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """Add values to the elements at integer indices; an element that is named twice receives both values."""
    given = [i for i in indices if i is not None]
    first = next(d for d, i in enumerate(indices) if i is not None)
    last = first + len(given)
    if any(i is None for i in indices[first:last]):
        reason = "it adds values at indices of dimensions that are not adjacent"
        raise NoRule("index_put", "", reason)
    before = input.shape[:first]
    sizes = input.shape[first:last]
    after = input.shape[last:]
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    # all indexed dimensions as one: ((i_1 n_2 + i_2) n_3 + i_3) ...
    place = torch.zeros((), dtype=torch.long, device=given[0].device)
    for index, size in zip(given, sizes, strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    summands = values.expand(*before, *shape, *after).reshape(*before, shape.numel(), *after)
    flat = input.reshape(*before, sizes.numel(), *after)
    total = flat.index_add(first, place.expand(shape).reshape(-1), summands)
    return total.reshape(input.shape)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Return ``aten.convolution``, which is all convolutions and their transposes."""
    d = weight.dim() - 3
    if transposed:
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[d]
        return transpose(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d, F.conv2d, F.conv3d)[d](input, weight, bias, stride, padding, dilation, groups)


def max_pool2d_with_indices(input: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """Return ``aten.max_pool2d_with_indices``."""
    return F.max_pool2d_with_indices(input, *window)


def adaptive_max_pool(dims: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``aten.adaptive_max_pool1d`` and its kin, which return the indices too."""
    return getattr(F, f"adaptive_max_pool{dims}d_with_indices")


def adaptive_avg_pool2d(input: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return ``aten._adaptive_avg_pool2d``."""
    rows, columns = output_size
    return F.adaptive_avg_pool2d(input, (rows, columns))


def squeeze(input: Tensor, dims: int | Sequence[int] | None = None) -> Tensor:
    """Return ``aten.squeeze``, of one dimension, of several, or of all if ``dims`` is None."""
    if dims is None:
        squeezed = list(range(input.dim()))
    elif isinstance(dims, int):
        squeezed = [dims]
    else:
        squeezed = list(dims)
    # torch takes a number without dimensions as one with a single dimension
    rank = max(1, input.dim())
    # from the last one on, so that the numbers of those before it stay
    for d in sorted((d % rank for d in squeezed), reverse=True):
        input = input.squeeze(d)
    return input


def constant_pad(input: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Return ``aten.constant_pad_nd``."""
    return F.pad(input, list(pad), "constant", value)


def cast(input: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Return ``aten._to_copy``: a copy, of another type if one is given."""
    return input.clone() if dtype is None else input.to(dtype)


def alias(input: Tensor) -> Tensor:
    """Return ``aten.alias``: a view of the whole tensor."""
    return input.view(input.shape)


def view(input: Tensor, size: Sequence[int]) -> Tensor:
    """Return ``aten._unsafe_view``: a view that nothing else shares."""
    return input.reshape(size)


def split_with_sizes(input: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return ``aten.split_with_sizes``."""
    return torch.split(input, list(sizes), dim)


def upsampled(mode: str) -> Callable[..., Tensor]:
    """Return one of ``aten.upsample_nearest2d`` and its kin, in the form that exported programs call."""
    aligns = mode not in ("nearest", "nearest-exact")

    def upsample(input: Tensor, size: Sequence[int] | None, *options: Any) -> Tensor:
        # align_corners comes before the factors where the mode has it
        factors = options[-1]
        corners = options[0] if aligns else None
        scale = None if factors is None else list(factors)
        return F.interpolate(input, size, scale, mode, corners)

    return upsample


def contraction(
    equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Tensor:
    """Return ``aten.einsum``."""
    del path
    return torch.einsum(equation, *tensors)


def softmax(input: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return ``aten._softmax``."""
    del half_to_float
    return torch.softmax(input, dim)


aten = torch.ops.aten

DECOMPOSITIONS: dict[OpOverloadPacket, Callable[..., Any]] = {
    aten.batch_norm: batch_norm,
    aten.instance_norm: instance_norm,
    aten.layer_norm: layer_norm,
    aten.group_norm: group_norm,
    aten._native_batch_norm_legit_no_training: native_batch_norm,
    aten.native_layer_norm: native_layer_norm,
    aten.native_group_norm: native_group_norm,
    aten.embedding: embedding,
    aten.embedding_bag: embedding_bag,
    aten.slice: slice_along,
    aten.index: index,
    aten.index_put: index_put,
    aten.index_put_: index_put_,
    aten.convolution: convolution,
    aten.max_pool2d_with_indices: max_pool2d_with_indices,
    aten.adaptive_max_pool1d: adaptive_max_pool(1),
    aten.adaptive_max_pool2d: adaptive_max_pool(2),
    aten.adaptive_max_pool3d: adaptive_max_pool(3),
    aten._adaptive_avg_pool2d: adaptive_avg_pool2d,
    aten.squeeze: squeeze,
    aten.constant_pad_nd: constant_pad,
    aten._to_copy: cast,
    aten.alias: alias,
    aten._unsafe_view: view,
    aten.split_with_sizes: split_with_sizes,
    aten.einsum: contraction,
    aten.upsample_nearest1d: upsampled("nearest"),
    aten.upsample_nearest2d: upsampled("nearest"),
    aten.upsample_nearest3d: upsampled("nearest"),
    aten.upsample_linear1d: upsampled("linear"),
    aten.upsample_bilinear2d: upsampled("bilinear"),
    aten.upsample_bicubic2d: upsampled("bicubic"),
    aten.upsample_trilinear3d: upsampled("trilinear"),
    aten._softmax: softmax,
}
