"""Cost of a whole training step with DDP-Normalization relative to the same model with torch.nn.BatchNorm.

Both models train with SGD in one process; their steps alternate, and the figure is the median of
the ratios of neighbouring steps. The two have the same layers; BatchNorm has no affine parameters,
as DDP-Normalization has none. Prints one JSON line per figure.

    python benchmarks/ddp_normalize.py
    python benchmarks/ddp_normalize.py --cases cnn --alphas 1 --statistics covariance --pairs 100
    python benchmarks/ddp_normalize.py --device cuda --output benchmarks/results/ddp_normalize-cuda.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import paired
import pathspace as ps


@dataclass(frozen=True)
class Case:
    """A model without normalization, with a place for BatchNorm after every internal layer."""

    model: Callable[[bool], nn.Sequential]  # with BatchNorm or without
    inputs: tuple[int, ...]
    classes: int
    pairs: int


def mlp(batch_norm: bool) -> nn.Sequential:
    widths, layers = (784, 1024, 1024), []
    for before, after in pairwise(widths):
        layers.append(nn.Linear(before, after, bias=False))
        layers += [nn.BatchNorm1d(after, affine=False)] * batch_norm + [nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def cnn(batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after, affine=False)] * batch_norm + [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


CASES = {"mlp": Case(mlp, (128, 784), 10, 60), "cnn": Case(cnn, (64, 3, 32, 32), 10, 24)}


def step_function(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """A function that takes one training step and returns its seconds."""
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-6)

    def train() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return paired.timed(train, time.perf_counter, cuda=x.is_cuda)


def measure(
    name: str, alpha: float, statistic: str, device: str, pairs: int | None
) -> dict[str, object]:
    """The median of paired ratios for one case."""
    case = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(case.inputs, device=device)
    y = torch.randint(case.classes, case.inputs[:1], device=device)
    theirs = case.model(True).to(device)
    plain = case.model(False).to(device)
    ours = ps.nn.ddp_normalize(plain, ps.trace(plain, x), alpha=alpha, statistic=statistic)
    count = pairs or case.pairs
    ratios, seconds = paired.alternate(
        step_function(ours, x, y), step_function(theirs, x, y), count
    )
    return {
        "benchmark": "ddp_normalize",
        "case": name,
        "alpha": alpha,
        "statistic": statistic,
        "device": device,
        "threads": torch.get_num_threads(),
        "pairs": count,
        "batch_norm_milliseconds": paired.milliseconds(seconds),
        **paired.summary(ratios),
        **paired.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    names = ["covariance", "second_moment"]
    parser.add_argument("--statistics", nargs="+", choices=names, default=names)
    parser.add_argument("--pairs", type=int, help="pairs of steps; each case has its own default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = []
    for name in options.cases:
        for statistic in options.statistics:
            for alpha in options.alphas:
                figures.append(measure(name, alpha, statistic, options.device, options.pairs))
                print(json.dumps(figures[-1]), flush=True)
    paired.write(figures, options.output)


if __name__ == "__main__":
    main()
