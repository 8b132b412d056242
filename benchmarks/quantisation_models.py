"""The two models of ``quantisation``, their training, and what is done to known pairs of their layers by hand.

The CNN has inverted residuals with depthwise convolutions, the kind of network that cross-layer
equalization was made for; its BatchNorm is folded into the convolutions before anything is rounded,
as deployment does. The transformer is the character GPT of ``pathspace reproduce transformer``,
with RMSNorm, rotary attention and SwiGLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from pathspace.experiments.models import Transformer
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task

Layer = nn.Linear | nn.Conv2d


class Inverted(nn.Module):
    """x + project(relu(depthwise(relu(expand(x))))); without the sum where the shape changes."""

    def __init__(self, enters: int, leaves: int, stride: int) -> None:
        super().__init__()
        inside = 4 * enters
        self.expand, self.depthwise, self.project = (
            nn.Conv2d(enters, inside, 1, bias=False),
            nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False),
            nn.Conv2d(inside, leaves, 1, bias=False),
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(channels) for channels in (inside, inside, leaves)
        )
        self.skips = enters == leaves and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.expand(x)))
        h = functional.relu(self.norms[1](self.depthwise(h)))
        h = self.norms[2](self.project(h))
        return x + h if self.skips else h


class InvertedCNN(nn.Module):
    """A convolution, six inverted residuals at three sizes, an average, ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(16)
        shapes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1)]
        self.blocks = nn.Sequential(*(Inverted(*shape) for shape in shapes))
        self.scores = nn.Linear(40, 10)

    def forward(self, images: Tensor) -> Tensor:
        h = self.blocks(functional.relu(self.norm(self.stem(images))))
        return self.scores(h.mean((2, 3)))

    def folded(self) -> InvertedCNN:
        """Itself, in evaluation form, with every BatchNorm in the convolution before it."""
        self.eval()
        assert isinstance(self.norm, nn.BatchNorm2d)
        self.stem, self.norm = fuse_conv_bn_eval(self.stem, self.norm), nn.Identity()
        block: Any
        for block in self.blocks:
            for i, name in enumerate(("expand", "depthwise", "project")):
                setattr(block, name, fuse_conv_bn_eval(getattr(block, name), block.norms[i]))
                block.norms[i] = nn.Identity()
        return self


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is trained.

    Attributes:
        title: what tables call it.
        task: (folder of the data) -> the task.
        make: a fresh model.
        lr: largest rate of AdamW, which falls along a cosine.
        batch: examples in a step.
        steps: how many.
        finish: what is done to the trained model before it is rounded.
        by_hand: name -> a change of known pairs of layers that keeps the function, given
            calibration inputs.
    """

    title: str
    task: Callable[[Path | None], Task]
    make: Callable[[Task], nn.Module]
    lr: float
    batch: int
    steps: int
    finish: Callable[[nn.Module], nn.Module]
    by_hand: dict[str, Callable[[nn.Module, Tensor], None]]

    def trained(self, task: Task, seed: int, steps: int) -> nn.Module:
        """A model after training on one seed."""
        torch.manual_seed(seed)
        model = self.make(task)
        rule = torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)
        for step in range(steps):
            warm, turn = min(1.0, (step + 1) / (0.05 * steps)), math.pi * step / steps
            rule.param_groups[0]["lr"] = self.lr * warm * (1 + math.cos(turn)) / 2
            chosen = torch.randint(len(task.train), (self.batch,))
            rule.zero_grad()
            task.loss(model(task.train.inputs[chosen]), task.train.targets[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rule.step()
        return self.finish(model).eval()


# -- by hand ---------------------------------------------------------------------------------------


def _rows(weight: Tensor) -> Tensor:
    return weight.abs().flatten(1).amax(1)


def _columns(layer: Layer) -> Tensor:
    """The largest |w| that reads every input of a layer."""
    weight = layer.weight.detach()
    depthwise = isinstance(layer, nn.Conv2d) and layer.groups > 1
    return _rows(weight) if depthwise else _rows(weight.transpose(0, 1))


def _divide_columns(layer: Layer, scales: Tensor) -> None:
    depthwise = isinstance(layer, nn.Conv2d) and layer.groups > 1
    shape = (
        (-1, *[1] * (layer.weight.dim() - 1))
        if depthwise
        else (1, -1, *[1] * (layer.weight.dim() - 2))
    )
    layer.weight.div_(scales.reshape(shape))


@torch.no_grad()
def equalize_by_hand(pairs: Sequence[tuple[Layer, Layer]], sweeps: int = 100) -> None:
    """Cross-layer equalization of pairs of layers: s = sqrt(r2 / r1) at every unit between them, again and again."""
    for _ in range(sweeps):
        for first, second in pairs:
            scales = (
                (_columns(second) / _rows(first.weight).clamp_min(1e-12)).sqrt().clamp(1e-6, 1e6)
            )
            first.weight.mul_(scales.reshape(-1, *[1] * (first.weight.dim() - 1)))
            if first.bias is not None:
                first.bias.mul_(scales)
            _divide_columns(second, scales)


def _pairs(model: Any) -> Iterator[tuple[Layer, Layer]]:
    """Layers with nothing but free units between them, which nothing else reads."""
    for block in model.blocks:
        if isinstance(model, Transformer):
            yield block.attention.values, block.attention.out
            yield block.mlp.up, block.mlp.down
        else:
            yield block.expand, block.depthwise
            yield block.depthwise, block.project


@torch.no_grad()
def smooth_by_hand(model: Any, calibration: Tensor, alpha: float = 0.5) -> None:
    """SmoothQuant: s = max |x|^alpha / max |w|^(1 - alpha) of every feature between a norm and the layers behind it."""
    pairs: list[tuple[nn.RMSNorm, list[nn.Linear]]] = [(model.norm, [model.readout])]
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        pairs.append(
            (block.before_attention, [attention.queries, attention.keys, attention.values])
        )
        pairs.append((block.before_mlp, [mlp.gate, mlp.up]))
    ranges = input_ranges(model, calibration, [layers[0] for _, layers in pairs])
    for (norm, layers), values in zip(pairs, ranges, strict=True):
        weights = torch.stack([_columns(layer) for layer in layers]).amax(0)
        scales = values.clamp_min(1e-9) ** alpha / weights.clamp_min(1e-9) ** (1 - alpha)
        norm.weight.div_(scales)
        for layer in layers:
            layer.weight.mul_(scales)


def input_ranges(model: nn.Module, calibration: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """The largest |x| of every input feature of some linear layers."""
    seen: dict[int, Tensor] = {}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[id(layer)] = args[0].detach().abs().flatten(0, -2).amax(0)

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    with torch.no_grad():
        model(calibration)
    for hook in hooks:
        hook.remove()
    return [seen[id(layer)] for layer in layers]


CASES = {
    "cnn": Case(
        "CNN with inverted residuals, CIFAR-10 at 16 x 16: test loss",
        lambda folder: build_task(
            "images",
            {
                "data": "cifar10",
                "pool": 2,
                "train_size": 18_000,
                "validation_size": 1_000,
                "test_size": 500,
            },
            data_dir=folder,
        ),
        lambda _: InvertedCNN(),
        lr=3e-3,
        batch=64,
        steps=400,
        finish=lambda model: model.folded() if isinstance(model, InvertedCNN) else model,
        by_hand={
            "cross-layer equalization by hand": lambda m, _: equalize_by_hand(list(_pairs(m))),
        },
    ),
    "transformer": Case(
        "Transformer with SwiGLU, Penn Treebank: nats per character",
        lambda folder: build_task(
            "characters", {"length": 64, "context": 0, "test_size": 10_000}, data_dir=folder
        ),
        lambda task: Transformer(task.input_size, task.output_size, hidden=96, layers=2),
        lr=5e-3,
        batch=16,
        steps=600,
        finish=lambda model: model,
        by_hand={
            "cross-layer equalization by hand": lambda m, _: equalize_by_hand(list(_pairs(m))),
            "SmoothQuant by hand": smooth_by_hand,
        },
    ),
}
