"""Step times of PathMuon and PathSOAP in two data-parallel processes that divide matrices, beside two that do not.

    python benchmarks/divided_steps.py --output benchmarks/results/divided_steps-cpu.json

Each process has one thread. Both train two copies of a transformer, one with ``process_group="default"``
and one without, along the same random gradients, so that only ``step()`` is timed. The two take turns
of ten steps, both processes start each turn together, and the slower process counts. One JSON line
for each figure, with the median and quartiles of the ratios of neighbouring turns, divided to not
divided.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

import pathspace as ps
from paired import alternate, summary
from pathspace.experiments.models import Transformer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "PathMuon": {"lr": 1e-3},
    "PathSOAP": {"lr": 1e-3, "precondition_frequency": 10},
}

STEPS = 10  # of which one refreshes the metric, and one the bases of PathSOAP


def slowest(run: Callable[[], object]) -> Callable[[], float]:
    """A function that runs something ten times in all processes at once, and returns the seconds of the slowest."""

    def turn() -> float:
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            run()
        seconds = torch.tensor(time.perf_counter() - begin)
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        return float(seconds)

    return turn


def stepping(
    model: nn.Module, example: Tensor, name: str, **options: Any
) -> tuple[nn.Module, Callable[[], object]]:
    """A copy of a model with gradients, and a step of it."""
    model = copy.deepcopy(model)
    network = ps.trace(model, example)
    optimizer = getattr(ps.optim, name)(model.parameters(), network, **OPTIMIZERS[name], **options)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model, optimizer.step


def measured(name: str, width: int, layers: int, pairs: int) -> dict[str, Any]:
    """The figures of one optimizer."""
    torch.manual_seed(0)
    model = Transformer(64, 64, hidden=width, layers=layers)
    example = torch.randint(64, (2, 8))
    ours, divided = stepping(model, example, name, process_group="default")
    other, whole = stepping(model, example, name)
    ratios, seconds = alternate(slowest(divided), slowest(whole), pairs, warmup=1)
    return {
        "optimizer": name,
        "processes": distributed.get_world_size(),
        "weights": sum(p.numel() for p in model.parameters()),
        "pairs": pairs,
        "steps_a_turn": STEPS,
        **summary(ratios),
        "milliseconds_a_step_not_divided": round(1e3 * statistics.median(seconds) / STEPS, 1),
        "bitwise_alike": all(
            torch.equal(p, q) for p, q in zip(ours.parameters(), other.parameters(), strict=True)
        ),
        "load_average": round(load_average(), 2),
    }


def load_average() -> float:
    """How many other and own programs wanted a core in the last minute."""
    return float(Path("/proc/loadavg").read_text().split()[0])


def run(
    rank: int, store: str, names: Sequence[str], size: tuple[int, int, int], output: str
) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=2
    )
    lines = []
    for name in names:
        lines.append(json.dumps(measured(name, *size)))
        if rank == 0:
            print(lines[-1], flush=True)
    if rank == 0 and output:
        Path(output).write_text("\n".join(lines) + "\n")
    distributed.destroy_process_group()


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--output", default="", help="a file for the lines, too")
    args = parser.parse_args()
    size = (args.width, args.layers, args.pairs)
    with tempfile.TemporaryDirectory() as store:
        spawn(run, (store, args.optimizers, size, args.output), nprocs=2)


if __name__ == "__main__":
    main()
