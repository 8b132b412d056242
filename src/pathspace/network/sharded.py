"""Weights that are split over processes, by FSDP or tensor parallelism.

Every path runs through all layers, so its products need whole weights; a process that has a part of them is told so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor, nn

WHAT_TO_DO = (
    "Path sums need whole weights: keep the model whole in every process (DistributedDataParallel, which trace and all "
    "optimizers know); or balance it once (pathspace.rescaling.balance_), shard it then, and train it with an "
    "optimizer of torch"
)


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether a tensor is split over processes."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def shards(module: nn.Module) -> bool:
    """Whether a module splits its weights, also while it has them whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def expect_whole(parameters: Iterable[Tensor], kind: str) -> None:
    """Refuse parameters that are split over processes.

    Raises:
        ValueError: one is.
    """
    if any(is_sharded(p) for p in parameters):
        raise ValueError(
            f"{kind} was given weights that are split over processes (DTensor, made by FSDP's fully_shard or tensor "
            f"parallelism). {WHAT_TO_DO}"
        )
