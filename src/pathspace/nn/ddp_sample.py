"""DDP-Normalization measured on another sample than it normalizes (D16 Section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pathspace.nn.ddp_layers import normalized_layers


def measured_on(model: nn.Module, inputs: Tensor, sample: Tensor) -> Any:
    """Return what a normalized model returns for some inputs, with the statistics of a separate sample.

    The measure R_v = alpha S_v + (1 - alpha) D_v of every normalized node takes S_v, and where it
    is centred the mean, from ``sample`` alone. So what one input becomes does not depend on the
    other inputs: given the sample, the loss is a mean over examples, as without normalization.
    Gradients flow through the statistics, so <w~_v, dL/dw~_v> = 0 holds as for a single batch. Both
    are run in one forward pass.

    Args:
        model: a model made by :func:`ddp_normalize`, in training mode; its running averages follow
            the sample.
        inputs: what the model is called with, examples in the first dimension.
        sample: any number of examples of the same shape.

    Returns:
        What ``model(inputs)`` returns: of every tensor the part that belongs to ``inputs``.

    Raises:
        TypeError: the inputs or the sample are no tensor.
        ValueError: the model has no normalized layer or is in evaluation mode, where running
            statistics stand for those of a batch; the two shapes differ, or one is empty; or a
            layer does not have the examples in the first dimension of what it reads.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x, sample = torch.randn(16, 4), torch.randn(50, 4)
        >>> normalized = ps.nn.ddp_normalize(model, ps.trace(model, x))
        >>> outputs = ps.nn.measured_on(normalized, x, sample)
        >>> one = ps.nn.measured_on(normalized, x[:1], sample)  # the same alone
        >>> torch.allclose(outputs[:1], one, atol=1e-6)
        True
    """
    layers = normalized_layers(model, "nothing is measured")
    if not isinstance(inputs, Tensor) or not isinstance(sample, Tensor):
        raise TypeError(
            "inputs and sample must be tensors, with the examples in their first dimension"
        )
    if not all(layer.training for layer in layers):
        raise ValueError(
            "in evaluation mode running statistics are used: call train(), or the model itself"
        )
    if inputs.shape[1:] != sample.shape[1:] or not len(inputs) or not len(sample):
        raise ValueError(
            f"inputs of shape {list(inputs.shape)} and a sample of shape {list(sample.shape)}: give examples of one "
            "shape, at least one of each"
        )
    total = len(inputs) + len(sample)
    for layer in layers:
        layer._sample = total, len(sample)
    try:
        returned = model(torch.cat([inputs, sample]))
    finally:
        for layer in layers:
            del layer._sample

    def part(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != total:
            raise ValueError(
                f"the model returned a tensor of shape {list(tensor.shape)} for {total} examples: it must have them in "
                "its first dimension"
            )
        return tensor[: len(inputs)]

    return pytree.tree_map_only(Tensor, part, returned)
