"""What a step of every optimizer costs beyond the model's own passes, by counting: work, memory traffic, messages.

Every operation that PyTorch dispatches during ten steps (one refresh of kappa and nine others, by
default) is counted: the bytes of the tensors that it reads and writes, and its arithmetic, 2 m n k
for a product of matrices and one for each element otherwise (twelve in fused Adam). The passes of
the model itself are counted apart and taken off. Messages are those that the processes of
DistributedDataParallel really exchange, over gloo on this machine. All figures are per weight, of
an MLP with square matrices. ``--refresh`` sets the time of a refresh beside that of sending its
result.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --processes 1 --widths 2048 --optimizers PathSGD PathAdam DDPAdam
    python benchmarks/scaling.py --processes 1 --optimizers PathSGD PathAdam --refresh-every 1
    python benchmarks/scaling.py --refresh --widths 512 2048 --processes 2 4
    python benchmarks/scaling.py --output benchmarks/results/scaling.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import pathspace as ps
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.soap import SOAP

LAYERS, BATCH, PERIOD = 4, 16, 10
PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "SOAP": lambda p: SOAP(p, 1e-3),
    "Muon": lambda p: MuonAdamW(p, 1e-3),
}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "PathSGD": ("PathSGD", {"lr": 1e-3, "momentum": 0.9}),
    "PathAdam": ("PathAdam", {"lr": 1e-3}),
    "PathRMSprop": ("PathRMSprop", {"lr": 1e-3}),
    "PathGradientAdam": ("PathGradientAdam", {"lr": 1e-3}),
    "PathSOAP": ("PathSOAP", {"lr": 1e-3}),
    "PathMuon": ("PathMuon", {"lr": 1e-3}),
    "Invariant AdamW": ("Invariant", {"rule": torch.optim.AdamW, "lr": 1e-3}),
    "GSGD": ("GSGD", {"lr": 1e-4}),
    "GAdam": ("GAdam", {"lr": 1e-4}),
    "DDPSGD": ("DDPSGD", {"lr": 1e-3, "momentum": 0.9}),
    "DDPAdam": ("DDPAdam", {"lr": 1e-3}),
    "QuasiDiagonal": ("QuasiDiagonal", {"lr": 1e-3, "damping": 0.1}),
}
MOVED = (
    "copy_",
    "clone",
    "_to_copy",
    "cat",
    "stack",
    "zeros",
    "ones",
    "full",
    "fill_",
    "zero_",
    "arange",
    "index",
)
SENT = ("allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_scatter_")


class Count(TorchDispatchMode):
    """Bytes that operations read and write, their arithmetic, and the bytes that are handed to messages."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name.startswith("c10d::"):
            if name.removeprefix("c10d::") in SENT:
                self.total["sent"] += sum(map(bytes_of, tensors(args)))
        elif not function.is_view and "empty" not in name:
            read = tensors((args, {k: v for k, v in (kwargs or {}).items() if k != "out"}))
            written = tensors((result, [args[i] for i in changed(function) if i < len(args)]))
            self.total["bytes"] += sum(map(bytes_of, read)) + sum(map(bytes_of, written))
            self.total["operations"] += arithmetic(
                function, name, args, kwargs or {}, result, read, written
            )
        return result


def changed(function: Any) -> list[int]:
    """The numbers of the arguments that an operation writes to; one on lists of tensors returns nothing."""
    infos = [a.alias_info for a in function._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]


def tensors(values: Any) -> list[Tensor]:
    """The tensors among nested values, each once, without single numbers."""
    some = {id(t): t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.dim()}
    return list(some.values())


def bytes_of(t: Tensor) -> int:
    """What a tensor has in memory: an expanded one has less than its elements."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def arithmetic(
    function: Any,
    name: str,
    args: Any,
    kwargs: Any,
    result: Any,
    read: list[Tensor],
    written: list[Tensor],
) -> int:
    packet = function.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if name.removeprefix("aten::").removeprefix("_foreach_").startswith(MOVED):
        return 0
    factor = 12 if "_fused_adam" in name else 1
    if factor > 1:
        written = tensors(args[0])
    each = factor * sum(t.numel() for t in written if t.is_floating_point())
    return max(each, max((t.numel() for t in read if t.is_floating_point()), default=0))


def mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def memory() -> int:
    """The bytes of all tensors that are alive."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), Tensor) and t.device.type == "cpu"
    }
    return sum(storages.values())


def made(name: str, parameters: list[nn.Parameter], network: Any, refresh_every: int | None) -> Any:
    if network is None:
        return PLAIN[name](parameters)
    kind, options = OURS[name]
    more = {} if refresh_every is None else {"refresh_every": refresh_every}
    return getattr(ps.optim, kind)(parameters, network, **options, **more)


def counted(name: str, width: int, refresh_every: int | None) -> dict[str, Any]:
    """Figures of one optimizer, per weight, in a process that may be one of several."""
    model, processes = mlp(width), distributed.get_world_size()
    weights = sum(p.numel() for p in model.parameters())
    x = torch.randn(BATCH, width)
    network = None if name in PLAIN else ps.trace(model, x)
    run = DistributedDataParallel(model) if processes > 1 else model
    free: Any = torch.optim.SGD(model.parameters(), 0.0)
    steps(run, x, free, count=2)  # DDP arranges its buckets in the first ones
    passes = steps(run, x, None, count=PERIOD)
    before = memory()
    optimizer = made(name, list(model.parameters()), network, refresh_every)
    steps(run, x, optimizer, count=PERIOD)  # the first ones refresh more often
    kept = memory() - before
    done = steps(run, x, optimizer, count=PERIOD)
    per = {key: (done[key] - passes[key]) / PERIOD / weights for key in ("bytes", "operations")}
    return {
        "optimizer": name,
        "processes": processes,
        "weights": weights,
        "kept_bytes": round(kept / weights, 2),
        "moved_bytes": round(per["bytes"], 1),
        "operations": round(per["operations"], 1),
        "sent_gradient_bytes": round(passes["sent"] / PERIOD / weights, 3),
        "sent_metric_bytes": round((done["sent"] - passes["sent"]) / PERIOD / weights, 3),
    }


def steps(run: nn.Module, x: Tensor, optimizer: Any, count: int) -> Counter[str]:
    with Count() as counter:
        for _ in range(count):
            run.zero_grad(set_to_none=False)
            run(x).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
    run.zero_grad(set_to_none=False)
    return counter.total


def refresh(width: int) -> dict[str, Any]:
    """Seconds of a step of PathSGD with a refresh and without one, and of sending one number per weight."""
    model = mlp(width)
    weights = sum(p.numel() for p in model.parameters())
    network = ps.trace(model, torch.zeros(1, width))
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.0, refresh_every=2)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(4):
        optimizer.step()
    seconds = [timed(optimizer.step) for _ in range(10)]
    values = torch.zeros(weights)
    return {
        "weights": weights,
        "processes": distributed.get_world_size(),
        "refresh_seconds": round(min(seconds[0::2]) - min(seconds[1::2]), 5),
        "broadcast_seconds": round(
            min(timed(lambda: distributed.broadcast(values, 0)) for _ in range(5)), 5
        ),
    }


def timed(do: Callable[[], object]) -> float:
    distributed.barrier()
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def spawn(processes: int, arguments: list[str]) -> list[dict[str, Any]]:
    """Figures that the first of several processes on this machine prints."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "STORE": f"{folder}/store",
            }
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, __file__, "--member", *arguments]
            started.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
        said, _ = started[0].communicate()
        if any(each.wait() for each in started):
            raise SystemExit("a process failed")
    return [json.loads(line) for line in said.splitlines()]


def member(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store, rank, size = (os.environ[key] for key in ("STORE", "RANK", "WORLD_SIZE"))
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size)
    )
    for width in options.widths:
        if options.refresh:
            print(json.dumps(refresh(width)), flush=True)
            continue
        for name in options.optimizers:
            print(json.dumps(counted(name, width, options.refresh_every)), flush=True)
    distributed.destroy_process_group()


def shown(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print figures as they come."""
    for figure in figures:
        print(json.dumps(figure), flush=True)
    return figures


def table(figures: Iterable[dict[str, Any]]) -> str:
    """The figures as a table of Markdown."""
    rows = list(figures)
    keys = list(rows[0])
    lines = [f"| {' | '.join(keys)} |", f"|{' --- |' * len(keys)}"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(str(row[key]) for key in keys)} |" for row in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PLAIN, *OURS]
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--widths", nargs="+", type=int, default=[256])
    parser.add_argument(
        "--refresh-every", type=int, help="of optimizers that take it; default theirs, 10"
    )
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(options)
        return
    arguments = ["--widths", *map(str, options.widths), "--optimizers", *options.optimizers]
    if options.refresh_every is not None:
        arguments += ["--refresh-every", str(options.refresh_every)]
    figures = []
    for processes in options.processes:
        figures += shown(
            spawn(processes, [*arguments, *(["--refresh"] if options.refresh else [])])
        )
    print(table(figures))
    if options.output:
        options.output.write_text("".join(f"{json.dumps(figure)}\n" for figure in figures))


if __name__ == "__main__":
    main()
