"""What tracing costs: CPU time of one thread, and how far memory rises above what was in use before.

Every case runs in a process of its own. Prints one JSON line per case.

    python benchmarks/trace_cost.py
    python benchmarks/trace_cost.py --cases resnet50
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import pathspace as ps


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a skip connection."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.branch = nn.Sequential(
            *(
                nn.Conv2d(channels_in, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.skip = nn.Identity()
        if stride != 1 or channels_in != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.skip(x))


def resnet50() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), torch.zeros(2, 3, 224, 224)


class Loop(nn.Module):
    """A recurrent network written by hand, one step at a time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.read, self.step = nn.Linear(1, hidden), nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.step.in_features)
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t]) + self.step(h))
        return self.out(h)


def mlp() -> tuple[nn.Module, Tensor]:
    layers = (
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    return nn.Sequential(*layers), torch.zeros(2, 784)


def billion() -> tuple[nn.Module, Tensor]:
    """1.07 billion weights, none of which is in memory."""
    with torch.device("meta"):
        layers = [layer for _ in range(4) for layer in (nn.Linear(16_384, 16_384), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.zeros(2, 16_384)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet50": resnet50,
    "loop-128x784": lambda: (Loop(128), torch.zeros(2, 784, 1)),
    "mlp": mlp,
    "mlp-4x16384-meta": billion,
}


def measure(name: str) -> dict[str, object]:
    torch.set_num_threads(1)
    model, example = CASES[name]()
    # what is imported and set up once
    ps.trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), torch.zeros(2, 1))
    before, start = peak(), time.process_time()
    network = ps.trace(model, example)
    seconds = time.process_time() - start
    weights = sum(p.numel() for p in network.parameters.values())
    return {
        "case": name,
        "weights": weights,
        "classes": network.num_classes,
        "seconds": round(seconds, 2),
        "megabytes": round(peak() - before),
    }


def peak() -> float:
    """Most memory that the process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def print_each(
    cases: Iterable[str], measured: Callable[[str], dict[str, object]], file: str, about: str | None
) -> None:
    """The command line of such a program: a JSON line for each case, measured in a process of its own."""
    names = list(cases)
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(names), default=names)
    parser.add_argument("--here", action="store_true", help="in this process, for a single case")
    options = parser.parse_args()
    for name in options.cases:
        if options.here:
            print(json.dumps(measured(name)), flush=True)
        else:
            subprocess.run([sys.executable, file, "--here", "--cases", name], check=True)


if __name__ == "__main__":
    print_each(CASES, measure, __file__, __doc__)
