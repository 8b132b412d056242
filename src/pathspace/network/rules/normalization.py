"""Batch normalization, in its evaluation form y = gamma (x - mean) / sigma + beta with the running statistics.

It is read as fixed edges 1/sigma from x and mean/sigma from the bias node to the normalized unit, then the edge
gamma; beta is a bias. Because the running mean is a constant, the units *before* it have the fixed scale 1; the
scale of the units after it is free and sits in gamma and beta. That rescaling preserves the function in both forms.

In its batch form the normalization also removes any factor of the weights before it. Path-SGD is equivariant to
that extra symmetry too (1/sigma^2 stands in kappa), as far as the running statistics follow the batch's; it is not
among the unit classes, because rescaling with it would have to change buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.elementwise import add_bias
from pathspace.network.rules.linear import require_parameter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import Value


def batch_norm(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalization with running statistics; without them sigma is taken as 1 and the mean as 0."""
    del func, training, momentum
    x = recorder.value(input)
    if x.batch is not None and x.batch != 0:
        recorder.wrong_batch(name)
    recorder.scales.unify(x.labels, torch.tensor(FIXED))
    channels = x.shape[1]
    shape = [1, channels] + [1] * (x.labels.dim() - 2)
    inputs: list[Value] = [x]
    present: list[str] = ["x"]
    target = torch.full((channels,), FIXED)
    if weight is not None:
        gamma = require_parameter(recorder, name, weight)
        target = recorder.scales.fresh(channels, recorder.where(name))
        recorder.uses.add(gamma, target, torch.full((channels,), FIXED))
        target = recorder.scales.resolve(target)
        inputs.append(gamma)
        present.append("gamma")
    if bias is not None:
        beta = require_parameter(recorder, name, bias)
        target = add_bias(recorder, name, beta, target)
        inputs.append(beta)
        present.append("beta")
    for key, tensor in (("mean", running_mean), ("var", running_var)):
        if tensor is not None:
            inputs.append(recorder.value(tensor))
            present.append(key)

    def squared(*slots: Tensor) -> Tensor:
        given = dict(zip(present, slots, strict=True))
        h = given["x"]
        if "mean" in given:  # mean arrives squared, like every buffer
            h = h + given["mean"].reshape(shape)
        if "var" in given:  # the variance too: undo it
            h = h / (given["var"].sqrt() + eps).reshape(shape)
        if "gamma" in given:
            h = h * given["gamma"].reshape(shape)
        return h + given["beta"].reshape(shape) if "beta" in given else h

    def pullback(
        slots: Sequence[Tensor], _: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        given, g = dict(zip(present, slots, strict=True)), gradients[0]
        assert g is not None
        inverse = (given["var"].sqrt() + eps).reciprocal() if "var" in given else None
        scale = given.get("gamma")
        if inverse is not None:
            scale = inverse if scale is None else scale * inverse
        places = [d for d in range(g.dim()) if d != 1]
        found: dict[str, Tensor] = {}
        if needed[0]:
            found["x"] = g if scale is None else g * scale.reshape(shape)
        total = g.sum(places)
        if "gamma" in given:
            weighted = (g * given["x"]).sum(places)
            if "mean" in given:
                weighted = torch.addcmul(weighted, total, given["mean"])
            found["gamma"] = weighted if inverse is None else weighted * inverse
        found["beta"] = total
        return [found.get(key) for key in present]

    labels = target.reshape(shape).expand(x.shape)
    return recorder.note_linear(
        recorder.emit(squared, inputs, labels, name=name, dtype=input.dtype, batch=x.batch, pullback=pullback)
    )


RULES: dict[str, Callable[..., Any]] = {"batch_norm": batch_norm}
