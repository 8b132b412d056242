"""Normalization layers: y_c = g_c (x_c - mean) / sigma + b_c, with statistics of what enters or with fixed ones.

*With statistics over a set S of what enters* (BatchNorm in training: the batch and all positions of
a channel; LayerNorm and RMSNorm: the features of a token; GroupNorm and InstanceNorm: theirs) the
layer forgets the scale of the weights before it, and so does the squared network: path mass leaves
as g_c^2 z_c / m + b_c^2, with m the mean over S of the mass z that enters (see
``squared.normalization``).

*With running statistics*, BatchNorm in its evaluation form, it is fixed edges 1/sigma from x and
mean/sigma from the bias node to the normalized unit, then the edge g_c; b_c is a bias.

In both forms the units *before* it have the fixed scale 1: the eps in sigma breaks their symmetry
in the one, the running mean, a constant, in the other. The scale of the units after it is free and
sits in gain and bias: rescaling it preserves the function and touches no buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.elementwise import add_bias
from pathspace.network.rules.linear import require_parameter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import Value
from pathspace.squared.normalization import Normalization


def batch_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Trace batch normalization, in the form in which it was called."""
    del momentum
    x, _, place = _channels(recorder, input)
    if x.kind != "hidden" and weight is None:  # a function of inputs is an input
        if training:
            recorder.by_batch.add(recorder.path)
        return recorder.as_inputs(torch.clone, (input,), {}, x.batch)
    if training:
        over = tuple(d for d in range(x.labels.dim()) if d != 1)
        return normalized(recorder, input, x, x.shape, over, place, weight, bias)
    return _fixed(recorder, input, x, place, running_mean, running_var, weight, bias, eps)


def layer_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Trace layer normalization: S is the features of a token, the last dimensions."""
    x = recorder.as_units(input)
    k = len(normalized_shape)
    n = x.labels.dim()
    over = tuple(range(n - k, n))
    if x.batch in over:
        recorder.wrong_batch()
    place = (1,) * (n - k) + tuple(x.shape[n - k :])
    return normalized(recorder, input, x, x.shape, over, place, weight, bias)


def rms_norm(
    recorder: Recorder,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Trace root mean square normalization, which is layer normalization without a mean and a bias."""
    del eps
    return layer_norm(recorder, input, normalized_shape, weight)


def group_norm(
    recorder: Recorder,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Group normalization: S is the channels of a group at all positions."""
    x, channels, place = _channels(recorder, input)
    shape = (x.shape[0], num_groups, channels // num_groups, *x.shape[2:])
    return normalized(recorder, input, x, shape, tuple(range(2, len(shape))), place, weight, bias)


def instance_norm(
    recorder: Recorder,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Trace instance normalization: S is all positions of a channel. With running statistics it is BatchNorm."""
    del momentum
    x, _, place = _channels(recorder, input)
    if not use_input_stats:
        return _fixed(recorder, input, x, place, running_mean, running_var, weight, bias, eps)
    return normalized(
        recorder, input, x, x.shape, tuple(range(2, x.labels.dim())), place, weight, bias
    )


def _channels(recorder: Recorder, input: Tensor) -> tuple[Value, int, tuple[int, ...]]:
    """Return the input ``[batch, channels, ...]``, the number of channels, and the positions of their gains."""
    x = recorder.as_units(input)
    if x.batch is not None and x.batch != 0:
        recorder.wrong_batch()
    return x, x.shape[1], (1, x.shape[1]) + (1,) * (x.labels.dim() - 2)


def normalized(
    recorder: Recorder,
    input: Tensor,
    x: Value,
    shape: Sequence[int],
    over: tuple[int, ...],
    place: tuple[int, ...] = (),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Trace a division by a statistic of the input, followed by a gain and a bias.

    ``x`` is the value of what enters; for ``shape``, ``over`` and ``place`` see
    :class:`Normalization`.
    """
    inputs, labels = _affine(recorder, x, place, weight, bias)
    layer = Normalization(tuple(shape), over, place, weight is not None, bias is not None)
    out = recorder.emit(
        layer.run,
        [x, *inputs],
        labels,
        dtype=input.dtype,
        batch=x.batch,
        form=layer,
        statistic=layer.inverse,
    )
    return recorder.note_linear(out)


def _affine(
    recorder: Recorder, x: Value, place: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> tuple[list[Value], Tensor]:
    """Add gain and bias as edges to units of their own scales, and return the labels of these units."""
    recorder.scales.unify(x.labels, torch.tensor(FIXED))
    inputs: list[Value] = []
    target = torch.tensor(FIXED)
    if weight is not None:
        gain = require_parameter(recorder, weight)
        target = recorder.scales.fresh(math.prod(gain.shape), recorder.where()).reshape(gain.shape)
        recorder.uses.add(gain, target, torch.full_like(target, FIXED))
        target = recorder.scales.resolve(target)
        inputs.append(gain)
    if bias is not None:
        shift = require_parameter(recorder, bias)
        target = add_bias(recorder, shift, target.expand(shift.shape))
        inputs.append(shift)
    labels = target.reshape(place) if inputs else target
    return inputs, labels.expand(x.shape)


def _fixed(
    recorder: Recorder,
    input: Tensor,
    x: Value,
    place: tuple[int, ...],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Trace normalization with running statistics."""
    affine, labels = _affine(recorder, x, place, weight, bias)
    inputs = [
        x,
        *affine,
        *(recorder.value(t) for t in (running_mean, running_var) if t is not None),
    ]
    present = [t is not None for t in (weight, bias, running_mean, running_var)]

    def inverse(*slots: Tensor) -> Tensor:
        """Return 1 / sigma^2; the variance arrives squared, like every buffer."""
        return 1 / (slots[-1].reshape(place).sqrt() + eps)

    def squared(h: Tensor, *slots: Tensor, held: Tensor | None = None) -> Tensor:
        given = iter(slots)
        gamma, beta, mean, var = (
            next(given).reshape(place) if there else None for there in present
        )
        if mean is not None:
            h = h + mean
        if var is not None:
            h = h / (var.sqrt() + eps) if held is None else h * held
        if gamma is not None:
            h = h * gamma
        return h if beta is None else h + beta

    statistic = None if running_var is None else inverse
    out = recorder.emit(
        squared, inputs, labels, dtype=input.dtype, batch=x.batch, statistic=statistic
    )
    return recorder.note_linear(out)


RULES: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
}
