"""Cost of a whole training step relative to torch.optim.SGD.

Both optimizers train copies of the same model in one process; their steps alternate, and the figure is the median
of the ratios of neighbouring steps. Prints one JSON line per figure.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --cases mlp rnn-100x28 --pairs 400 --refresh-every 1 10
    python benchmarks/step_cost.py --device cuda --output benchmarks/results/step_cost-cuda.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import pathspace as ps


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and how many pairs of steps give a steady median."""

    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    pairs: int


class LastStep(nn.Module):
    """A ReLU RNN read at its last step."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


CASES = {
    "rnn-100x28": Case(lambda: LastStep(28, 100, 10), (64, 28, 28), 10, 200),
    "rnn-100x784": Case(lambda: LastStep(1, 100, 10), (64, 784, 1), 10, 25),
    "rnn-1024x50": Case(lambda: LastStep(28, 1024, 10), (64, 50, 28), 10, 15),
    "mlp": Case(mlp, (128, 784), 10, 80),
    "cnn": Case(cnn, (64, 3, 32, 32), 10, 40),
}


def step_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], float]:
    """A function that takes one training step and returns its seconds."""
    loss = nn.CrossEntropyLoss()
    cuda = x.is_cuda

    def step() -> float:
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return step


def measure(name: str, refresh_every: int, device: str, pairs: int | None) -> dict[str, object]:
    """The median of paired ratios for one case."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().to(device)
    x = torch.randn(case.inputs, device=device)
    y = torch.randint(case.classes, case.inputs[:1], device=device)
    other = copy.deepcopy(model)
    network = ps.trace(other, x)
    # so small a rate that both stay near the start: neither copy may diverge while it is timed
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
    path = ps.optim.PathSGD(other.parameters(), network, lr=1e-6, refresh_every=refresh_every)
    plain, ours = step_function(model, sgd, x, y), step_function(other, path, x, y)
    for _ in range(max(3, refresh_every)):
        plain()
        ours()
    ratios, seconds = [], []
    count = pairs or case.pairs
    for i in range(count):
        if i % 2:
            theirs, mine = plain(), ours()
        else:
            mine, theirs = ours(), plain()
        seconds.append(theirs)
        ratios.append(mine / theirs)
    if refresh_every > 1:  # the cost comes in every k-th step: compare whole periods
        whole = count // refresh_every * refresh_every
        ratios = [
            statistics.mean(ratios[i : i + refresh_every]) for i in range(0, whole, refresh_every)
        ] or ratios
    ordered = sorted(ratios)
    return {
        "benchmark": "step_cost",
        "case": name,
        "optimizer": "PathSGD",
        "refresh_every": refresh_every,
        "device": device,
        "threads": torch.get_num_threads(),
        "pairs": count,
        "sgd_milliseconds": round(1e3 * statistics.median(seconds), 3),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(ordered[len(ordered) // 4], 4), round(ordered[(3 * len(ordered)) // 4], 4)],
        "torch": torch.__version__,
        "pathspace": ps.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--refresh-every", nargs="+", type=int, default=[1])
    parser.add_argument("--pairs", type=int, help="pairs of steps; each case has its own default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = []
    for refresh in options.refresh_every:
        for name in options.cases:
            figures.append(measure(name, refresh, options.device, options.pairs))
            print(json.dumps(figures[-1]), flush=True)
    if options.output:
        temporary = options.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(figures, indent=1) + "\n")
        temporary.replace(options.output)


if __name__ == "__main__":
    main()
