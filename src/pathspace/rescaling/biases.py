"""Bias correction: rounding shifts the means of units, and biases can take that shift back.

Letters: W weight of a layer, x what enters it, b its bias; W' and x' those of the rounded model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathspace.rescaling.invariance import called

Layer = (
    nn.Linear
    | nn.Conv1d
    | nn.Conv2d
    | nn.Conv3d
    | nn.ConvTranspose1d
    | nn.ConvTranspose2d
    | nn.ConvTranspose3d
)
Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]


@torch.no_grad()
def correct_biases_(model: nn.Module, reference: nn.Module, calibration: Any) -> dict[str, Tensor]:
    """Shift the biases of a rounded model so that its layers have the means of the model before rounding.

    .. code-block:: text

        b <- b + mean(W x + b) - mean(W' x' + b)        over examples and positions, for each channel

    Layers are corrected in the order in which they run, so each sees what the corrected ones before it return. It takes
    one forward pass of each model, in evaluation form. Where the inputs of a layer are rounded by forward pre-hooks,
    x' is what they make.

    Args:
        model: a copy of ``reference`` with other weights, whose biases are changed. A linear layer or convolution
            without a bias gets one. A layer that runs several times in a forward pass, or never, is left alone.
        reference: the model before rounding: of several members of a rescaling class, the one that was rounded.
        calibration: what both are called with, a batch of examples: a tensor, a tuple of positional or a dict of
            keyword arguments.

    Returns:
        The shifts, by name of the layer.

    Raises:
        ValueError: the models have no, or different, linear layers and convolutions; a shift is not finite.

    Source:
        Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019.

    Example:
        >>> import copy, torch, pathspace as ps
        >>> reference = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> rounded = copy.deepcopy(reference)
        >>> with torch.no_grad():
        ...     for weight in (rounded[0].weight, rounded[2].weight):
        ...         step = weight.abs().max() / 7
        ...         _ = weight.copy_((weight / step).round() * step)
        >>> sorted(ps.rescaling.correct_biases_(rounded, reference, torch.randn(64, 4)))
        ['0', '2']
    """
    layers, theirs = _layers(model), _layers(reference)
    if not layers or layers.keys() != theirs.keys():
        differing = sorted(layers.keys() ^ theirs.keys())[:3]
        raise ValueError(
            "model must be a copy of reference, with linear layers or convolutions of the same names; "
            + (f"only one of them has {', '.join(differing)}" if differing else "neither has any")
        )
    means: dict[str, list[Tensor]] = {name: [] for name in layers}

    def look(name: str) -> Hook:
        def hook(layer: nn.Module, _: Any, output: Tensor) -> None:
            means[name].append(_channel_mean(layer, output))

        return hook

    _run(reference, {layer: look(name) for name, layer in theirs.items()}, calibration)
    shifts: dict[str, Tensor] = {}

    def correct(name: str) -> Hook:
        def hook(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
            shift = means[name][0] - _channel_mean(layer, output)
            shifts[name] = shift
            return output + shift.to(output.dtype).reshape(_broadcast_shape(layer, output))

        return hook

    once = {layers[name]: correct(name) for name, found in means.items() if len(found) == 1}
    _run(model, once, calibration)
    broken = [name for name, shift in shifts.items() if not bool(shift.isfinite().all())]
    if broken:
        raise ValueError(
            f"the mean of '{broken[0]}' is not finite on the calibration data: leave such examples out"
        )
    for name, shift in shifts.items():
        _add_to_bias(layers[name], shift)
    return shifts


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Layer)}


def _run(model: nn.Module, hooks: dict[nn.Module, Hook], calibration: Any) -> None:
    """Call a model in evaluation form, with forward hooks at some layers."""
    handles: list[RemovableHandle] = [layer.register_forward_hook(hook) for layer, hook in hooks.items()]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        called(model, calibration, seed=0)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True


def _broadcast_shape(layer: nn.Module, output: Tensor) -> tuple[int, ...]:
    """Return the shape in which one number for each channel broadcasts to an output."""
    weight: Any = layer.weight
    spatial = 0 if isinstance(layer, nn.Linear) else weight.dim() - 2
    return (output.shape[-1 - spatial], *[1] * spatial)


def _channel_mean(layer: nn.Module, output: Tensor) -> Tensor:
    """Compute the mean of each channel in float64."""
    channel = -len(_broadcast_shape(layer, output))
    return output.detach().double().movedim(channel, -1).flatten(0, -2).mean(0)


def _add_to_bias(layer: nn.Module, shift: Tensor) -> None:
    weight: Any = layer.weight
    bias: Any = layer.bias
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
        return
    bias.add_(shift.to(bias.dtype))
