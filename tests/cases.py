"""A zoo of tiny networks, one for each thing that the tracer must know.

Every case has a model, an input of any batch size, a loss, and what is known about it by hand: how
many unit classes it has. `oracle(case)` gives its path norm and kappa by brute force.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pathspace as ps
from oracles.squared import Oracle


def _is_optimizer(name: str) -> bool:
    named = getattr(ps.optim, name)
    return isinstance(named, type) and issubclass(named, torch.optim.Optimizer)


OPTIMIZERS = [name for name in ps.optim.__all__ if _is_optimizer(name)]
"""The names of all optimizer classes."""


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    classes: int
    batch_dim: int = 0
    output: Callable[[Any], Tensor] | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    training: bool = False  # traced and run in training form

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """A fresh model in evaluation mode, unless the case says otherwise; the same one for the same seed."""
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            model = self.build()
            _shake(model)
        return model.to(dtype).train(self.training)

    @property
    def normalizes(self) -> bool:
        """Whether it divides by statistics of what it sees: then it is not a sum over paths of fixed edges."""
        return "normalizes" in self.tags

    def example(self, batch: int = 3, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            value = self.inputs(batch)
        return _cast(value, dtype)

    def loss(self, output: Any) -> Tensor:
        return half_mean_square(self.picked(output))

    def picked(self, output: Any) -> Tensor:
        return output if self.output is None else self.output(output)

    def __str__(self) -> str:
        return self.name


def half_mean_square(output: Tensor) -> Tensor:
    """A loss against fixed targets of mixed sign, so that no gradient vanishes by symmetry."""
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return (output - target).square().mean() / 2


def oracle(case: Case, model: nn.Module | None = None) -> Oracle:
    example = case.example(1)
    return Oracle(model or case.model(), example, call=call, output=case.output)


def call(model: nn.Module, example: Any) -> Any:
    """Run a model: a tuple holds positional arguments, a dictionary keyword arguments."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def trace(case: Case, model: nn.Module, *, batch: int = 3, **options: Any) -> Any:
    """The traced network of a case, found from an example of `batch` in the model's precision."""
    example = case.example(batch, dtype=next(model.parameters()).dtype)
    return ps.trace(model, example, output=case.output, **options)


def traced(case: Case, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A fresh model of a case and its network: copies of a pair that a process traces once, which costs far less."""
    return copy.deepcopy(_traced(case, dtype))


@functools.cache
def _traced(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = case.model(dtype)
    return model, trace(case, model)


@functools.cache
def listed(case: Case) -> ps.paths.Paths:
    """All paths of a case, listed once in a process: not to be changed."""
    return ps.paths.enumerate_paths(_traced(case, torch.float64)[1])


def in_turn(
    options: Iterable[str], networks: Sequence[str], *, everywhere: Sequence[str] = ("default",)
) -> list[Any]:
    """Every option with one of the networks, in turn, and those named `everywhere` with all of them."""
    return [
        (chosen, name)
        for number, chosen in enumerate(options)
        for place, name in enumerate(networks)
        if chosen in everywhere or number % len(networks) == place
    ]


def half(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Half of a product of three factors or more, in which any two values of two of them still meet."""
    chosen = itertools.product(*(enumerate(factor) for factor in factors))
    return [
        tuple(value for _, value in one)
        for one in chosen
        if sum(number for number, _ in one) % 2 == 0
    ]


def slow_besides(kept: Iterable[Any], possible: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those kept for every run, and what else is possible as slow ones, for `make test-all`.

    Of those kept, a test that is marked `sample` draws some.
    """
    here = {_named(one): one for one in kept}
    others = [one for one in possible if _named(one) not in here]
    slow = [
        pytest.param(*(one if isinstance(one, tuple) else [one]), marks=pytest.mark.slow)
        for one in others
    ]
    return [*here.values(), *slow]


def _named(one: Any) -> tuple[str, ...]:
    return tuple(map(str, one)) if isinstance(one, tuple) else (str(one),)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value)


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Biases and normalisations away from their start, where zeros and ones hide mistakes."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            for p in module.parameters():
                p.add_(torch.randn_like(p), alpha=0.5)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                module.weight.normal_(1, 0.5)
                module.bias.normal_(0, 0.5)


# --- fully connected ------------------------------------------------------------------------------


def mlp(
    *widths: int, bias: bool = True, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [nn.Linear(width_in, width_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


class Skip(nn.Module):
    """Two hidden layers; input, and first layer, skip to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)
        self.out, self.from_input = nn.Linear(5, 2), nn.Linear(3, 2, bias=False)
        self.from_first = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        a = functional.relu(self.first(x))
        b = torch.relu(self.second(a))
        return self.out(b) + self.from_input(x) + self.from_first(a)


class DeepResidual(nn.Module):
    """x + f(x) three times: all blocks share the scales of the stream."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.embed(x).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(functional.relu(x, inplace=True))


class FunctionalOps(nn.Module):
    """Every spelling of ReLU, and a product with a parameter that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3))
        self.out = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        x = functional.relu(self.a(x))
        x = torch.relu(self.b(x))
        x = self.c(x).clamp(min=0)
        x = (x @ self.weight.t() + self.bias).relu_()
        return torch.matmul(x, self.out)


class ScaledResidual(nn.Module):
    """Fixed and learned factors: 0.1 on a branch, one gain per unit, a division."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        x = self.first(x).relu()
        x = x + 0.1 * self.branch(x).relu() * self.gain
        return self.out(x / 3)


class InPlace(nn.Module):
    """An activation makes a tensor of its own, which may be changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).relu_()
        y = functional.leaky_relu(self.second(x), 0.2)
        y += x
        y.mul_(0.3)
        return self.out(y)


class Siamese(nn.Module):
    """One tower reads both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(3, 4, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, left, right):
        left, right = torch.relu(self.tower(left)), torch.relu(self.tower(right))
        return self.head(torch.cat([left, right], dim=-1))


class SiameseSum(Siamese):
    """Inputs as a dictionary, and the towers added."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        left, right = self.tower(inputs["left"]).relu(), self.tower(inputs["right"]).relu()
        return self.head(left + right)


class SameLayerTwice(nn.Module):
    """A shared layer in depth ties the scales of its input, its output and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).relu()
        for _ in range(3):
            x = self.shared(x).relu()
        return self.out(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(mlp(3, 4, 5), nn.ReLU(inplace=True)), nn.Identity(), nn.Dropout(0.3)
        )
        self.heads = nn.ModuleDict({"main": nn.Linear(5, 2)})

    def forward(self, x):
        return self.heads["main"](self.body(x))


class SplitAndMerge(nn.Module):
    """chunk, split, slices and stack; addition ties units of the first layer in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(6, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).relu()
        left, right = x.chunk(2, dim=1)  # units 0..3 and 4..7
        head, tail = torch.split(left, [3, 1], dim=1)  # units 0..2 and unit 3
        # ties: 0 with 4, 1 with 5, 2 with 6; 3 with 7
        both = head + right[:, :3]
        last = torch.stack([tail[:, 0], right[:, 3]], dim=1)
        merged = torch.cat([both, last, tail + right[:, 3:]], dim=1)
        return self.out(self.second(merged).relu())


class Slices(nn.Module):
    """Slices of one layer go different ways: classes are per unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(3, 6), nn.Linear(3, 4), nn.Linear(3, 2)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).relu()
        return self.out(self.a(x[:, 0:6:2]).relu()) + self.b(x[:, 1::2])


# --- convolutions ---------------------------------------------------------------------------------


class DenseBlock(nn.Module):
    """Each convolution reads everything before it, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1)
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        x = torch.cat([x, self.a(x).relu()], 1)
        x = torch.cat([x, self.b(x).relu()], 1)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class PoolTwice(nn.Module):
    """One pool module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.a, self.b = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x = self.pool(functional.relu(self.a(x)))
        x = self.pool(functional.relu(self.b(x)))
        return self.head(x.view(x.size(0), -1))


class Reshapes(nn.Module):
    """Channels last and back, axes taken apart and put together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv2d(1, 4, 2), nn.Linear(4, 3), nn.Linear(27, 2)

    def forward(self, x):
        x = self.conv(x).relu().permute(0, 2, 3, 1)  # B, 3, 3, 4
        x = self.mix(x).relu().transpose(1, 3)  # B, 3, 3, 3
        x = x.reshape(x.shape[0], 3, 9).unsqueeze(1).squeeze(1).contiguous()
        return self.head(torch.flatten(x, start_dim=1))


class Paddings(nn.Module):
    """Zeros, mirrors, larger images, pixels from channels, sums and means over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 2, padding=1, padding_mode="circular"), nn.Conv2d(1, 3, 3)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        x = functional.pixel_shuffle(self.a(x).relu(), 2)  # four channels of one pixel: one class
        x = functional.pad(functional.interpolate(x, scale_factor=2), (1, 1, 1, 1), mode="reflect")
        x = self.b(functional.pad(x, (0, 2))).relu()
        return self.out(torch.cat([x.mean((2, 3)), x.sum((2, 3)) / 100], dim=1))


class ConvTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.out = nn.Conv1d(2, 1, 1)

    def forward(self, x):
        return self.out(self.up(self.down(x).relu()).relu())


class BatchNormNet(nn.Module):
    """Two normalised convolutions, then a linear head."""

    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3, affine=affine),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4, affine=affine),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(BasicBlock(2, 2, 1), BasicBlock(2, 3, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class NormalizedBlocks(nn.Module):
    """Normalised features, a residual block of them, and a head."""

    def __init__(self, normalize: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.first = nn.Linear(3, 4, bias=False), normalize(4)
        self.inner, self.second = nn.Linear(4, 4, bias=False), normalize(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(self.embed(x)).relu()
        return self.head(h + self.second(self.inner(h)).relu())


class RootMeanSquare(nn.Module):
    """RMSNorm as it is written in Llama."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class NormalizedResidual(nn.Module):
    """Normalised convolutions with padding, one of them strided, and a residual around one without an activation."""

    def __init__(self, normalize: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False), normalize(4)
        self.conv, self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False), normalize(4)
        self.down, self.third = nn.Conv2d(4, 2, 3, stride=2, padding=1, bias=False), normalize(2)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(self.stem(x)).relu()
        x = x + self.second(self.conv(x))
        return self.head(self.third(self.down(x)).relu().flatten(1))


# --- recurrent ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """`nn.RNN` and a linear read-out at the last step or at every step."""

    def __init__(self, *, emit: str = "last", inputs: int = 2, hidden: int = 3, **options) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, nonlinearity="relu", **options)
        self.out = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), 2)
        self.emit = emit

    def forward(self, x):
        hidden, _ = self.rnn(x)
        if self.emit == "last":
            hidden = hidden[:, -1] if self.rnn.batch_first else hidden[-1]
        return self.out(hidden)


class RecurrentTower(nn.Module):
    """One recurrent layer used twice with a residual between, read out by a mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(2, 3)
        self.rnn = nn.RNN(3, 3, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        x = self.read(x)
        once = x + self.rnn(x)[0]
        twice = self.rnn(once.flip(1))[0]
        return self.out(twice[:, 1:].mean(1))


class LearnedStart(nn.Module):
    """The initial state is a parameter: edges from the bias node."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 3, nonlinearity="relu", batch_first=True)
        self.start, self.out = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x):
        start = self.start.expand(1, x.shape[0], 3).contiguous()
        return self.out(self.rnn(x, start)[0][:, -1])


class FinalState(nn.Module):
    """The read-out of `h_n` instead of the output sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 3, 2, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[1][-1])


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(2, 3, nonlinearity="relu")
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        emitted = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            emitted.append(self.out(h))
        return torch.stack(emitted, dim=1)


class HandLoop(nn.Module):
    """The loop that people write: two shared linear layers and a start of zeros."""

    def __init__(
        self, inputs: int = 2, hidden: int = 3, outputs: int = 2, *, emit: str = "last"
    ) -> None:
        super().__init__()
        self.read, self.step = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, outputs)
        self.emit = emit

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.step.in_features, dtype=x.dtype)
        emitted = []
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t]) + self.step(h))
            emitted.append(h)
        return self.out(h) if self.emit == "last" else self.out(torch.stack(emitted, 1))


class HandLoopUnbind(HandLoop):
    """The same with a start from the first step, `unbind`, and outputs returned one by one."""

    def forward(self, x):
        h, emitted = None, []
        for now in x.unbind(1):
            h = self.read(now) if h is None else self.read(now) + self.step(h)
            h = h.relu()
            emitted.append(self.out(h))
        return emitted


class CharacterModel(nn.Module):
    """Embedding, recurrent layer, read-out at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.rnn(self.embedding(x))[0])


class TiedCharacterModel(nn.Module):
    """Input and output embedding are one matrix: its columns' scales are inverse at the two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.rnn = nn.RNN(3, 3, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.rnn(self.embedding(x))[0])


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return functional.linear(self.encoder(x).relu(), self.encoder.weight.t(), self.bias)


class Gated(nn.Module):
    """ReGLU beside a residual stream, whose units are products too."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.skip = nn.Linear(3, 4), nn.Linear(4, 4)
        self.gate, self.up, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 4)
        self.other, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.start(x)
        x = self.skip(x) * self.other(x).relu() + self.down(self.gate(x).relu() * self.up(x))
        return self.out(x)


class SquaredReLU(nn.Module):
    def forward(self, x):
        return x.relu().square()


def _normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def _time_first(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(shape[0], batch, *shape[1:])


def _characters(steps: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, 5, (batch, steps))


def _cnn(*features: nn.Module, flat: int) -> nn.Sequential:
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(flat, 2))


def _tags(*names: str) -> frozenset[str]:
    return frozenset(names)


ZOO: list[Case] = [
    Case("mlp", lambda: mlp(3, 5, 4, 2), _normal(3), 9, tags=_tags("invariance")),
    Case("mlp without bias", lambda: mlp(3, 5, 4, 2, bias=False), _normal(3), 9),
    Case("mlp on sequences", lambda: mlp(3, 4, 2), _normal(5, 3), 4),
    Case("leaky mlp", lambda: mlp(3, 4, 4, 2, activation=lambda: nn.LeakyReLU(0.2)), _normal(3), 8),
    Case(
        "bounds",
        lambda: mlp(3, 4, 2, activation=lambda: ps.nn.Clamp(-0.2, 0.5, (4,), train=True)),
        _normal(3),
        4,
    ),
    Case("one layer", lambda: nn.Linear(3, 2), _normal(3), 0),
    Case("skip", Skip, _normal(3), 9),
    Case("deep residual", DeepResidual, _normal(3), 4 + 15),
    Case("functional", FunctionalOps, _normal(3), 15),
    Case("scaled residual", ScaledResidual, _normal(3), 4 + 4),
    Case("in place", InPlace, _normal(3), 4),
    Case("siamese", Siamese, lambda n: (torch.randn(n, 3), torch.randn(n, 3)), 8),
    Case(
        "siamese by keyword",
        Siamese,
        lambda n: {"left": torch.randn(n, 3), "right": torch.randn(n, 3)},
        8,
    ),
    Case(
        "siamese sum of a dictionary",
        SiameseSum,
        lambda n: ({"left": torch.randn(n, 3), "right": torch.randn(n, 3)},),
        8,
    ),
    Case("same layer twice", SameLayerTwice, _normal(3), 4),
    Case("nested", Nested, _normal(3), 9),
    Case("split and merge", SplitAndMerge, _normal(3), 4 + 4),
    Case("slices", Slices, _normal(3), 6 + 4),
    Case("tied autoencoder", TiedAutoencoder, _normal(4), 0),
    Case(
        "cnn 1d",
        lambda: _cnn(
            nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool1d(3, 2, 1), flat=6
        ),
        _normal(2, 7),
        3,
    ),
    Case(
        "cnn 2d",
        lambda: _cnn(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(4, 4, 2, groups=2, padding=1, dilation=2),
            nn.LeakyReLU(0.1, inplace=True),
            nn.AvgPool2d(2, 1, padding=1),
            flat=36,
        ),
        _normal(1, 5, 5),
        8,
    ),
    Case(
        "cnn 3d",
        lambda: _cnn(
            nn.Conv3d(1, 2, 2, padding=(1, 0, 1)),
            nn.ReLU(),
            nn.MaxPool3d((2, 1, 2), stride=1),
            nn.AvgPool3d(2),
            flat=2,
        ),
        _normal(1, 3, 3, 3),
        2,
    ),
    Case(
        "depthwise",
        lambda: _cnn(
            nn.Conv1d(2, 4, 2, groups=2),
            nn.ReLU(),
            nn.Conv1d(4, 4, 2, groups=4),
            nn.ReLU(),
            nn.Conv1d(4, 3, 1),
            nn.ReLU(),
            flat=9,
        ),
        _normal(2, 5),
        11,
    ),
    Case("convolution transposed", ConvTransposed, _normal(2, 5), 6),
    Case(
        "convolution transposed 2d",
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 3, 2, stride=2), nn.ReLU(), nn.Conv2d(3, 1, 3, padding=1)
        ),
        _normal(2, 2, 3),
        3,
    ),
    Case(
        "overlapping max pool",
        lambda: _cnn(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1, dilation=1), flat=32
        ),
        _normal(1, 5, 5),
        2,
    ),
    Case(
        "dilated max pool",
        lambda: _cnn(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, stride=1, dilation=2), flat=8),
        _normal(1, 5, 5),
        2,
    ),
    Case("pool twice", PoolTwice, _normal(1, 8, 8), 5),
    Case(
        "average pool without padding",
        lambda: _cnn(
            nn.Conv2d(1, 2, 2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False, ceil_mode=True),
            flat=18,
        ),
        _normal(1, 6, 6),
        2,
    ),
    Case(
        "average pool with padding",
        lambda: _cnn(
            nn.Conv2d(1, 2, 2),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, 1, count_include_pad=True, ceil_mode=True),
            flat=18,
        ),
        _normal(1, 6, 6),
        2,
    ),
    Case(
        "adaptive pool",
        lambda: _cnn(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d((3, 2)), flat=12),
        _normal(1, 6, 6),
        2,
    ),
    Case(
        "adaptive max pool",
        lambda: _cnn(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AdaptiveMaxPool2d((3, 2)), flat=12),
        _normal(1, 6, 6),
        2,
    ),
    Case("paddings", Paddings, _normal(1, 3, 3), 1 + 3),
    Case("dense block", DenseBlock, _normal(2, 4, 4), 5),
    Case("reshapes", Reshapes, _normal(1, 4, 4), 7),
    Case("batch norm", BatchNormNet, _normal(1, 4, 4), 7, tags=_tags("invariance")),
    Case(
        "batch norm of vectors",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
        _normal(3),
        4,
    ),
    Case("small resnet", SmallResNet, _normal(1, 4, 4), 2 + 2 + 3 + 3, tags=_tags("invariance")),
    Case(
        "batch norm in training",
        lambda: NormalizedResidual(nn.BatchNorm2d),
        _normal(1, 4, 4),
        4 + 2,
        tags=_tags("invariance", "normalizes"),
        training=True,
    ),
    Case(
        "layer norm",
        lambda: NormalizedBlocks(nn.LayerNorm),
        _normal(3),
        4,
        tags=_tags("invariance", "normalizes"),
    ),
    Case("rms norm", lambda: NormalizedBlocks(nn.RMSNorm), _normal(3), 4, tags=_tags("normalizes")),
    Case(
        "group norm",
        lambda: NormalizedResidual(lambda channels: nn.GroupNorm(2, channels)),
        _normal(1, 4, 4),
        4 + 2,
        tags=_tags("normalizes"),
    ),
    Case("rnn", lambda: Recurrent(batch_first=True), _normal(5, 2), 3, tags=_tags("invariance")),
    Case("rnn without bias", lambda: Recurrent(batch_first=True, bias=False), _normal(4, 2), 3),
    Case("rnn time first", Recurrent, _time_first(4, 2), 3, batch_dim=1),
    Case("rnn every step", lambda: Recurrent(emit="all"), _time_first(4, 2), 3, batch_dim=1),
    Case(
        "stacked rnn",
        lambda: Recurrent(num_layers=3, batch_first=True, emit="all"),
        _normal(4, 2),
        9,
    ),
    Case(
        "stacked rnn with dropout",
        lambda: Recurrent(num_layers=2, batch_first=True, dropout=0.5),
        _normal(4, 2),
        6,
    ),
    Case(
        "bidirectional rnn",
        lambda: Recurrent(bidirectional=True, batch_first=True),
        _normal(4, 2),
        6,
    ),
    Case(
        "stacked bidirectional rnn",
        lambda: Recurrent(num_layers=2, bidirectional=True, batch_first=True, emit="all"),
        _normal(4, 2),
        12,
        tags=_tags("invariance"),
    ),
    Case("recurrent tower", RecurrentTower, _normal(4, 2), 3),
    Case("rnn with a learned start", LearnedStart, _normal(4, 2), 3),
    Case("rnn final state", FinalState, _normal(4, 2), 6),
    Case("rnn cell", CellLoop, _normal(4, 2), 3),
    Case("hand-written loop", HandLoop, _normal(5, 2), 3, tags=_tags("invariance")),
    Case("hand-written loop, every step", lambda: HandLoop(emit="all"), _normal(4, 2), 3),
    Case(
        "hand-written loop, list of outputs",
        HandLoopUnbind,
        _normal(4, 2),
        3,
        output=lambda out: torch.stack(out),
    ),
    Case("characters", CharacterModel, _characters(4), 7),
    Case(
        "language model",
        lambda: ps.nn.LanguageModel(
            5, embedding=2, hidden=2, layers=2, tied=False, weight_drop=0.3, embedding_dropout=0.3
        ),
        _characters(3),
        6,
        output=lambda out: out[0],
    ),
    Case("tied characters", TiedCharacterModel, _characters(4), 3, tags=_tags("invariance")),
]

PRODUCTS: list[Case] = [
    Case("gated", Gated, _normal(3), 4 + 4 + 4 + 5 + 5),
    Case("squared relu", lambda: mlp(3, 4, 2, activation=SquaredReLU), _normal(3), 4),
]
"""Networks that multiply activations: they have no paths, and optimizers in path space refuse them."""

BY_NAME = {case.name: case for case in [*ZOO, *PRODUCTS]}
INVARIANCE = [case for case in ZOO if "invariance" in case.tags]

# Another layout or another way in to the operations of the case beside it. What shows a mistake
# first has all cases: the classes, the path norm, kappa and rescaling against brute force. Longer
# tests have these in `make test-all`.
NEAR_ANOTHER = {
    "mlp without bias": "mlp",
    "mlp on sequences": "mlp",
    "siamese by keyword": "siamese",
    "siamese sum of a dictionary": "siamese",
    "cnn 3d": "cnn 2d",
    "convolution transposed 2d": "convolution transposed",
    "dilated max pool": "overlapping max pool",
    "average pool without padding": "average pool with padding",
    "adaptive max pool": "adaptive pool",
    "batch norm of vectors": "batch norm",
    "stacked rnn with dropout": "stacked rnn",
    "rnn time first": "rnn",
    "rnn final state": "rnn",
    "hand-written loop, list of outputs": "hand-written loop, every step",
}
assert BY_NAME.keys() >= {*NEAR_ANOTHER, *NEAR_ANOTHER.values()}


def of_each_kind(cases: Iterable[Case], *more: Any) -> list[Any]:
    """Parameters of a longer test: cases near another one are slow."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(case, *more, marks=slow if case.name in NEAR_ANOTHER else []) for case in cases
    ]
