"""What the data-dependent metric costs and how far its estimate is off: python benchmarks/ddp_cost.py.

Two copies of one model are trained in one process and their whole steps (forward, backward, step)
alternate, so that a busy machine slows both; the figure is the median of the ratios of neighbouring
steps, in processor time of one thread, to `torch.optim.SGD`. The error is ||estimate - exact|| /
||exact|| of the data term over all parameters, at the start, on one batch. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.paths.data.data_dependent import Estimator, Request, kappa_terms
from pathspace.paths.data.node_measure import Statistic
from pathspace.replay.replay import replay


def mlp() -> nn.Module:
    layers = [
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    ]
    return nn.Sequential(*layers)


def small_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


class Recurrent(nn.Module):
    """28 rows of 28 pixels, read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(28, 100, nonlinearity="relu", batch_first=True)
        self.readout = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.rnn(x)[0][:, -1])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP 784-1024-1024-10, B=128": (mlp, (784,), 30),
    "MLP 784-100-100-10, B=128": (small_mlp, (784,), 200),
    "three-layer CNN at 32x32, B=64": (cnn, (3, 32, 32), 12),
    "RNN, H=100, T=28, B=64": (Recurrent, (28, 28), 60),
}
BATCH = {
    "MLP 784-1024-1024-10, B=128": 128,
    "MLP 784-100-100-10, B=128": 128,
    "three-layer CNN at 32x32, B=64": 64,
    "RNN, H=100, T=28, B=64": 64,
}
METHODS: dict[str, dict[str, Any]] = {
    "fresh": {},
    "fresh, half of the batch": {"examples": 0.5},
    "fresh, a quarter of the batch": {"examples": 0.25},
    "every 10 steps": {"refresh_every": 10},
    "every 10 steps, half of the batch": {"refresh_every": 10, "examples": 0.5},
    "every 10 steps, a quarter of the batch": {"refresh_every": 10, "examples": 0.25},
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One whole training step."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def cost(name: str, statistic: Statistic, method: str, rounds: int) -> dict[str, Any]:
    """Median and quartiles of paired ratios; the time of ten steps a pair, so that a refresh is in each."""
    build, shape, _ = CASES[name]
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(BATCH[name], *shape), torch.randint(0, 10, (BATCH[name],))
    plain = copy.deepcopy(model)
    network = ps.trace(model, x)
    options = {"refresh_every": 1, "estimator": "signs", **METHODS[method]}
    ours = ps.optim.DDPSGD(
        model.parameters(), network, lr=1e-3, momentum=0.9, statistic=statistic, **options
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    group = options["refresh_every"]
    ours.metric.refresh_every = 1
    for _ in range(12):  # draws in the average, without which all products are taken
        step(model, ours, x, y)
    ours.metric.refresh_every = group
    ratios, times = [], []
    for i in range(-2, rounds):
        took = []
        for m, optimizer in ((model, ours), (plain, theirs)):
            start = time.process_time()
            for _ in range(group):
                step(m, optimizer, x, y)
            took.append((time.process_time() - start) / group)
        if i >= 0:
            ratios.append(took[0] / took[1])
            times.append(took[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "figure": "cost",
        "case": name,
        "statistic": statistic,
        "method": method,
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "sgd_ms": round(statistics.median(times) * 1e3, 2),
    }


def error(statistic: Statistic, draws: int = 40) -> dict[str, Any]:
    """Relative error of one draw, and of the average with decay 0.9 after many."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 10)
    ).double()
    x = torch.randn(128, 20, dtype=torch.float64)
    network = ps.trace(model, x)
    generator = torch.Generator().manual_seed(0)

    def data(estimator: Estimator, count: int = 128, part: bool = True) -> Tensor:
        request = Request(0.5, statistic, "parameters", estimator, part=part)
        terms = kappa_terms(network, replay(network, x[:count]), request, generator)
        return torch.cat([t.reshape(-1) for t in terms.data.values()])

    exact = data("exact")

    def errors(count: int = 128, part: bool = True) -> dict[str, float]:
        average, weight = torch.zeros_like(exact), 0.0
        single, averaged = [], []
        for i in range(draws):
            one = data("signs", count, part)
            single.append(float((one - exact).norm() / exact.norm()))
            average.lerp_(one, 0.1)
            weight += 0.1 * (1 - weight)
            if i >= draws // 2:
                averaged.append(float((average / weight - exact).norm() / exact.norm()))
        return {
            "one draw": round(statistics.median(single), 3),
            "average, decay 0.9": round(statistics.median(averaged), 3),
        }

    found = {
        "figure": "error",
        "case": "MLP 20-30-30-10, B=128",
        "statistic": statistic,
        **errors(),
    }
    for part, count in (("half of the batch", 64), ("a quarter of the batch", 32)):
        found |= {f"{kind}, {part}": value for kind, value in errors(count).items()}
    return found | {f"{kind}, all products": value for kind, value in errors(part=False).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=float, default=1.0, help="factor of the number of pairs")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument(
        "--error", action=argparse.BooleanOptionalAction, default=True, help="the errors too"
    )
    parser.add_argument("--statistics", nargs="*", default=["second_moment", "covariance"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        {
            "figure": "machine",
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
    ]
    print(json.dumps(lines[0]), flush=True)
    for statistic in given.statistics:
        found: list[Callable[[], dict[str, Any]]] = (
            [partial(error, statistic)] if given.error else []
        )
        for name in given.cases:
            for method in METHODS:
                rounds = max(
                    3, int(CASES[name][2] * given.rounds / (4 if "every" in method else 1))
                )
                found.append(partial(cost, name, statistic, method, rounds))
        for compute in found:
            lines.append(compute())
            print(json.dumps(lines[-1]), flush=True)
    if given.out:
        with given.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
