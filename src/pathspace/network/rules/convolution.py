"""Convolutions: one parameter per channel pair and tap, tied over all positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.elementwise import add_bias
from pathspace.network.rules.linear import by_normed, require_parameter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value


def convolution(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Trace a convolution or its transpose; all positions of a channel share one scale.

    A kernel that is a constant or a buffer is a set of fixed edges: channels that one of the result
    reads share one.
    """
    function = recorder.func
    of_weight = recorder.lookup(weight)
    normed = of_weight is not None and of_weight.slot in recorder.normed
    fixed = of_weight is None or of_weight.kind == "buffer"
    x = recorder.as_units(input)
    w = recorder.value(weight) if fixed or normed else require_parameter(recorder, weight)
    space = w.labels.dim() - 2
    batch_dim = 0 if x.labels.dim() == space + 2 else None
    if x.batch not in (None, batch_dim):
        recorder.wrong_batch()
    # stride, padding, dilation, groups; or stride, padding, output_padding, groups, dilation
    groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
    labels = _channels(recorder, x, w, groups, fixed=fixed)
    values = [x, w]
    if bias is not None:
        b = require_parameter(recorder, bias)
        labels = add_bias(recorder, b, labels)
        values.append(b)

    def squared(h: Tensor, q: Tensor, c: Tensor | None = None) -> Tensor:
        return function(h, q, c, *args, **kwargs)

    # for its shape alone
    meta = squared(torch.empty(x.shape, device="meta"), torch.empty(w.shape, device="meta"))
    labels = labels.reshape(-1, *([1] * space)).expand(meta.shape)
    form = "product" if normed else None
    out = recorder.emit(squared, values, labels, dtype=input.dtype, batch=x.batch, form=form)
    return recorder.note_linear(out)


def _channels(recorder: Recorder, x: Value, w: Value, groups: int, *, fixed: bool) -> Tensor:
    """Return the labels of the channels of a convolution's result, before its bias."""
    transposed = "transpose" in recorder.name
    space = w.labels.dim() - 2
    channel = x.labels.dim() - space - 1
    source = recorder.scales.unify_over(x.labels, (channel,))  # [C_in]
    count = w.shape[1] * groups if transposed else w.shape[0]
    if fixed:
        blocks = recorder.scales.unify_over(source.reshape(groups, -1), (0,))
        return blocks[:, None].expand(groups, count // groups).reshape(count)
    if w.slot in recorder.normed:
        return by_normed(recorder, w, source, groups, transposed=transposed)
    return _targets(recorder, source, count, w, transposed, groups)


def _targets(
    recorder: Recorder, source: Tensor, count: int, w: Value, transposed: bool, groups: int
) -> Tensor:
    target = recorder.made_of(source, count)
    ones = [1] * (w.labels.dim() - 2)
    if transposed:  # weight [C_in, C_out / groups, ...]
        per_group = _for_each(target, groups, w.shape[0])
        recorder.uses.add(
            w,
            per_group.reshape(*per_group.shape, *ones),
            source.reshape(-1, 1, *ones),
            target_dim=1,
        )
    else:  # weight [C_out, C_in / groups, ...]
        per_group = _for_each(source, groups, count)
        recorder.uses.add(
            w,
            target.reshape(-1, 1, *ones),
            per_group.reshape(*per_group.shape, *ones),
            target_dim=0,
        )
    return recorder.scales.resolve(target)


def _for_each(labels: Tensor, groups: int, channels: int) -> Tensor:
    """Return, for every channel, the labels of the channels of its group. A single group is not copied."""
    return labels.reshape(groups, 1, -1).expand(-1, channels // groups, -1).reshape(channels, -1)


RULES: dict[str, Callable[..., Any]] = {
    f"conv{transposed}{n}d": convolution for transposed in ("", "_transpose") for n in (1, 2, 3)
}
