"""Twenty small networks of every common kind, as they are started, with data and the usual rate of SGD.

Four more were trained with BatchNorm, which was then folded into the convolutions, and are to be
trained on.

Real data from ``PATHSPACE_DATA``: digits at 14 x 14, photographs at 16 x 16, characters. Sizes are
such that a step takes a few milliseconds. Those that are called after a network of torchvision have
its blocks, its start and its order of layers, at a few channels.

Letters: B batch, T time, H hidden, C channels, V vocabulary.
"""

from __future__ import annotations

import copy
import gzip
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.fusion import fuse_conv_bn_eval

from pathspace.experiments.tasks.images import load_mnist

EXAMPLES = 4096
CHARACTERS = 100_000
NORMALIZED, PLAIN, IDENTITY = 0.1, 0.01, 1e-8
"""SGD's rates with momentum 0.9: torchvision's recipes have 0.1 for networks with BatchNorm and 0.01 for AlexNet, VGG
and SqueezeNet, which have none, and for VGG with it; Le, Jaitly and Hinton, 2015, have 1e-8 for
pixels one by one from the identity. (At 1e-4 SGD's first step closes all units for good, at a loss
of 1e5 to 1e17.)"""


@dataclass(frozen=True)
class Case:
    """A network of the zoo.

    Attributes:
        make: the network as it starts, from torch's random state.
        data: all inputs and their labels.
        lr: SGD's usual rate, with momentum 0.9.
        batch: examples in a step.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    lr: float = PLAIN
    batch: int = 32


# -- data ------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where the data are."""
    name = os.environ.get("PATHSPACE_DATA")
    if name is None:
        raise SystemExit("set PATHSPACE_DATA to the folder that holds mnist, cifar10 and ptb")
    return Path(name)


@cache
def _mnist() -> tuple[Tensor, Tensor]:
    """Digits ``[n, 28, 28]`` about zero, and labels."""
    pixels, labels = load_mnist("train", folder())
    return pixels[:EXAMPLES].float().div_(255).sub_(0.1307).div_(0.3081), labels[:EXAMPLES]


def digits() -> tuple[Tensor, Tensor]:
    """``[n, 1, 14, 14]``."""
    pixels, labels = _mnist()
    return F.avg_pool2d(pixels[:, None], 2), labels


def vectors() -> tuple[Tensor, Tensor]:
    """``[n, 196]``."""
    pixels, labels = digits()
    return pixels.flatten(1), labels


def rows() -> tuple[Tensor, Tensor]:
    """``[n, 28, 28]``: a row at a time."""
    return _mnist()


def pixels() -> tuple[Tensor, Tensor]:
    """``[n, 784, 1]``: a pixel at a time, as they are, from 0 to 1."""
    values, labels = _mnist()
    return values.flatten(1)[:, :, None] * 0.3081 + 0.1307, labels


@cache
def photographs() -> tuple[Tensor, Tensor]:
    """``[n, 3, 16, 16]``."""
    data = np.load(folder() / "cifar10" / "cifar10_train20k.npz")
    values = torch.from_numpy(data["images"][:EXAMPLES]).float().div(255).sub(0.5).div(0.25)
    values = values.permute(0, 3, 1, 2) if values.shape[-1] == 3 else values
    return F.avg_pool2d(values, 2).contiguous(), torch.from_numpy(data["labels"][:EXAMPLES]).long()


@cache
def characters() -> tuple[Tensor, Tensor]:
    """Numbers of characters ``[n, 25]``, and of those that come next, ``[n, 25]``."""
    with gzip.open(folder() / "ptb" / "ptb.char.train.txt.gz", "rt", newline="") as file:
        text = file.read(2 * CHARACTERS)[::2]
    numbers = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    stream = torch.tensor([numbers[symbol] for symbol in text])
    n = (len(stream) - 1) // 25
    return stream[: 25 * n].view(n, 25), stream[1 : 25 * n + 1].view(n, 25)


# -- feedforward networks --------------------------------------------------------------------------


def mlp(depth: int, width: int = 64, *, he: bool = False) -> nn.Sequential:
    """``depth`` hidden layers; from He's start, or from PyTorch's."""
    sizes = [196] + [width] * depth
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return he_start(model) if he else model


def he_start(model: nn.Sequential) -> nn.Sequential:
    """He's start of convolutions and linear layers, which keeps the size of what goes through ReLU."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2) times a gain, written by hand as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class ResidualMLP(nn.Module):
    """Blocks x + W relu(V norm(x)), as in a transformer without attention."""

    def __init__(
        self, norm: Callable[[int], nn.Module], *, bias: bool, width: int = 32, blocks: int = 4
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(196, width, bias=bias)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                norm(width),
                nn.Linear(width, 4 * width, bias=bias),
                nn.ReLU(),
                nn.Linear(4 * width, width, bias=bias),
            )
            for _ in range(blocks)
        )
        self.leave = nn.Sequential(norm(width), nn.Linear(width, 10, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


# -- convolutions ----------------------------------------------------------------------------------


def conv(
    before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, *, norm: bool = True
) -> list[nn.Module]:
    """A convolution that keeps the size, and its BatchNorm."""
    padding = kernel // 2
    layer = nn.Conv2d(before, after, kernel, stride, padding, groups=groups, bias=not norm)
    return [layer, nn.BatchNorm2d(after)] if norm else [layer]


def head(channels: int) -> list[nn.Module]:
    """The mean over positions, and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def lenet() -> nn.Sequential:
    """Two convolutions with max-pooling and two linear layers, from PyTorch's start."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def vgg(*, norm: bool) -> nn.Sequential:
    """Pairs of convolutions with max-pooling after each, from He's start."""
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 32)):
        layers += [
            *conv(before, after, norm=norm),
            nn.ReLU(),
            *conv(after, after, norm=norm),
            nn.ReLU(),
        ]
        layers.append(nn.MaxPool2d(2))
    return he_start(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    )


class Residual(nn.Module):
    """relu(x + f(x)), or x + f(x), with a convolution beside f where the shape changes."""

    def __init__(
        self, *layers: nn.Module, beside: list[nn.Module] | None = None, relu: bool = True
    ) -> None:
        super().__init__()
        self.layers, self.beside, self.relu = (
            nn.Sequential(*layers),
            nn.Sequential(*(beside or [])),
            relu,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.beside(x) + self.layers(x)
        return F.relu(x) if self.relu else x


def resnet(*, norm: bool) -> nn.Sequential:
    """Three stages of a basic block."""
    layers: list[nn.Module] = [*conv(3, 8, norm=norm), nn.ReLU()]
    for before, after, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2)):
        beside = conv(before, after, 1, stride, norm=norm) if stride > 1 else None
        first = conv(before, after, 3, stride, norm=norm)
        layers.append(Residual(*first, nn.ReLU(), *conv(after, after, norm=norm), beside=beside))
    return nn.Sequential(*layers, *head(32))


def mobilenet(*, norm: bool) -> nn.Sequential:
    """Depthwise convolutions, each with one over the channels behind it."""
    layers: list[nn.Module] = [*conv(3, 16, 3, 2, norm=norm), nn.ReLU()]
    for before, after, stride in ((16, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [*conv(before, before, 3, stride, before, norm=norm), nn.ReLU()]
        layers += [*conv(before, after, 1, norm=norm), nn.ReLU()]
    model = nn.Sequential(*layers, *head(32))
    return model if norm else he_start(model)


def mnasnet() -> nn.Sequential:
    """Inverted residuals, without ReLU at their narrow ends."""
    layers: list[nn.Module] = [*conv(3, 8, 3, 2), nn.ReLU()]
    layers += [*conv(8, 8, 3, 1, 8), nn.ReLU(), *conv(8, 8, 1)]
    for before, after, stride in ((8, 8, 1), (8, 16, 2), (16, 16, 1)):
        wide = 3 * before
        block = [*conv(before, wide, 1), nn.ReLU(), *conv(wide, wide, 5, stride, wide), nn.ReLU()]
        block += conv(wide, after, 1)
        layers.append(Residual(*block, relu=False) if before == after else nn.Sequential(*block))
    layers += [*conv(16, 32, 1), nn.ReLU()]
    return nn.Sequential(*layers, *head(32))


class Shuffle(nn.Module):
    """A unit of ShuffleNet: half of the channels go past the convolutions, then both halves are interleaved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.layers = nn.Sequential(
            *conv(half, half, 1),
            nn.ReLU(),
            *conv(half, half, 3, 1, half),
            *conv(half, half, 1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        past, through = x.chunk(2, dim=1)
        x = torch.cat([past, self.layers(through)], dim=1)
        B, C, *size = x.shape
        return x.view(B, 2, C // 2, *size).transpose(1, 2).reshape(B, C, *size)


def shufflenet() -> nn.Sequential:
    """Three units, and a convolution with stride between them."""
    return nn.Sequential(
        *conv(3, 16, 3, 2),
        nn.ReLU(),
        Shuffle(16),
        *conv(16, 32, 3, 2),
        nn.ReLU(),
        Shuffle(32),
        Shuffle(32),
        *conv(32, 32, 1),
        nn.ReLU(),
        *head(32),
    )


class Branches(nn.Module):
    """The outputs of several networks, one behind the other in the channels."""

    def __init__(self, *branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def inception() -> nn.Sequential:
    """Two blocks of four branches."""

    def block(before: int) -> Branches:
        def layer(*sizes: int) -> list[nn.Module]:
            return [*conv(*sizes), nn.ReLU()]

        pooled = [nn.AvgPool2d(3, 1, 1), *layer(before, 6, 1)]
        double = [*layer(before, 6, 1), *layer(6, 6), *layer(6, 6)]
        return Branches(
            layer(before, 6, 1), [*layer(before, 4, 1), *layer(4, 6, 5)], double, pooled
        )

    model = nn.Sequential(
        *conv(3, 12, 3, 2), nn.ReLU(), block(12), nn.MaxPool2d(2), block(24), *head(24)
    )
    for module in model.modules():  # as in torchvision
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(module.weight, std=0.1, a=-2, b=2)
    return model


def squeezenet() -> nn.Sequential:
    """Three fire modules without normalization; the last convolution has a ReLU behind it and starts small."""

    def fire(before: int, narrow: int, wide: int) -> list[nn.Module]:
        branches = Branches(
            [nn.Conv2d(narrow, wide, 1), nn.ReLU()],
            [nn.Conv2d(narrow, wide, 3, padding=1), nn.ReLU()],
        )
        return [nn.Conv2d(before, narrow, 1), nn.ReLU(), branches]

    last = nn.Conv2d(32, 10, 1)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        *fire(16, 4, 8),
        *fire(16, 4, 8),
        nn.MaxPool2d(2),
        *fire(16, 8, 16),
        last,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    for module in model.modules():  # as in torchvision
        if isinstance(module, nn.Conv2d):
            if module is last:
                nn.init.normal_(module.weight, std=0.01)
            else:
                nn.init.kaiming_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


# -- folded networks -------------------------------------------------------------------------------


def small_resnet(width: int = 12) -> nn.Sequential:
    """One basic block and a convolution with stride behind it, on digits."""
    block = Residual(*conv(width, width), nn.ReLU(), *conv(width, width))
    stem, down = [*conv(1, width), nn.ReLU()], [*conv(width, 2 * width, 3, 2), nn.ReLU()]
    return nn.Sequential(*stem, block, *down, *head(2 * width))


def folded(name: str) -> Callable[[], nn.Module]:
    """A function that makes a trained network whose BatchNorm is folded; see ``TRAINED``."""
    return lambda: copy.deepcopy(_trained_and_folded(name, torch.initial_seed()))


@lru_cache(maxsize=8)
def _trained_and_folded(name: str, seed: int) -> nn.Module:
    case, steps = TRAINED[name]
    torch.manual_seed(seed)
    model = case.make().train()
    x, y = case.data()
    generator = torch.Generator().manual_seed(1_000_000 + seed)
    if name == "small-resnet":
        rule = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=0.05)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (case.batch,), generator=generator)
        rule.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        rule.step()
        schedule.step()
    fold_(model.eval())
    torch.manual_seed(seed)
    return model.train()


def fold_(model: nn.Module) -> None:
    """Fold each BatchNorm into the convolution in front of it, in place, and let the new biases be trained."""
    for module in list(model.modules()):
        if not isinstance(module, nn.Sequential):
            continue
        for i, (layer, norm) in enumerate(itertools.pairwise(list(module))):
            if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                # fuse_conv_bn_eval makes a bias with requires_grad=False where there was none
                module[i] = fuse_conv_bn_eval(layer, norm).requires_grad_(True)
                module[i + 1] = nn.Identity()


# -- recurrent networks ----------------------------------------------------------------------------


class LastStep(nn.Module):
    """A stack of ReLU layers whose last step is read."""

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, layers, nonlinearity="relu", batch_first=True)
        self.leave = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.rnn(x)[0][:, -1])


def identity_start(model: LastStep) -> LastStep:
    """The start of Le, Jaitly and Hinton, 2015: the identity, and all other weights small."""
    for name, p in model.rnn.named_parameters():
        if "weight_hh" in name:
            nn.init.eye_(p)
        elif "bias" in name:
            nn.init.zeros_(p)
    return model


class Loop(nn.Module):
    """A recurrence written by hand over the rows of a digit."""

    def __init__(self, inputs: int = 28, hidden: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.recur = nn.Linear(hidden, hidden, bias=False)
        self.leave = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = F.relu(self.enter(x[:, 0]))
        for t in range(1, x.shape[1]):
            state = F.relu(self.enter(x[:, t]) + self.recur(state))
        return self.leave(state)


class TiedLanguageModel(nn.Module):
    """Embedding, ReLU layer, and the embedding again as decoder; scores ``[B, T, V]``."""

    def __init__(self, vocabulary: int = 50, hidden: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.rnn = nn.RNN(hidden, hidden, nonlinearity="relu", batch_first=True)
        self.leave = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.leave.weight = self.embedding.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.leave(self.rnn(self.embedding(numbers))[0])


TRAINED = {
    "vgg": (Case(lambda: vgg(norm=True), photographs, NORMALIZED, 32), 600),
    "resnet": (Case(lambda: resnet(norm=True), photographs, NORMALIZED, 32), 600),
    "mobilenet": (Case(lambda: mobilenet(norm=True), photographs, NORMALIZED, 32), 600),
    "small-resnet": (Case(lambda: small_resnet(24), digits, 3e-3, 64), 160),
}
"""How the networks with BatchNorm are trained before they are folded, and in how many steps: with a cosine, by SGD with
momentum 0.9, the last one by AdamW with decay 0.05."""

FOLDED = {
    "folded-vgg": Case(folded("vgg"), photographs, batch=16),
    "folded-resnet": Case(folded("resnet"), photographs, batch=16),
    "folded-mobilenet": Case(folded("mobilenet"), photographs, batch=16),
    "folded-small-resnet": Case(folded("small-resnet"), digits),
}
"""Trained networks without normalization, at the rate that SGD has for such a network from its start."""

ZOO = {
    "mlp": Case(lambda: mlp(2), vectors),
    "deep-mlp": Case(lambda: mlp(16, 32, he=True), vectors),
    "layernorm-mlp": Case(lambda: ResidualMLP(nn.LayerNorm, bias=True), vectors, NORMALIZED),
    "rmsnorm-mlp": Case(lambda: ResidualMLP(RMSNorm, bias=False), vectors, NORMALIZED),
    "lenet": Case(lenet, digits),
    "vgg": Case(lambda: vgg(norm=False), photographs, batch=16),
    "vgg-batchnorm": Case(lambda: vgg(norm=True), photographs, batch=16),
    "resnet": Case(lambda: resnet(norm=True), photographs, NORMALIZED, 16),
    "resnet-plain": Case(lambda: resnet(norm=False), photographs, batch=16),
    "mobilenet": Case(lambda: mobilenet(norm=True), photographs, NORMALIZED, 16),
    "mobilenet-plain": Case(lambda: mobilenet(norm=False), photographs, batch=16),
    "mnasnet": Case(mnasnet, photographs, NORMALIZED, 16),
    "shufflenet": Case(shufflenet, photographs, NORMALIZED, 16),
    "inception": Case(inception, photographs, NORMALIZED, 16),
    "squeezenet": Case(squeezenet, photographs, batch=16),
    "rnn-28": Case(lambda: LastStep(28, 32), rows),
    "rnn-784": Case(lambda: identity_start(LastStep(1, 16)), pixels, IDENTITY, batch=8),
    "stacked-rnn": Case(lambda: LastStep(28, 24, layers=3), rows),
    "loop": Case(Loop, rows),
    "tied-lm": Case(TiedLanguageModel, characters, 0.1, batch=16),
    **FOLDED,
}
