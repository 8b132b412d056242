"""Bounds that scale with the units that they bound, in the place of ReLU6 and hardtanh.

A clamp with constant bounds is not positively homogeneous, so a network is cut there. Together with
its bounds it is,

    max(min(s h, s high), s low) = s max(min(h, high), low)        s > 0

so a bound for each channel, a parameter that rescaling multiplies with the channel, leaves every
channel free.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.network.errors import expect_module
from pathspace.rescaling.invariance import called

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
)


class Clamp(nn.Module):
    """A clamp with two bounds for each channel, which are parameters: max(min(h, high), low).

    A lower bound of 0 stays 0 at every scale, so it is no parameter but a ReLU.

    Args:
        low: the lower bound of each channel at the start.
        high: the upper bound.
        shape: of the bounds; it must broadcast to what enters, as ``(channels, 1, 1)`` does to
            images.
        train: whether gradients reach the bounds, as in PACT.

    Raises:
        ValueError: ``low`` is not below ``high``.

    Source:
        Choi et al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks", 2018.

    Example:
        >>> import torch, pathspace as ps
        >>> ps.nn.Clamp(0.0, 6.0, (2,))(torch.tensor([[-1.0, 8.0]]))
        tensor([[0., 6.]])
    """

    def __init__(
        self, low: float, high: float, shape: tuple[int, ...], *, train: bool = False
    ) -> None:
        super().__init__()
        if not low < high:
            raise ValueError(f"expected low < high, got low={low} and high={high}")
        self.shape = tuple(shape)
        # of one dimension, as biases: quantisation rounds parameters of two dimensions or more
        count = math.prod(shape)
        self.high = nn.Parameter(torch.full((count,), float(high)), requires_grad=train)
        self.low = (
            None
            if low == 0
            else nn.Parameter(torch.full((count,), float(low)), requires_grad=train)
        )

    def forward(self, h: Tensor) -> Tensor:
        """Return h within the bounds."""
        above = (
            torch.relu(h) if self.low is None else torch.maximum(h, self.low.reshape(self.shape))
        )
        return torch.minimum(above, self.high.reshape(self.shape))

    def extra_repr(self) -> str:
        """Say how many bounds there are."""
        return f"shape={self.shape}" + (", low=0" if self.low is None else "")


@torch.no_grad()
def scale_caps_(model: nn.Module, example_input: Any, *, train: bool = False) -> list[str]:
    """Replace every ``nn.ReLU6`` and ``nn.Hardtanh`` of a model, in place, by a :class:`Clamp` that scales with it.

    The function stays the same, bit for bit. Trace the model afterwards: its units are then free
    where the network was cut before. Only modules are replaced; write ``functional.relu6(h)`` as a
    module first.

    Channels are the last dimension of what a linear layer or LayerNorm made, otherwise dimension 1.

    Args:
        model: the model, which is changed.
        example_input: what it is called with, to see the shapes.
        train: whether gradients reach the bounds, as in PACT.

    Returns:
        Names of the modules that were replaced. A module that runs several times in a forward pass,
        or never, is left alone, since each of its places would need bounds of its own.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU6(), torch.nn.Linear(8, 2))
        >>> ps.nn.scale_caps_(model, torch.zeros(1, 4))
        ['1']
        >>> ps.trace(model, torch.zeros(1, 4)).num_classes
        8
    """
    expect_module(model)
    caps = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Hardtanh)
    }
    shapes = _shapes_of_bounds(model, example_input, caps.values())
    once = [name for name, cap in caps.items() if len(shapes[cap]) == 1]
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    for name in once:
        cap = caps[name]
        clamp = Clamp(cap.min_val, cap.max_val, shapes[cap][0], train=train)
        clamp.to(like.device, like.dtype).train(cap.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, clamp)
    return once


def _shapes_of_bounds(
    model: nn.Module, example_input: Any, caps: Collection[nn.Module]
) -> dict[nn.Module, list[tuple[int, ...]]]:
    """Call the model; return, for each module, the shape of its bounds at every call of it."""
    shapes: dict[nn.Module, list[tuple[int, ...]]] = {cap: [] for cap in caps}
    latest: list[nn.Module] = []

    def note_layer(layer: nn.Module, _: Any) -> None:
        latest[:] = [layer]

    def note_cap(cap: nn.Module, args: tuple[Any, ...]) -> None:
        shapes[cap].append(_shape_of_bounds(args[0], latest))

    handles = [cap.register_forward_pre_hook(note_cap) for cap in caps]
    layers = [m for m in model.modules() if isinstance(m, (*_CHANNELS_LAST, *_CHANNELS_FIRST))]
    handles += [layer.register_forward_pre_hook(note_layer) for layer in layers]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        called(model, example_input, seed=0)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return shapes


def _shape_of_bounds(h: Tensor, latest: list[nn.Module]) -> tuple[int, ...]:
    """Return the shape of one bound for each channel."""
    if h.dim() < 3 or (latest and isinstance(latest[0], _CHANNELS_LAST)):
        return (h.shape[-1],)
    return (h.shape[1], *[1] * (h.dim() - 2))
