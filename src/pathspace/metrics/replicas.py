"""Means over the replicas of data-parallel training, so that all of them keep the same metric.

Each replica reads its own part of the batch. What the metric takes from data with the second
moment, it takes linearly (normalization layers apart), so the mean over the replicas is that of the
whole batch, where the parts are of one size; for the covariance it is the mean of the variances
within the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from pathspace.paths.data.data_dependent import KappaTerms
from pathspace.squared.squares import Outer


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return the rank of this process and the number of processes: (0, 1) without data parallelism.

    Args:
        group: a process group; ``"default"`` is torch's, if there is one; None is none.
    """
    if group is None or not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    members = members_of(group)
    return distributed.get_rank(members), distributed.get_world_size(members)


def members_of(group: Any) -> Any:
    """Return a group as functions of torch.distributed take it, for which None is the default one."""
    return None if group == "default" else group


def any_replica(flag: bool, group: Any) -> bool:
    """Return whether a flag is set in any process of a group, of which each must ask."""
    if rank_and_size(group)[1] == 1:
        return flag
    number = torch.tensor([float(flag)])
    distributed.all_reduce(number, group=members_of(group))
    return bool(number)


def mean_over_replicas(terms: KappaTerms, group: Any) -> KappaTerms:
    """Average the terms of kappa over the processes of a group, all of which must call; all get the same bits."""
    size = rank_and_size(group)[1]
    if size == 1:
        return terms
    parts: list[Tensor] = []
    for value in terms.path.values():
        parts += [value.rows, value.columns] if isinstance(value, Outer) else [value]
    parts += [*terms.data.values(), *terms.cross.values()]
    means = iter(_means(parts, size, group))
    path = {
        name: Outer(next(means), next(means)) if isinstance(value, Outer) else next(means)
        for name, value in terms.path.items()
    }
    data = {name: next(means) for name in terms.data}
    return replace(terms, path=path, data=data, cross={name: next(means) for name in terms.cross})


def root_mean_square(values: Tensor, group: Any) -> Tensor:
    """Return the root mean square over the processes of a group, of which each must ask; the same bits in all."""
    size = rank_and_size(group)[1]
    if size == 1:
        return values
    return _means([values.square()], size, group)[0].sqrt()


def _means(tensors: Sequence[Tensor], size: int, group: Any) -> list[Tensor]:
    """Means of tensors, with one message for each of their types."""
    flat: dict[torch.dtype, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        flat[dtype] = torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype])
        distributed.all_reduce(flat[dtype], group=members_of(group))
        flat[dtype].div_(size)
    start = dict.fromkeys(flat, 0)
    parts = []
    for t in tensors:
        first = start[t.dtype]
        start[t.dtype] = first + t.numel()
        # memory of its own
        parts.append(flat[t.dtype][first : first + t.numel()].view(t.shape).clone())
    return parts
