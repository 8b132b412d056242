"""Pooling and reductions.

Max-pooling: a path may leave through any input of the window, so the squared network *sums* the
window. Average pooling: every input of a window of n has the fixed weight 1/n, squared 1/n^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import compressed, without_repeats
from pathspace.network.trace.values import Value
from pathspace.squared.tape import raised

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
_ADAPTIVE_AVERAGE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    """Return one number for each of n dimensions."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        values = values * n
    return tuple(int(number) for number in values)


def pooled_labels(
    recorder: Recorder, labels: Tensor, dims: Sequence[int], largest: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the labels after pooling over ``dims``; with ``largest`` the inputs of each window share a scale."""
    small = recorder.scales.resolve(without_repeats(labels))
    if any(small.shape[d] != 1 for d in dims):
        return compressed(recorder.scales.unify_groups(labels, largest))
    # the same everywhere, as channels are
    shape = largest(torch.empty(labels.shape, device="meta")).shape
    if len(shape) < small.dim():
        small = small.squeeze(tuple(dims))
    return small.expand(shape)


def _entering(recorder: Recorder, input: Tensor) -> tuple[Value, int]:
    """Return the input, and the number of dimensions that are pooled."""
    x = recorder.as_units(input)
    n = int(next(c for c in recorder.name if c.isdigit()))
    # in the place of channels the batch is as good as elsewhere: each is pooled alone
    if x.batch is not None and x.batch >= x.labels.dim() - n:
        recorder.wrong_batch()
    return x, n


def max_pool(
    recorder: Recorder,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Trace max-pooling of one, two or three dimensions."""
    if return_indices:
        recorder.no_rule("the indices it returns depend on the data")
    x, n = _entering(recorder, input)
    kernel = _tuple(kernel_size, n)
    stride = _stride(stride, kernel)
    padding = _tuple(padding, n)
    dilation = _tuple(dilation, n)

    def largest(t: Tensor) -> Tensor:
        return _MAX[n](t, kernel, stride, padding, dilation, ceil_mode)

    labels = pooled_labels(recorder, x.labels, range(-n, 0), largest)
    out_size = tuple(labels.shape[-n:])

    def squared(t: Tensor) -> Tensor:
        return window_sum(t, kernel, stride, padding, dilation, out_size)

    out = recorder.emit(squared, [x], labels, dtype=input.dtype, batch=x.batch, kind=x.kind)
    return recorder.note_unit(out)


def _stride(stride: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a pooling, by default the size of its window."""
    return kernel if stride is None or stride == [] else _tuple(stride, len(kernel))


def window_sum(
    t: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    out_size: tuple[int, ...],
) -> Tensor:
    """Sum over the windows of a pooling, as a convolution with ones; shape ``[..., *space]``."""
    n = len(kernel)
    lead = t.shape[: t.dim() - n]
    size = t.shape[t.dim() - n :]
    # padding, and what the last window reaches beyond the right edge (ceil_mode)
    edges: list[int] = []
    for d in range(n):
        reach = (out_size[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1
        right = max(0, reach - size[d] - padding[d])
        # torch takes the last dimension first
        edges = [padding[d], right, *edges]
    wide = F.pad(t, edges)
    ones = torch.ones((1, 1, *kernel), dtype=t.dtype, device=t.device)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    images = wide.reshape(-1, 1, *wide.shape[wide.dim() - n :])
    summed = convolve(images, ones, stride=stride, dilation=dilation)
    part = tuple(slice(count) for count in out_size)
    return summed[(..., *part)].reshape(*lead, *out_size)


def avg_pool(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace average pooling, with every way of counting the padding."""
    x, n = _entering(recorder, input)
    options = dict(zip(_AVERAGE_OPTIONS, args, strict=False)) | kwargs
    kernel = _tuple(options["kernel_size"], n)
    padding = _tuple(options.get("padding", 0), n)
    stride = _stride(options.get("stride"), kernel)
    ceil = bool(options.get("ceil_mode", False))

    def largest(t: Tensor) -> Tensor:
        return _MAX[n](t, kernel, stride, padding, 1, ceil)

    def average(t: Tensor) -> Tensor:
        return _AVERAGE[n](t, *args, **kwargs)

    labels = pooled_labels(recorder, x.labels, range(-n, 0), largest)
    out_size = tuple(labels.shape[-n:])
    ones = torch.ones(x.shape[-n - 1 :], dtype=torch.float64)[:1]
    members = window_sum(ones, kernel, stride, padding, (1,) * n, out_size)
    # 1/n of each window: average(1) = members / n
    weight = average(ones) / members
    return _averaged(recorder, input, x, labels, average, weight)


_AVERAGE_OPTIONS = (
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)


def _averaged(
    recorder: Recorder,
    input: Tensor,
    x: Value,
    labels: Tensor,
    average: Callable[[Tensor], Tensor],
    weight: Tensor,
) -> Tensor:
    """Trace averages of windows, with the weight 1/n of each window's members."""

    def squared(t: Tensor, power: float = 2.0) -> Tensor:
        # sum over the window of h / n^p
        factor = raised(weight, power - 1)
        return average(t) * factor.to(dtype=t.dtype, device=t.device)

    out = recorder.emit(
        squared, [x], labels, dtype=input.dtype, batch=x.batch, kind=x.kind, fixed=True
    )
    return recorder.note_linear(out)


def _adaptive_weight(size: int, out: int) -> Tensor:
    """Return 1/n for the windows [floor(i S / O), ceil((i+1) S / O)) of adaptive pooling."""
    shares = []
    for i in range(out):
        first = i * size // out
        end = -(-(i + 1) * size // out)
        shares.append(1.0 / (end - first))
    return torch.tensor(shares, dtype=torch.float64)


def adaptive_pool(
    recorder: Recorder, input: Tensor, output_size: Any, return_indices: bool = False
) -> Tensor:
    """Trace adaptive average and maximum pooling."""
    x, n = _entering(recorder, input)
    if return_indices:
        recorder.no_rule("the indices it returns depend on the data")
    sizes = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * n
    pairs = zip(sizes, x.shape[-n:], strict=True)
    size = tuple(now if wanted is None else int(wanted) for wanted, now in pairs)

    def largest(t: Tensor) -> Tensor:
        return _ADAPTIVE_MAX[n](t, size)

    def average(t: Tensor) -> Tensor:
        return _ADAPTIVE_AVERAGE[n](t, size)

    labels = pooled_labels(recorder, x.labels, range(-n, 0), largest)
    weight = torch.ones((), dtype=torch.float64)
    for d in range(n):
        weight = weight[..., None] * _adaptive_weight(x.shape[d - n], size[d])
    if "avg" in recorder.name:
        return _averaged(recorder, input, x, labels, average, weight)

    def squared(t: Tensor) -> Tensor:
        return average(t) / weight.to(dtype=t.dtype, device=t.device)

    out = recorder.emit(squared, [x], labels, dtype=input.dtype, batch=x.batch, kind=x.kind)
    return recorder.note_unit(out)


def reduce(
    recorder: Recorder,
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Trace ``sum``, ``mean``, ``amax`` and ``amin`` over dimensions."""
    x = recorder.value(input)
    dims = _dimensions(dim, x.labels.dim())
    if x.kind == "parameter":
        recorder.no_rule("it reduces a parameter, whose elements are then no edges")
    if x.batch in dims:
        recorder.wrong_batch()
    labels = recorder.scales.unify_along(x.labels, dims)
    batch = x.batch
    if not keepdim:
        labels = labels.squeeze(dims)
        if batch is not None:
            batch -= sum(d < batch for d in dims)
    count = math.prod(x.shape[d] for d in dims) if recorder.name == "mean" else 1

    def squared(t: Tensor, power: float = 2.0) -> Tensor:
        return t.sum(dims, keepdim) * (1.0 / count**power)

    out = recorder.emit(
        squared, [x], labels, dtype=dtype or input.dtype, batch=batch, kind=x.kind, fixed=True
    )
    if recorder.name in ("amax", "amin"):
        return recorder.note_unit(out)
    return recorder.note_linear(out)


def _dimensions(dim: Any, n: int) -> tuple[int, ...]:
    """Return the dimensions that a reduction of n is over, counted from the first one."""
    if dim is None or dim == ():
        return tuple(range(n))
    return tuple(d % n for d in _tuple(dim, 1))


RULES: dict[str, Callable[..., Any]] = {
    **{f"{prefix}max_pool{n}d": max_pool for n in (1, 2, 3) for prefix in ("", "_")},
    **{f"avg_pool{n}d": avg_pool for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": adaptive_pool for n in (1, 2, 3) for kind in ("avg", "max")},
    **dict.fromkeys(["sum", "mean", "amax", "amin"], reduce),
}
