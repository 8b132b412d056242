"""The processes of data parallelism, as torchrun starts them: each takes its part of every batch.

    torchrun --nproc-per-node N -m pathspace train ...

The first process leads: it alone reads settings, writes files and shows progress, and tells the others which run comes
next. All of them hold the whole model; DistributedDataParallel averages the gradients, so their weights stay bitwise
alike, and to rounding those of one process with the whole batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import ConfigurationError, LostProcessError

if TYPE_CHECKING:
    import torch
    from torch import nn

PATIENCE = 300.0
"""Seconds that a process may keep the others waiting while all compute. One that dies is missed at once."""
_START = timedelta(minutes=30)  # for all of them to begin
_LONG = timedelta(days=7)  # for waits while one reads data or the first one writes


@dataclass(eq=False)
class Processes:
    """This process among those that do a run together; by default it is alone.

    Attributes:
        rank: Its number; the first one leads.
        count: How many there are.
        waiting: The process group of messages that may take long.
        busy: Whether a run is going on.
    """

    rank: int = 0
    count: int = 1
    waiting: Any = None
    busy: bool = False

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this process's part of what has a batch in its first dimension."""
        each = len(batch) // self.count
        return batch[self.rank * each : (self.rank + 1) * each]

    def mean(self, value: float) -> float:
        """Return the mean of the processes' numbers, the same bits in each."""
        if self.count == 1:
            return value
        import torch

        total = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return total.item() / self.count

    def meet(self) -> None:
        """Wait for the others, however long they read or write, so that no step waits for that."""
        if self.count > 1:
            from torch import distributed

            distributed.barrier(group=self.waiting)

    def any(self, wanted: bool) -> bool:
        """Say whether any of the processes wants something."""
        return self.mean(float(wanted)) > 0

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the first process's value, however long it takes to have one; those of the others do not matter."""
        if self.count == 1:
            return value
        from torch import distributed

        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.waiting)
        return values[0]

    def averaging(self, model: nn.Module) -> nn.Module:
        """Return a model whose backward pass leaves the mean gradients of all processes."""
        if self.count == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Begin runs in here; the others are told when there are no more."""
        try:
            yield
        finally:
            # in the middle of a run the others do not listen; they miss this process as soon as it has ended
            if not self.busy:
                self.from_first(None)

    @contextmanager
    def together(self, job: Any) -> Iterator[None]:
        """Let the others begin a run, too; see `jobs`."""
        self.busy = True
        self.from_first(job)
        yield
        self.busy = False

    def jobs(self) -> Iterator[Any]:
        """Yield the runs that the first process begins, until it ends."""
        while (job := self.from_first(None)) is not None:
            yield job


ALONE = Processes()


def started_by_torchrun() -> int:
    """Return how many processes torchrun has started, this one among them; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first() -> bool:
    """Say whether this process is alone, or the first of those that torchrun has started."""
    return started_by_torchrun() == 1 or os.environ.get("RANK", "0") == "0"


def expect_one(command: str) -> None:
    """Refuse to do in several processes what is done by one.

    Raises:
        ConfigurationError: torchrun has started several.
    """
    count = started_by_torchrun()
    if count > 1:
        raise ConfigurationError(
            f"torchrun started {count} processes, and `pathspace {command}` is not split over them (`train` is): start "
            "it without torchrun."
        )


@contextmanager
def joined(device: str, patience: float = PATIENCE) -> Iterator[Processes]:
    """Join the processes that torchrun has started; without it, a process is alone.

    Args:
        device: `"cpu"`, where they talk by gloo, or `"cuda"`, by NCCL, a GPU for each process of a machine.
        patience: Seconds that one may keep the others waiting while all compute.

    Raises:
        ConfigurationError: There are fewer GPUs than processes, or the patience is no number of seconds.
        LostProcessError: Another one has ended, or does not answer.
    """
    if not 1 <= patience <= _LONG.total_seconds():
        raise ConfigurationError(f"The option --patience is {patience:g}: give seconds, from 1 to a week.")
    count = started_by_torchrun()
    if count == 1:
        yield ALONE
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    if device == "cuda":
        _choose_gpu(torch.cuda.device_count())
    try:
        store = next(iter(rendezvous("env://", timeout=_START)))[0]
        store.set(f"here-{rank}", "")
        store.wait([f"here-{other}" for other in range(count)], _START)  # loading PyTorch is no step
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=patience),
        )
        processes = Processes(rank, count, distributed.new_group(backend="gloo", timeout=_LONG))
        yield processes
        distributed.destroy_process_group()
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        said = str(error).splitlines()[0].split(". ")[0]
        raise LostProcessError(
            f"Process {rank} of {count} stopped, because another one ended, or did not answer for {patience:g} seconds "
            f"({said}). Go on with --resume; if a step takes so long, give more with --patience."
        ) from error


def _choose_gpu(there: int) -> None:
    import torch

    own, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here > there:
        raise ConfigurationError(
            f"torchrun started {here} processes here, for {there} GPUs: give --nproc-per-node {there}, or --device cpu."
        )
    torch.cuda.set_device(own)


def _is_lost(error: RuntimeError) -> bool:
    """Whether an error comes from the messages between processes."""
    from torch import distributed

    return isinstance(error, distributed.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
