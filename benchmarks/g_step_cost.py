"""Cost of a whole training step of G-SGD relative to torch.optim.SGD, and of G-Adam relative to torch.optim.AdamW.

Both optimizers train copies of the same model in one process; their steps alternate, and the figure
is the median of the ratios of neighbouring steps. With one thread the time is that of the thread,
so that other programs count as little as possible. Prints one JSON line per figure.

    python benchmarks/g_step_cost.py
    python benchmarks/g_step_cost.py --cases mlp rnn-100x28 --pairs 400
    python benchmarks/g_step_cost.py --output benchmarks/results/g_step_cost-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import paired
import pathspace as ps
from step_cost import LastStep, cnn, mlp


class RecurrentConvolution(nn.Module):
    """A convolutional state that is read and written three times."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.read = nn.Conv2d(3, channels, 3, padding=1)
        self.step = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.out = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        read = self.read(x)
        h = torch.relu(read)
        for _ in range(3):
            h = torch.relu(read + self.step(h))
        return self.out(h.mean((2, 3)))


# model, shape of the input, pairs of steps for a steady median
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "rnn-100x28": (lambda: LastStep(28, 100, 10), (64, 28, 28), 300),
    "rnn-100x784": (lambda: LastStep(1, 100, 10), (64, 784, 1), 25),
    "rnn-1024x50": (lambda: LastStep(28, 1024, 10), (64, 50, 28), 15),
    "mlp": (mlp, (128, 784), 150),
    "cnn": (cnn, (64, 3, 32, 32), 40),
    "recurrent-cnn": (RecurrentConvolution, (32, 3, 32, 32), 40),
}


PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "GSGD": torch.optim.SGD,
    "GAdam": torch.optim.AdamW,
}


def step_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Callable[[], float]:
    """A function that takes one training step and returns its seconds."""
    loss = nn.CrossEntropyLoss()
    clock = time.perf_counter if x.is_cuda or torch.get_num_threads() > 1 else time.thread_time

    def train() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return paired.timed(train, clock, cuda=x.is_cuda)


def measure(
    name: str, device: str, pairs: int | None, optimizer: str = "GSGD"
) -> dict[str, object]:
    """The median of paired ratios for one case."""
    build, shape, usual = CASES[name]
    torch.manual_seed(0)
    model = build().to(device)
    x = torch.randn(shape, device=device)
    y = torch.randint(10, shape[:1], device=device)
    other = copy.deepcopy(model)
    network = ps.trace(other, x[:2])
    # so small a rate that both stay near the start: neither copy may diverge while it is timed
    plain = step_function(model, PLAIN[optimizer](model.parameters(), lr=1e-6), x, y)
    rule = getattr(ps.optim, optimizer)(other.parameters(), network, lr=1e-6)
    ours = step_function(other, rule, x, y)
    ratios, seconds = paired.alternate(ours, plain, pairs or usual)
    return {
        "benchmark": "g_step_cost",
        "case": name,
        "optimizer": optimizer,
        "device": device,
        "threads": torch.get_num_threads(),
        "pairs": len(ratios),
        "plain_milliseconds": paired.milliseconds(seconds),
        **paired.summary(ratios),
        **paired.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--optimizers", nargs="+", choices=sorted(PLAIN), default=["GSGD"])
    parser.add_argument("--pairs", type=int, help="pairs of steps; each case has its own default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = []
    for optimizer in options.optimizers:
        for name in options.cases:
            figures.append(measure(name, options.device, options.pairs, optimizer))
            print(json.dumps(figures[-1]), flush=True)
    paired.write(figures, options.output)


if __name__ == "__main__":
    main()
