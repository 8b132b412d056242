"""Starts at which geometry by step promised more than balancing once: memory, depth without norms, uneven weights.

Letters: B batch, T time, H hidden, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

import pathspace as ps
from pathspace.experiments.tasks.images import load_mnist
from pathspace.experiments.tasks.task import marked_sequences
from safety_zoo import folder

Batch = tuple[Tensor, Tensor]
HIDDEN, BATCH, TEST = 64, 32, 2000
TEST_SEED = 999_983


def _keeps_all(_: nn.Module) -> Mapping[nn.Parameter, Tensor]:
    return {}


@dataclass(frozen=True)
class Scene:
    """A network at its start, and what it is to learn.

    Attributes:
        make: (seed) -> the network.
        batch: (generator) -> inputs and answers of a training step.
        test: inputs and answers that nothing is trained on.
        loss: (outputs, answers) -> a scalar.
        steps: of training.
        kept: (network) -> for some weights ones where they may differ from zero.
    """

    make: Callable[[int], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    test: Callable[[], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int
    kept: Callable[[nn.Module], Mapping[nn.Parameter, Tensor]] = _keeps_all


# -- memory ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Recurrent layers from the identity and zero biases; input and output weights as PyTorch starts them.

    ``last`` is how many steps are read, from the end.
    """

    def __init__(self, inputs: int, outputs: int, layers: int = 1, last: int = 1) -> None:
        super().__init__()
        self.rnn = ps.nn.RNN(inputs, HIDDEN, layers, nonlinearity="relu", batch_first=True)
        self.readout, self.last = nn.Linear(HIDDEN, outputs), last
        for name, p in self.rnn.named_parameters():
            if "weight_hh" in name:
                nn.init.eye_(p)
            elif "bias" in name:
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Answers ``[B, last, outputs]`` to sequences ``[B, T, inputs]``."""
        return self.readout(self.rnn(x)[0][:, -self.last :])


def _sums(length: int, count: int, generator: torch.Generator) -> Batch:
    x, marked = marked_sequences(count, length, generator)
    return x, marked.sum(1)


def _copies(
    delay: int, count: int, generator: torch.Generator, symbols: int = 8, long: int = 5
) -> Batch:
    """Symbols to be remembered, a pause, a mark, and time to say them: S. Hochreiter and J. Schmidhuber, 1997."""
    asked = torch.randint(symbols, (count, long), generator=generator)
    pause = torch.full((count, delay), symbols)
    mark = torch.full((count, long), symbols + 1)
    return functional.one_hot(torch.cat((asked, pause, mark), 1), symbols + 2).float(), asked


@cache
def _mnist(part: str) -> Batch:
    pixels, labels = load_mnist(part, folder())
    return pixels.float().div_(255), labels


def _pixels(generator: torch.Generator | None) -> Batch:
    """``[B, 784, 1]``: a pixel at a time, in an order that is random and always the same."""
    images, labels = _some(generator)
    order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
    return images.flatten(1)[:, order, None], labels


def _some(generator: torch.Generator | None) -> Batch:
    """A batch of training images ``[B, 28, 28]``, or the first test images."""
    if generator is None:
        images, labels = _mnist("test")
        return images[:TEST], labels[:TEST]
    images, labels = _mnist("train")
    chosen = torch.randint(len(images), (BATCH,), generator=generator)
    return images[chosen], labels[chosen]


def _squares(answers: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(answers.flatten(), y.flatten())


def _symbols(scores: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


# -- depth and images ------------------------------------------------------------------------------


def _images(generator: torch.Generator | None) -> Batch:
    """``[B, 1, 14, 14]``, about zero."""
    images, labels = _some(generator)
    return functional.avg_pool2d(images[:, None].sub(0.1307).div(0.3081), 2), labels


def _vectors(generator: torch.Generator | None) -> Batch:
    images, labels = _images(generator)
    return images.flatten(1), labels


class Residual(nn.Module):
    """Residual blocks without normalization, started as Fixup has it.

    H. Zhang, Y. Dauphin and T. Ma, 2019: the last layer of every block and the classifier start at
    zero, the first one at He's start times L^-1/2 for L blocks. Their scalar shifts are the layers'
    biases here; their multipliers are left out.
    """

    def __init__(self, blocks: int, width: int = HIDDEN) -> None:
        super().__init__()
        self.first = nn.Linear(196, width)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, 10)
        for name, p in self.named_parameters():
            if name.startswith(("first", "up")) and p.dim() == 2:
                nn.init.kaiming_normal_(p, nonlinearity="relu")
            else:
                nn.init.zeros_(p)
            if name.startswith("up"):
                p.detach().mul_(blocks**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[B, 10]`` of images ``[B, 196]``."""
        h = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(functional.relu(up(functional.relu(h))))
        return self.last(functional.relu(h))


class RecurrentImages(nn.Module):
    """A recurrent convolution without normalization, from the identity: h = relu(W u + R h), six times."""

    def __init__(self, channels: int = 16, unfoldings: int = 6) -> None:
        super().__init__()
        self.forth = nn.Conv2d(1, channels, 3, padding=1)
        self.back = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.readout, self.unfoldings = nn.Linear(channels * 49, 10), unfoldings
        nn.init.dirac_(self.back.weight)
        nn.init.zeros_(self.forth.bias)  # pyright: ignore[reportArgumentType] (it is there)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[B, 10]`` of images ``[B, 1, 14, 14]``."""
        entering = self.forth(x)
        h = functional.relu(entering)
        for _ in range(self.unfoldings):
            h = functional.relu(entering + self.back(h))
        return self.readout(functional.avg_pool2d(h, 2).flatten(1))


def _mlp(layers: int = 4) -> nn.Sequential:
    sizes = [196] + [HIDDEN] * layers
    found: list[nn.Module] = []
    for i in range(layers):
        found += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*found, nn.Linear(HIDDEN, 10))


def _heavy(_: int) -> nn.Module:
    """Weights drawn from Student's t with 1.5 degrees of freedom, which has no variance; zero biases.

    The median of their magnitudes is 0.65 of that of He's start.
    """
    model = _mlp()
    draw = torch.distributions.StudentT(1.5)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(
                    draw.sample(layer.weight.shape) * (0.5 * (2 / layer.in_features) ** 0.5)
                )
                nn.init.zeros_(layer.bias)
    return model


def _trained(seed: int, batches: int, steps: int = 300) -> nn.Sequential:
    """An MLP that AdamW has trained, from a seed's start on batches of another."""
    torch.manual_seed(seed)
    model, generator = _mlp(), torch.Generator().manual_seed(batches)
    rule = AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x, y = _vectors(generator)
        rule.zero_grad()
        _symbols(model(x), y).backward()
        rule.step()
    return model


def _pruned(seed: int) -> nn.Module:
    """A trained network of which every matrix but the last keeps a tenth of its weights, the largest."""
    model = _trained(seed, 10_000 + seed)
    with torch.no_grad():
        for layer in list(model)[:-1]:
            if isinstance(layer, nn.Linear):
                w = layer.weight
                w.mul_(w.abs() >= w.abs().flatten().kthvalue(round(0.9 * w.numel())).values)
    return model


def _nonzero(model: nn.Module) -> Mapping[nn.Parameter, Tensor]:
    return {p: (p != 0).to(p) for p in model.parameters() if p.dim() == 2}


def _merged(seed: int) -> nn.Module:
    """The mean of two networks trained on other batches from the same start."""
    model, other = (_trained(seed, batches + seed) for batches in (10_000, 20_000))
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.add_(q).div_(2)
    return model


@cache
def _of_test(draw: Callable[[torch.Generator], Batch]) -> Batch:
    return draw(torch.Generator().manual_seed(TEST_SEED))


def _memory(
    draw: Callable[[int, int, torch.Generator], Batch], length: int, make: Callable[[int], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor], steps: int,
) -> Scene:  # fmt: skip
    def test(generator: torch.Generator) -> Batch:
        return draw(length, TEST, generator)

    return Scene(make, lambda g: draw(length, BATCH, g), lambda: _of_test(test), loss, steps)


def _of_images(
    draw: Callable[[torch.Generator | None], Batch], make: Callable[[int], nn.Module], steps: int,
    kept: Callable[[nn.Module], Mapping[nn.Parameter, Tensor]] = _keeps_all,
) -> Scene:  # fmt: skip
    return Scene(make, draw, cache(lambda: draw(None)), _symbols, steps, kept)


SCENES = {
    # addition in 50 steps by two layers, both from the identity
    "stacked": _memory(_sums, 50, lambda _: Recurrent(2, 1, layers=2), _squares, 800),
    # five symbols over a pause of 20 steps
    "copy": _memory(_copies, 20, lambda _: Recurrent(10, 8, last=5), _symbols, 800),
    "recurrent CNN": _of_images(_images, lambda _: RecurrentImages(), 200),
    "Fixup": _of_images(_vectors, lambda _: Residual(16), 200),
    "heavy tails": _of_images(_vectors, _heavy, 300),
    "pruned": _of_images(_vectors, _pruned, 200, _nonzero),
    "merged": _of_images(_vectors, _merged, 100),
    "pixels": _of_images(_pixels, lambda _: Recurrent(1, 10), 250),
}
