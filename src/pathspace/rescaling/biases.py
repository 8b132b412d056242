"""Biases of networks that are rounded: correction of shifted means, and absorption of high biases.

Letters: W weight of a layer, x what enters it, b its bias; W' and x' those of the rounded model; c
what is absorbed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathspace.network.errors import expect_module
from pathspace.network.returned import tensors_in
from pathspace.rescaling.invariance import called, difference

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

    Layers are corrected in the order in which they run, so each sees what the corrected ones before
    it return. It takes one forward pass of each model, in evaluation form. Where the inputs of a
    layer are rounded by forward pre-hooks, x' is what they make.

    Args:
        model: a copy of ``reference`` with other weights, whose biases are changed. A linear layer
            or convolution without a bias gets one. A layer that runs several times in a forward
            pass, or never, is left alone.
        reference: the model before rounding: of several members of a rescaling class, the one that
            was rounded.
        calibration: what both are called with, a batch of examples: a tensor, a tuple of positional
            or a dict of keyword arguments.

    Returns:
        The shifts, by name of the layer.

    Raises:
        ValueError: the models have no, or different, linear layers and convolutions; a shift is not
            finite.

    Source:
        Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
        2019.

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
    expect_module(model)
    expect_module(reference, "reference")
    layers = _layers(model)
    theirs = _layers(reference)
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


@torch.no_grad()
def absorb_biases_(
    model: nn.Module,
    pairs: Sequence[tuple[str, str]],
    calibration: Any = None,
    *,
    lowest: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Move what a ReLU never cuts off from the biases of a layer to those of the layer behind it.

    .. code-block:: text

        relu(W1 x + b1) = relu(W1 x + b1 - c) + c        where W1 x + b1 >= c >= 0
        b1 <- b1 - c,  b2 <- b2 + W2 c

    High biases, as equalization leaves behind, make the range of activations large; this makes it
    smaller. Weights stay as they are.

    Args:
        model: the model, in place.
        pairs: names of linear layers or convolutions with nothing but a ReLU between them, the
            second without padding.
        calibration: what the model is called with. c is the least value of each channel on it, if
            that is positive, so that the function stays the same there; this is checked.
        lowest: instead, the least values of the channels by name of the first layer: with
            BatchNorm's bias beta and gain gamma, ``beta - 3 * gamma.abs()``. What is below is cut
            off.

    Returns:
        c of each channel, by name of the first layer.

    Raises:
        ValueError: both or none of ``calibration`` and ``lowest`` are given; a pair does not fit,
            is padded, or its first layer has no bias; the outputs on the calibration data move by
            more than rounding, and all is undone.

    Source:
        Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
        2019.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> _ = torch.nn.init.constant_(model[0].bias, 9.0)
        >>> ps.rescaling.absorb_biases_(model, [("0", "2")], torch.rand(16, 2))["0"] > 7
        tensor([True, True, True])
    """
    if (calibration is None) == (lowest is None):
        raise ValueError("give either calibration data or the lowest values of the channels")
    expect_module(model)
    layers = _layers(model)
    for first, second in pairs:
        _check_pair(layers, first, second)
    before = None if calibration is None else _outputs(model, calibration)
    kept = [(layer, _bias_of(layer)) for layer in layers.values()]
    absorbed = {}
    for first, second in pairs:
        found = (
            _lowest_values(model, layers[first], calibration) if lowest is None else lowest[first]
        )
        c = found.clamp_min(0)
        _add_to_bias(layers[first], -c)
        _add_to_bias(layers[second], _passed_on(layers[second], c))
        absorbed[first] = c
    if before is not None and not _same(before, _outputs(model, calibration)):
        for layer, bias in kept:
            _restore_bias(layer, bias)
        raise ValueError(
            "the outputs on the calibration data have changed, so the biases are what they were before: "
            "is there nothing but a ReLU between the layers of each pair, and does nothing else read the first one?"
        )
    return absorbed


def _check_pair(layers: Mapping[str, nn.Module], first: str, second: str) -> None:
    for name in (first, second):
        if name not in layers:
            raise ValueError(
                f"'{name}' is no linear layer or convolution: give two of {', '.join(layers)}"
            )
    one: Any = layers[first]
    other: Any = layers[second]
    if one.bias is None:
        raise ValueError(f"'{first}' has no bias to absorb")
    if _is_padded(other) or "Transpose" in type(other).__name__:
        raise ValueError(
            f"'{second}' is padded or transposed, so its borders would not receive what is absorbed"
        )
    if len(one.bias) != getattr(other, "in_channels", other.weight.shape[1]):
        raise ValueError(f"'{second}' does not read the {len(one.bias)} channels of '{first}'")


def _is_padded(layer: nn.Module) -> bool:
    padding = getattr(layer, "padding", ())
    return padding != "valid" and any(padding)


def _lowest_values(model: nn.Module, layer: nn.Module, calibration: Any) -> Tensor:
    """Return the least value of each channel before the activation."""
    seen: list[Tensor] = []

    def look(layer: nn.Module, _: Any, output: Tensor) -> None:
        seen.append(_values_by_channel(layer, output).amin(0))

    _run(model, {layer: look}, calibration)
    return torch.stack(seen).amin(0)


def _passed_on(layer: nn.Module, c: Tensor) -> Tensor:
    """Return W c of a layer, for the same c at all positions."""
    weight: Any = layer.weight
    groups: Any = getattr(layer, "groups", 1)
    sums = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    each = c.to(weight.dtype).reshape(groups, -1).repeat_interleave(len(weight) // groups, 0)
    return (sums * each).sum(1)


def _outputs(model: nn.Module, calibration: Any) -> list[Tensor]:
    """Return copies of what a model returns in evaluation form."""
    returned = tensors_in(_run(model, {}, calibration))
    return [t.clone() for t in returned if t.is_floating_point()]


def _same(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    for old, new in zip(before, after, strict=True):
        moved, largest = difference(old, new)
        if not moved <= torch.finfo(old.dtype).eps ** 0.5 * largest:
            return False
    return True


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Layer)}


def _run(model: nn.Module, hooks: dict[nn.Module, Hook], calibration: Any) -> Any:
    """Call a model in evaluation form, with forward hooks at some layers; return what it returns."""
    handles: list[RemovableHandle] = [
        layer.register_forward_hook(hook) for layer, hook in hooks.items()
    ]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return called(model, calibration, seed=0)
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
    return _values_by_channel(layer, output.double()).mean(0)


def _values_by_channel(layer: nn.Module, output: Tensor) -> Tensor:
    """Return the outputs of a layer over examples and positions, ``[n, channels]``."""
    channel = -len(_broadcast_shape(layer, output))
    by_channel = output.detach().movedim(channel, -1)
    return by_channel.reshape(-1, by_channel.shape[-1])


def _add_to_bias(layer: nn.Module, shift: Tensor) -> None:
    weight: Any = layer.weight
    bias: Any = layer.bias
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
        return
    bias.add_(shift.to(bias.dtype))


def _bias_of(layer: nn.Module) -> Tensor | None:
    bias: Any = layer.bias
    return None if bias is None else bias.detach().clone()


def _restore_bias(layer: nn.Module, value: Tensor | None) -> None:
    bias: Any = layer.bias
    if value is None:
        layer.register_parameter("bias", None)
    else:
        bias.copy_(value)
