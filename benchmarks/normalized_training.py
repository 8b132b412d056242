"""Training of a network with BatchNorm at every layer: invariant optimizers against their plain rules.

Inverted residuals (18 layers with BatchNorm in its training form) on 4096 images of CIFAR-10, 160
steps on batches of 64. Prints one JSON line per figure: the mean loss of the last 20 steps, for
each optimizer, learning rate and seed.

    python benchmarks/normalized_training.py
    python benchmarks/normalized_training.py --optimizers SGD PathSGD --seeds 1 --options '{"damping": 0.001}'

The images are those that ``pathspace.experiments`` reads, from ``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pathspace as ps

EXAMPLES, BATCH, STEPS, LAST = 4096, 64, 160, 20
REFRESH, MOMENTUM, DAMPING = 10, 0.9, 0.01

RATES = {
    **dict.fromkeys(["SGD", "PathSGD", "GSGD", "DDPSGD"], (0.01, 0.03, 0.1, 0.3)),
    **dict.fromkeys(["AdamW", "PathAdam", "GAdam", "PathSOAP", "PathMuon"], (0.001, 0.003, 0.01)),
}
COMPARED = ["SGD", "PathSGD", "AdamW", "PathAdam"]


def conv(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm."""
    layer = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(after)]


class InvertedResidual(nn.Module):
    """Wide and depthwise between two narrow ends, with a skip connection around it."""

    def __init__(self, channels: int, wider: int = 3) -> None:
        super().__init__()
        wide = channels * wider
        self.block = nn.Sequential(
            *conv(channels, wide, 1),
            nn.ReLU(),
            *conv(wide, wide, 3, groups=wide),
            nn.ReLU(),
            *conv(wide, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def network() -> nn.Sequential:
    """Two stages of two inverted residuals."""
    stages: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32)):
        stages += [
            *conv(before, after, 3, 2),
            nn.ReLU(),
            InvertedResidual(after),
            InvertedResidual(after),
        ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images() -> tuple[Tensor, Tensor]:
    """Pixels ``[n, 3, 32, 32]`` and labels."""
    folder = os.environ.get("PATHSPACE_DATA")
    if folder is None:
        raise SystemExit("set PATHSPACE_DATA to the folder that holds cifar10/cifar10_train20k.npz")
    data = np.load(Path(folder) / "cifar10" / "cifar10_train20k.npz")
    pixels = torch.from_numpy(data["images"][:EXAMPLES]).float().div(255).sub(0.5).div(0.25)
    pixels = pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels
    return pixels.contiguous(), torch.from_numpy(data["labels"][:EXAMPLES]).long()


def optimizer(
    name: str, model: nn.Module, example: Tensor, lr: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer with the options of this comparison; ``options`` are more for the invariant one."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    make: Callable[..., torch.optim.Optimizer] = getattr(ps.optim, name)
    fixed: dict[str, Any] = {} if name in ("GSGD", "GAdam") else {"refresh_every": REFRESH}
    if name in ("PathSGD", "DDPSGD"):
        fixed |= {"damping": DAMPING}
    if name in ("PathSGD", "DDPSGD", "GSGD"):
        fixed |= {"momentum": MOMENTUM}
    return make(model.parameters(), ps.trace(model, example), lr=lr, **(fixed | options))


def final_loss(
    name: str, lr: float, seed: int, options: dict[str, Any], data: tuple[Tensor, Tensor]
) -> float:
    """The mean loss of the last steps; NaN if training diverged."""
    x, y = data
    torch.manual_seed(seed)
    model = network()
    rule = optimizer(name, model, x[:2], lr, options)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(0, len(x), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.nan
        rule.zero_grad()
        loss.backward()
        try:
            rule.step()
        except FloatingPointError:
            return math.nan
    return float(np.mean(losses[-LAST:]))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=COMPARED)
    parser.add_argument("--rates", nargs="+", type=float, help="instead of those of the optimizer")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help="more options of the invariant optimizers, JSON",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = images()
    for name in given.optimizers:
        for lr in given.rates or RATES[name]:
            for seed in range(given.seeds):
                loss = final_loss(name, lr, seed, given.options, data)
                figure = {"optimizer": name, "lr": lr, "seed": seed, "options": given.options}
                print(json.dumps(figure | {"loss": round(loss, 4)}), flush=True)


if __name__ == "__main__":
    main()
