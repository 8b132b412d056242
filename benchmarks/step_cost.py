"""Cost of a whole training step relative to torch.optim: time, and peak memory.

Both optimizers train copies of the same model in one process and take turns of ten steps, so that a
step finds in the caches what one of its own kind left there; the time is the median of the ratios
of neighbouring turns. With ``--clock cpu`` the time is the process's own, which others on the
machine do not count in. Memory is what all tensors of a step together take at its peak, above
SGD's, in units of the parameters. Prints one JSON line per figure.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --cases mlp rnn-100x28 --turns 40 --refresh-every 1 10
    python benchmarks/step_cost.py --cases mlp rnn-100x28 \
        --optimizers Invariant-NAdam Invariant-Adafactor
    python benchmarks/step_cost.py --cases rnn-100x28 rnn-64x100 --optimizers PathSGD --fast-rnn
    python benchmarks/step_cost.py --optimizers PathSGD PathAdam --device cuda \
        --variants eager compile graphs --refresh-every 1 10 \
        --output benchmarks/results/step_cost-cuda.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import paired
import pathspace as ps


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and how many turns give a steady median."""

    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    turns: int


class LastStep(nn.Module):
    """A ReLU RNN read at its last step."""

    def __init__(self, inputs: int, hidden: int, classes: int, layers: int = 1) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, layers, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class EveryStep(LastStep):
    """A stack of ReLU RNNs read at every step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0]).flatten(0, 1)


class Block(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.around = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.around(x))


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


def resnet18() -> nn.Module:
    """ResNet-18 as it is used at 32x32."""
    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [
        b
        for before, after, stride in stages
        for b in (Block(before, after, stride), Block(after, after, 1))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Causal pre-norm layers, read at every step."""

    def __init__(self, inputs: int, width: int, classes: int, steps: int, layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.inside = nn.Linear(inputs, width)
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.out = nn.Linear(width, classes)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(steps))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.inside(x), self.mask, is_causal=True)).flatten(0, 1)


CASES = {
    "rnn-100x28": Case(lambda: LastStep(28, 100, 10), (64, 28, 28), 10, 60),
    "rnn-64x100": Case(lambda: LastStep(2, 64, 10), (32, 100, 2), 10, 40),
    "rnn-100x784": Case(lambda: LastStep(1, 100, 10), (64, 784, 1), 10, 6),
    "rnn-1024x50": Case(lambda: LastStep(28, 1024, 10), (64, 50, 28), 10, 4),
    "rnn-4x400x35": Case(lambda: EveryStep(100, 400, 50, layers=4), (40, 35, 100), 50, 6),
    "mlp": Case(mlp, (128, 784), 10, 40),
    "cnn": Case(cnn, (64, 3, 32, 32), 10, 20),
    "transformer": Case(lambda: Transformer(64, 256, 64, 128), (16, 128, 64), 64, 5),
    "resnet18": Case(resnet18, (64, 3, 32, 32), 10, 3),
}


class MuonBesideAdamW:
    """``torch.optim.Muon`` for matrices, filters of a convolution as rows, and ``torch.optim.AdamW`` for vectors."""

    def __init__(self, params: Iterable[Tensor], lr: float, fused: bool | None = None) -> None:
        self.params = list(params)
        self.matrices = {p: nn.Parameter(p.detach().flatten(1)) for p in self.params if p.dim() > 1}
        self.rules = [
            torch.optim.Muon(
                self.matrices.values(), lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [p for p in self.params if p.dim() < 2], lr, weight_decay=0.0, fused=fused
            ),
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def step(self) -> None:
        for p, matrix in self.matrices.items():
            assert p.grad is not None
            matrix.grad = p.grad.flatten(1)
        for rule in self.rules:
            rule.step()


# rules that Invariant can be measured around, a class of ours or none
RULES = (
    "SGD", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
)  # fmt: skip
PLAIN: dict[str, Callable[..., Any]] = {
    "PathSGD": torch.optim.SGD,
    "PathAdam": torch.optim.AdamW,
    "PathRMSprop": torch.optim.RMSprop,
    "PathMuon": MuonBesideAdamW,
    **{f"Invariant-{name}": getattr(torch.optim, name) for name in RULES},
}
HAVE_KERNELS = ("SGD", "AdamW", "MuonBesideAdamW")
"""Whose whole step is a kernel of torch's on a GPU, if it is asked for."""


@dataclass(frozen=True)
class Trial:
    """A model in training."""

    network: Any  # of the traced model; None for the plain optimizer
    rule: torch.optim.Optimizer | MuonBesideAdamW
    parameters: int  # bytes
    step: Callable[[], float]


STEPS = 10
"""Of a turn: whole periods between refreshes of kappa, whose cost comes in every so many steps."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def trial(
    case: Case,
    optimizer: str,
    options: dict[str, Any],
    device: str,
    variant: str,
    clock: str = "wall",
    *,
    plain: bool = False,
    fast_rnn: bool = False,
) -> Trial:
    """A fresh copy of a case with an optimizer, and a function that takes a step and returns its seconds.

    Args:
        case: the case.
        optimizer: one of ours, by its name in ``PLAIN``.
        options: of its metric.
        device: as on the command line.
        variant: one of those of the command line.
        clock: as on the command line.
        plain: take its plain rule in its place.
        fast_rnn: replace every ``nn.RNN`` by ``ps.nn.RNN``.
    """
    torch.manual_seed(0)
    model = case.model().to(device)
    if fast_rnn:
        ps.nn.fast_(model)
    x = torch.randn(case.inputs, device=device)
    with torch.no_grad():
        y = torch.randint(case.classes, model(x).shape[:1], device=device)
    # so small a rate that both stay near the start: neither copy may diverge while it is timed
    network = None
    if plain:
        make = PLAIN[optimizer]
        fused = device.startswith("cuda") and make.__name__ in HAVE_KERNELS
        rule = make(model.parameters(), lr=1e-6, **({"fused": True} if fused else {}))
    else:
        network = ps.trace(model, x)
        if optimizer.startswith("Invariant-"):
            metric = ps.metrics.Path(**options)
            rule = ps.optim.Invariant(
                model.parameters(), network, PLAIN[optimizer], metric=metric, lr=1e-6
            )
        else:
            rule = getattr(ps.optim, optimizer)(model.parameters(), network, lr=1e-6, **options)
    run: Any = model  # or what compiles or captures it
    if variant == "compile":
        run = torch.compile(model)
    elif variant == "graphs":
        run = torch.cuda.make_graphed_callables(model, (x,))
    loss = nn.CrossEntropyLoss()

    def train() -> None:
        rule.zero_grad(set_to_none=variant != "graphs")
        loss(run(x), y).backward()
        rule.step()

    step = paired.timed(train, CLOCKS[clock], cuda=x.is_cuda)
    return Trial(network, rule, sum(p.numel() * p.element_size() for p in model.parameters()), step)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make and that are still alive; ``peak`` is the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_bytes(
    case: Case, optimizer: str, options: dict[str, Any], device: str, *, plain: bool = False
) -> tuple[int, int]:
    """Bytes of all tensors that the first three steps make, at the peak, and of the parameters; see :func:`trial`."""
    made = trial(case, optimizer, options, device, "eager", plain=plain)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            made.step()
        return torch.cuda.max_memory_allocated() - before, made.parameters
    with LiveBytes() as counted:
        for _ in range(3):
            made.step()
    return counted.peak, made.parameters


def memory(name: str, optimizer: str, options: dict[str, Any], device: str) -> float:
    """Peak memory of a step above the plain optimizer's, in units of the parameters."""
    case = CASES[name]
    most, parameters = peak_bytes(case, optimizer, options, device)
    least, _ = peak_bytes(case, optimizer, {}, device, plain=True)
    return round((most - least) / parameters, 3)


def turn(step: Callable[[], float]) -> Callable[[], float]:
    """A function that takes the steps of a turn and returns the mean of their seconds."""
    return lambda: sum(step() for _ in range(STEPS)) / STEPS


def measure(
    name: str,
    refresh_every: int,
    device: str = "cpu",
    turns: int | None = None,
    optimizer: str = "PathSGD",
    variant: str = "eager",
    clock: str = "wall",
    fast_rnn: bool = False,
) -> dict[str, object]:
    """The median of paired ratios for one case, and its memory."""
    case, options = CASES[name], {"refresh_every": refresh_every}
    plain = trial(case, optimizer, {}, device, variant, clock, plain=True).step
    ours = trial(case, optimizer, options, device, variant, clock, fast_rnn=fast_rnn).step
    count = turns or case.turns
    ratios, seconds = paired.alternate(turn(ours), turn(plain), count, warmup=1)
    return {
        "benchmark": "step_cost",
        "case": name,
        "optimizer": optimizer,
        "plain": PLAIN[optimizer].__name__,
        "variant": variant,
        "refresh_every": refresh_every,
        "device": device,
        "clock": clock,
        "fast_rnn": fast_rnn,
        "threads": torch.get_num_threads(),
        "turns": count,
        "plain_milliseconds": paired.milliseconds(seconds),
        **paired.summary(ratios),
        "peak_memory_in_parameters": memory(name, optimizer, options, device),
        **paired.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=sorted(PLAIN),
        default=["PathSGD", "PathAdam", "PathRMSprop", "PathMuon"],
    )
    parser.add_argument(
        "--variants", nargs="+", choices=["eager", "compile", "graphs"], default=["eager"]
    )
    parser.add_argument(
        "--refresh-every",
        nargs="+",
        type=int,
        default=[10],
        help="divisors of ten, the steps of a turn",
    )
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument(
        "--turns", type=int, help="of ten steps each; each case has its own default"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--fast-rnn", action="store_true", help="our copy has ps.nn.RNN, the plain one nn.RNN"
    )
    parser.add_argument("--memory-only", action="store_true", help="count memory, measure no time")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if any(STEPS % every for every in options.refresh_every):
        parser.error(f"--refresh-every must divide {STEPS}, the steps of a turn")
    if "graphs" in options.variants and not options.device.startswith("cuda"):
        parser.error("--variants graphs needs --device cuda")
    figures = []
    for optimizer in options.optimizers:
        for variant in options.variants:
            for refresh in options.refresh_every:
                for name in options.cases:
                    if options.memory_only:
                        given = {"refresh_every": refresh}
                        figure = memory(name, optimizer, given, options.device)
                        print(f"{name} {optimizer} refresh_every={refresh}: {figure}", flush=True)
                        continue
                    figures.append(
                        measure(
                            name,
                            refresh,
                            options.device,
                            options.turns,
                            optimizer,
                            variant,
                            options.clock,
                            options.fast_rnn,
                        )
                    )
                    print(json.dumps(figures[-1]), flush=True)
    paired.write(figures, options.output)


if __name__ == "__main__":
    main()
