"""Matrix work divided over processes: each computes a share of the results, and all processes get all of them.

Two layouts: every process has all matrices (DistributedDataParallel), or every process has some rows
of each matrix (FSDP). In both, every matrix has one process that does its work, its owner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pathspace.metrics.replicas import members_of, rank_and_size

SHARD_OF = "_shard_of"
"""Attribute of a tensor: the parameter that is split over processes, of which it has some rows."""

Compute = Callable[[Sequence[int]], Sequence[Sequence[Tensor]]]
"""Returns the results of some jobs, by their indices: one or several tensors for each."""


def expect_group(group: Any) -> None:
    """Refuse what is no group of processes.

    Raises:
        ValueError: it is neither None, ``"default"`` nor a process group.
    """
    if group is None or group == "default":
        return
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise ValueError(
            'process_group must be None, "default" or a process group of torch.distributed, '
            f"got {group!r}"
        )


def divides(group: Any) -> bool:
    """Return whether a group has several processes, this one among them."""
    return rank_and_size(group)[1] > 1


def group_of(rule: Optimizer) -> Any:
    """Return the processes that divide the work of a rule; None if it knows of none."""
    return getattr(rule, "process_group", None)


@contextmanager
def undivided(rule: Any) -> Iterator[None]:
    """Let a rule do all work in this process, as in a step that other processes may not take."""
    group = group_of(rule)
    if group is None:
        yield
        return
    rule.process_group = None
    try:
        yield
    finally:
        rule.process_group = group


class DividedRule(Optimizer):
    """Base of rules that divide their work over processes which have the same gradients.

    Args:
        params: parameters or param groups.
        defaults: options that groups may have of their own.
        process_group: the processes; see :class:`pathspace.optim.PathMuon`.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], process_group: Any) -> None:
        expect_group(process_group)
        super().__init__(params, defaults)
        self.process_group = process_group
        self._is_known_equal = False

    def __getstate__(self) -> dict[str, Any]:
        own = {"process_group": self.process_group, "_is_known_equal": False}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._take()
        return loss

    @abstractmethod
    def _take(self) -> None:
        """Take a step of all groups."""

    def _expect_equal_once(self, params: Iterable[Tensor]) -> None:
        """Look at the first step that is divided whether all processes have the same gradients."""
        if self._is_known_equal or not divides(self.process_group):
            return
        wholes = [p for p in params if not hasattr(p, SHARD_OF)]
        expect_equal([p.grad for p in wholes if p.grad is not None], self.process_group)
        self._is_known_equal = True


def shared_out(costs: Sequence[int], size: int) -> list[int]:
    """Return the owner of each job, from 0 to ``size - 1``; the same answer in all processes.

    The costliest job comes first, and goes to the process that has the least work by then.
    """
    loads = [0] * size
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        owner = loads.index(min(loads))
        owners[job] = owner
        loads[owner] += costs[job]
    return owners


def compute_in_shares(
    compute: Compute, costs: Sequence[int], results: Sequence[Sequence[Tensor]], group: Any
) -> None:
    """Fill tensors with results, each computed by its owner and broadcast from there.

    Args:
        compute: see ``Compute``.
        costs: of each job, the same in all processes.
        results: the tensors of each job, of the same shapes and types in all processes.
        group: the processes, of which each must call; see ``rank_and_size``.
    """
    rank, size = rank_and_size(group)
    owners = shared_out(costs, size)
    own = [job for job, owner in enumerate(owners) if owner == rank]
    for job, values in zip(own, compute(own), strict=True):
        for result, value in zip(results[job], values, strict=True):
            result.copy_(value)
    _send_to_all(results, owners, group)


def _send_to_all(results: Sequence[Sequence[Tensor]], owners: Sequence[int], group: Any) -> None:
    """Broadcast the tensors of each job from its owner."""
    # one message from each owner, for each device and type; all processes send them in one order
    shares: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for owner, tensors in zip(owners, results, strict=True):
        for tensor in tensors:
            shares.setdefault((owner, tensor.device, tensor.dtype), []).append(tensor)
    messages = [torch.cat([result.flatten() for result in share]) for share in shares.values()]
    pending = [
        distributed.broadcast(message, group=members_of(group), group_src=owner, async_op=True)
        for (owner, *_), message in zip(shares, messages, strict=True)
    ]
    for work, message, share in zip(pending, messages, shares.values(), strict=True):
        assert work is not None
        work.wait()
        # the owner copies its own bits
        _unpack_into(share, message)


def _unpack_into(tensors: Sequence[Tensor], message: Tensor) -> None:
    """Copy a message, which holds one tensor after the other, into these tensors."""
    parts = message.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def expect_equal(gradients: Sequence[Tensor], group: Any) -> None:
    """Look whether all processes of a group have the same gradients, to the last bit.

    Raises:
        RuntimeError: they have not. It is raised in all of them.
    """
    total = sum(_sum_of_bits(gradient) for gradient in gradients) % 2**62
    device = gradients[0].device if gradients else None
    found = torch.tensor([len(gradients), total, -len(gradients), -total], device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=members_of(group))
    most_of_them, largest, fewest, smallest = found.tolist()
    if most_of_them != -fewest or largest != -smallest:
        raise RuntimeError(
            "process_group divides the work over processes that have the same gradients, but these processes have "
            "different ones: wrap the model in DistributedDataParallel and start all from the same weights, or leave "
            "process_group out"
        )


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's elements, of which each is read as an integer of its bits."""
    kind = _INTEGERS[tensor.element_size()]
    return int(tensor.contiguous().view(kind).sum(dtype=torch.int64))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their number of bytes."""


class Exchange:
    """Exchanges sharded matrices between processes: gathers each full matrix in its owner, and shards it again.

    Args:
        shapes: of the full matrices.
        costs: of the work with each.
        mesh: the processes, over which FSDP has sharded the rows.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], costs: Sequence[int], mesh: Any) -> None:
        self._shapes = shapes
        self._group = mesh.get_group()
        self._rank, self._size = rank_and_size(self._group)
        self._owners = shared_out(costs, self._size)
        self.own = self._jobs_of(self._rank)
        """The jobs of this process."""

    def to_owners(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the full matrices of this process's own jobs.

        Args:
            parts: the rows in this process of all matrices.
        """
        outgoing = [[parts[job] for job in self._jobs_of(process)] for process in range(self._size)]
        incoming = [
            [self._shape(job, process) for job in self.own] for process in range(self._size)
        ]
        received = self._sent(outgoing, incoming, parts[0])
        return [torch.cat(pieces) for pieces in zip(*received, strict=True)]

    def to_all(self, matrices: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return the rows in this process of all matrices.

        Args:
            matrices: this process's own jobs.
            like: a tensor of their type and device.
        """
        outgoing: list[list[Tensor]] = [[] for _ in range(self._size)]
        for job, matrix in zip(self.own, matrices, strict=True):
            rows = [self._shape(job, process)[0] for process in range(self._size)]
            for pieces, piece in zip(outgoing, matrix.split(rows), strict=True):
                pieces.append(piece)
        incoming = [
            [self._shape(job, self._rank) for job in self._jobs_of(process)]
            for process in range(self._size)
        ]
        parts: dict[int, Tensor] = {}
        for process, pieces in enumerate(self._sent(outgoing, incoming, like)):
            parts.update(zip(self._jobs_of(process), pieces, strict=True))
        return [parts[job] for job in range(len(self._shapes))]

    def first_row(self, job: int) -> int:
        """Return the place in the whole matrix of the first row of this process."""
        rows = self._shapes[job][0]
        return min(rows, self._rank * -(-rows // self._size))

    def _jobs_of(self, process: int) -> list[int]:
        return [job for job, owner in enumerate(self._owners) if owner == process]

    def _shape(self, job: int, process: int) -> tuple[int, int]:
        """Return the shape of the rows of a matrix that a process has."""
        rows, columns = self._shapes[job]
        each = -(-rows // self._size)
        return max(0, min(each, rows - process * each)), columns

    def _sent(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[tuple[int, int]]],
        like: Tensor,
    ) -> list[list[Tensor]]:
        """Send tensors to every process, and return those received from every process.

        Args:
            outgoing: for each process, the tensors for it.
            incoming: for each process, the shapes of its tensors for this one.
            like: a tensor of their type and device.
        """
        pieces: list[Tensor] = []
        for to_process in outgoing:
            pieces += [piece.reshape(-1) for piece in to_process]
        message = torch.cat(pieces) if pieces else like.new_empty(0)
        sent_sizes = [sum(piece.numel() for piece in each) for each in outgoing]
        received_sizes = [sum(rows * columns for rows, columns in each) for each in incoming]
        received = like.new_empty(sum(received_sizes))
        distributed.all_to_all_single(
            received, message, received_sizes, sent_sizes, group=self._group
        )
        # free the message before anything else takes memory
        del message, pieces
        result = []
        start = 0
        for shapes in incoming:
            tensors = []
            for rows, columns in shapes:
                end = start + rows * columns
                tensors.append(received[start:end].view(rows, columns))
                start = end
            result.append(tensors)
        return result
