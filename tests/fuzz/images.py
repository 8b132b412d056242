"""Random networks on images ``[B, C, H, W]``, without a second description of what they do.

What is checked is what any network has: the function stays under rescaling, kappa on data is a
squared Jacobian, paths add up to the outputs. Sizes are found by running each operation as it is
drawn; what does not fit is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[nn.ModuleList, list[Tensor]], Tensor | None]
"""From the layers and the values so far to the next value; None if it writes into one of them."""

LARGEST = 300
"""Elements that one example of a value may have."""


class Images(nn.Module):
    """A random network.

    Args:
        seed: what it is drawn from.
        piecewise_linear: whether it has operations with paths alone, and ends at no cut.
    """

    def __init__(self, seed: int, *, piecewise_linear: bool = False) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.size = [
            self.random.randint(1, 4),
            self.random.randint(3, 6),
            self.random.randint(3, 6),
        ]
        self.layers = nn.ModuleList()
        self.steps: list[Step] = []
        self.names: list[str] = []
        kinds = PIECEWISE_LINEAR if piecewise_linear else [*PIECEWISE_LINEAR, *OTHERS]
        number = self.random.randint(3, 8)
        values = [self.input(1)]
        self._draw([convolution], values)
        while len(self.steps) < number:
            self._draw(kinds, values)
        self._draw([head], values)
        self.eval()

    def input(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(batch, *self.size, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        values = [x.clone()]  # it may write into its input
        for step in self.steps:
            result = step(self.layers, values)
            if result is not None:
                values.append(result)
        return values[-1]

    def _draw(self, kinds: Sequence[Callable[..., Step]], values: list[Tensor]) -> None:
        """Add a step that fits."""
        while True:
            kind = self.random.choice(kinds)
            layers = len(self.layers)
            try:
                step = kind(self, values)
                with torch.no_grad():
                    result = step(self.layers, values)
                fits = result is None or 0 < result.numel() <= LARGEST
            except (RuntimeError, ValueError, IndexError):
                fits = False
            if fits:
                break
            del self.layers[layers:]
        self.steps.append(step)
        self.names.append(kind.__name__)
        if result is not None:
            values.append(result)

    def pick(self, values: Sequence[Tensor]) -> int:
        """One of the latest values."""
        return self.random.choice(range(len(values))[-3:])

    def add(self, layer: nn.Module) -> int:
        """Add a layer with random parameters and statistics; return its number."""
        layer = layer.double()
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.dim() < 2:
                    parameter.copy_(0.5 + 0.7 * torch.randn_like(parameter))
            for name, buffer in layer.named_buffers():
                if name == "running_var":
                    buffer.copy_(0.5 + torch.rand_like(buffer))
        self.layers.append(layer)
        return len(self.layers) - 1


def convolution(net: Images, values: Sequence[Tensor]) -> Step:
    i, draw = net.pick(values), net.random.choice
    channels = values[i].shape[1]
    groups = draw([g for g in range(1, channels + 1) if channels % g == 0])
    k = net.add(
        nn.Conv2d(
            channels,
            groups * draw([1, 1, 2, 3]),
            (draw([1, 2, 3]), draw([1, 3])),
            stride=draw([1, 1, 2]),
            padding=draw([0, 1]),
            dilation=draw([1, 1, 2]),
            groups=groups,
            bias=draw([True, True, False]),
            padding_mode=draw(["zeros", "zeros", "zeros", "circular", "reflect", "replicate"]),
        )
    )
    return lambda layers, v: layers[k](v[i])


def transposed_convolution(net: Images, values: Sequence[Tensor]) -> Step:
    i, draw = net.pick(values), net.random.choice
    channels, stride = values[i].shape[1], draw([1, 2])
    groups = draw([g for g in range(1, channels + 1) if channels % g == 0])
    k = net.add(
        nn.ConvTranspose2d(
            channels, groups * draw([1, 2]), 3, stride=stride, padding=draw([0, 1]),
            output_padding=stride - 1, groups=groups,
        )
    )  # fmt: skip
    return lambda layers, v: layers[k](v[i])


def activation(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    forms = [
        torch.relu, torch.abs, functional.leaky_relu, lambda h: h.clamp(min=0), lambda h: h.clone().relu_(),
        lambda h: torch.maximum(h, torch.zeros_like(h)),
    ]  # fmt: skip
    form = net.random.choice(forms)
    return lambda _, v: form(v[i])


def learned_slopes(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    k = net.add(nn.PReLU(net.random.choice([1, values[i].shape[1]])))
    return lambda layers, v: layers[k](v[i])


def write(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    form = net.random.choice([torch.relu_, lambda h: h.mul_(2), lambda h: h.add_(h)])

    def step(layers: nn.ModuleList, v: list[Tensor]) -> None:
        form(v[i])

    return step


def pooling(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    forms = [
        lambda h: functional.max_pool2d(h, 2),
        lambda h: functional.max_pool2d(h, 3, 2, 1),
        lambda h: functional.max_pool2d(h, 2, 1),
        lambda h: functional.avg_pool2d(h, 2),
        lambda h: functional.avg_pool2d(h, 2, divisor_override=3),
        lambda h: functional.adaptive_avg_pool2d(h, 2),
        lambda h: functional.adaptive_max_pool2d(h, 1),
        lambda h: functional.interpolate(h, scale_factor=2),
        lambda h: functional.interpolate(h, scale_factor=2, mode="bilinear"),
    ]
    form = net.random.choice(forms)
    return lambda _, v: form(v[i])


def movement(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    forms = [
        lambda h: functional.pixel_shuffle(h, 2),
        lambda h: functional.pixel_unshuffle(h, 2),
        lambda h: functional.channel_shuffle(h, 2),
        lambda h: h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
        lambda h: h.transpose(2, 3),
        lambda h: functional.pad(h, (1, 0, 1, 1)),
        lambda h: functional.pad(h, (1, 1, 1, 1), mode="reflect"),
        lambda h: h.roll(1, 2),
        lambda h: h.flip(3),
        lambda h: h.flip(1),
        lambda h: h[:, :, 1:],
        lambda h: h.chunk(2, 1)[0],
        lambda h: h[:, h.shape[1] // 2 :],
        lambda h: h[:, ::2],
        lambda h: h.cumsum(2),
        lambda h: h.unflatten(1, (-1, 2)).amax(2),
    ]
    form = net.random.choice(forms)
    return lambda _, v: form(v[i])


def joined(net: Images, values: Sequence[Tensor]) -> Step:
    i, j = net.pick(values), net.pick(values)
    forms = [
        torch.add, torch.sub, lambda a, b: torch.stack([a, b]).sum(0), lambda a, b: torch.add(a, b, alpha=2),
        *[lambda a, b, d=d: torch.cat([a, b], d) for d in (1, 1, 2, 3)],
    ]  # fmt: skip
    form = net.random.choice(forms)
    return lambda _, v: form(v[i], v[j])


def pointwise(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    k = net.add(nn.Linear(values[i].shape[1], net.random.choice([1, 2, 3])))
    forms = [
        lambda layer, h: layer(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        lambda layer, h: (
            layer(h.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, h.shape[2:])
        ),
        lambda layer, h: torch.einsum("bchw,oc->bohw", h, layer.weight) + layer.bias[:, None, None],
    ]
    form = net.random.choice(forms)
    return lambda layers, v: form(layers[k], v[i])


def normalization(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    channels, positions = values[i].shape[1], values[i].shape[2:].numel()
    forms = [lambda: nn.BatchNorm2d(channels)]
    # of two values a normalization has their signs alone
    if channels % 2 == 0 and positions > 1:
        forms.append(lambda: nn.GroupNorm(channels // 2, channels))
    if positions > 2:
        forms.append(lambda: nn.InstanceNorm2d(channels, affine=True))
    k = net.add(net.random.choice(forms)())
    return lambda layers, v: layers[k](v[i])


def gate(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    channels = values[i].shape[1]
    k = net.add(nn.Linear(channels, channels))
    forms = [
        lambda layer, h: h * layer(h.mean((2, 3))).sigmoid()[:, :, None, None],
        lambda layer, h: h * layer(h.amax((2, 3))).relu()[:, :, None, None],
    ]
    form = net.random.choice(forms)
    return lambda layers, v: form(layers[k], v[i])


def cut(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    forms = [
        lambda h: functional.glu(h, 1),
        functional.gelu,
        lambda h: h.softmax(1),
        lambda h: h * h,
    ]
    form = net.random.choice(forms)
    return lambda _, v: form(v[i])


def attention(net: Images, values: Sequence[Tensor]) -> Step:
    i = net.pick(values)
    k = net.add(nn.Conv2d(values[i].shape[1], 3 * values[i].shape[1], 1))

    def step(layers: nn.ModuleList, v: list[Tensor]) -> Tensor:
        query, key, value = layers[k](v[i]).flatten(2).transpose(1, 2).chunk(3, 2)
        mixed = (query @ key.transpose(1, 2)).softmax(-1) @ value
        return mixed.transpose(1, 2).reshape(v[i].shape)

    return step


def head(net: Images, values: Sequence[Tensor]) -> Step:
    shape = values[-1].shape
    if net.random.random() < 0.5:
        k = net.add(nn.Linear(shape[1:].numel(), 2))
        return lambda layers, v: layers[k](v[-1].flatten(1))
    k = net.add(nn.Linear(shape[1], 2))
    return lambda layers, v: layers[k](v[-1].mean((-2, -1)))


PIECEWISE_LINEAR = [
    convolution, convolution, convolution, activation, activation, pooling, movement, movement, joined,
    joined, transposed_convolution, write, pointwise,
]  # fmt: skip
OTHERS = [learned_slopes, normalization, normalization, gate, cut, attention]
