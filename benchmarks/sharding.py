"""Memory of a process and the traffic between processes when FSDP's fully_shard splits a model, on gloo and the CPU.

    python benchmarks/sharding.py --processes 1 2 4

trains an MLP for some steps with each optimizer, in so many processes, and prints one JSON line for
each: bytes of the optimizer's state, the largest amount of memory that tensors took at once during
a step that computes kappa and during one that does not, beyond what lay there before, and the bytes
that were gathered in each of them. All are of one process, the first, and counted at every
operation of torch, not measured at the operating system.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pathspace as ps

OPTIMIZERS = {
    "AdamW": lambda params, _: torch.optim.AdamW(params, lr=1e-3),
    "PathSGD": lambda params, network: ps.optim.PathSGD(
        params, network, lr=0.1, momentum=0.9, refresh_every=2
    ),
    "PathAdam": lambda params, network: ps.optim.PathAdam(
        params, network, lr=1e-3, refresh_every=2
    ),
    "PathMuon": lambda params, network: ps.optim.PathMuon(
        params, network, lr=1e-3, refresh_every=2
    ),
    "PathSOAP": lambda params, network: ps.optim.PathSOAP(
        params, network, lr=1e-3, refresh_every=2
    ),
}


class Memory(TorchDispatchMode):
    """Bytes of the storages that operations make, those that live and the most at once."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.live, self.most, self.gathered = 0, 0, 0
        self._seen = {t.untyped_storage()._cdata for t in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if type(t) is Tensor:
                self._see(t.untyped_storage())
        if "all_gather" in str(func):
            self.gathered += sum(t.nbytes for t in pytree.tree_leaves(result) if type(t) is Tensor)
        if "alltoall" in str(func):
            self.gathered += args[0].nbytes  # what arrives
        return result

    def _see(self, storage: Any) -> None:
        address = storage._cdata
        if address in self._seen:
            return
        self._seen.add(address)
        size = storage.nbytes()
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size


def measured(processes: int, name: str, width: int, depth: int) -> dict[str, Any]:
    """What this process keeps and takes."""
    torch.manual_seed(0)
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 16))
    x = torch.randn(8, width)
    network = ps.trace(model, x)
    if processes > 1:
        from torch.distributed.fsdp import fully_shard

        for module in model:
            if isinstance(module, nn.Linear):
                fully_shard(module)
        fully_shard(model)
    optimizer = OPTIMIZERS[name](model.parameters(), network)
    most, gathered = [], []
    for _ in range(6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        tensors = [t for p in model.parameters() for t in (p, p.grad)]
        with Memory(getattr(t, "_local_tensor", t) for t in tensors if t is not None) as memory:
            optimizer.step()
        most.append(memory.most)
        gathered.append(memory.gathered)
    state: dict[Any, int] = {}
    for entry in (
        *optimizer.state.values(),
        *getattr(getattr(optimizer, "rule", None), "state", {}).values(),
    ):
        for value in entry.values():
            if isinstance(value, Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                state[storage._cdata] = storage.nbytes()
    return {
        "processes": processes,
        "optimizer": name,
        "weights": sum(p.numel() for p in model.parameters()),
        "state": sum(state.values()),
        "refresh": most[4],
        "between": most[5],
        "gathered": gathered[4],
        "gathered_between": gathered[5],
    }


def run(rank: int, processes: int, store: str, names: list[str], width: int, depth: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    if processes > 1:
        method = f"file://{store}/{processes}"
        distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=processes)
    for name in names:
        result = measured(processes, name, width, depth)
        if rank == 0:
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
    if processes > 1:
        distributed.destroy_process_group()


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    args = parser.parse_args()
    for processes in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            spawn(
                run, (processes, folder, args.optimizers, args.width, args.depth), nprocs=processes
            )


if __name__ == "__main__":
    main()
