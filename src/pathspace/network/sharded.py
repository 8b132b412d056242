"""Weights that FSDP or tensor parallelism shards over processes, and the operations that support them.

A network that was traced before FSDP's ``fully_shard`` follows the parameters that replaced its
own. Kappa is computed from full weights, which are gathered one after the other (see
``squared.sharding``). Other sums over paths need all full weights at once, and refuse shards with an
error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pathspace.squared.sharding import is_sharded, layout_refused

WHAT_TO_DO = (
    "Trace the model before FSDP's fully_shard splits it, and make the optimizer after, of model.parameters(): "
    "PathSGD, PathAdam, PathRMSprop, PathGradientAdam, PathMuon, PathSOAP, or Invariant with a rule such as "
    "torch.optim.AdamW, with the metric Path (without second_term) or Balanced. Or keep the model whole in every "
    "process (DistributedDataParallel, which trace and all optimizers know); or balance it before "
    "(pathspace.rescaling.balance_) and train it with an optimizer of torch"
)


def shards(module: nn.Module) -> bool:
    """Return whether a module shards its weights, also while it has gathered them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def flattened(model: nn.Module) -> bool:
    """Return whether FullyShardedDataParallel has flattened the weights of a model or of a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules())
    if fsdp is None or any(isinstance(module, fsdp.FSDPModule) for module in modules):
        return False
    # a mark for torch.compile
    return any(getattr(module, "_is_fsdp_managed_module", False) for module in modules)


def refused(kind: str) -> ValueError:
    """Return the error of an optimizer that cannot train sharded weights."""
    return ValueError(
        f"{kind} was given weights that are split over processes (DTensor, made by FSDP's fully_shard or tensor "
        f"parallelism). {WHAT_TO_DO}"
    )


def follow(name: str, traced: Tensor, now: Any, split: Mapping[str, Any]) -> None:
    """Look at a parameter that took the place of the one that was traced.

    Args:
        name: of the parameter.
        traced: what was traced, or followed since.
        now: what the model has.
        split: other parameters that are split.

    Raises:
        RuntimeError: the network cannot follow it.
    """
    if is_sharded(traced):
        if is_sharded(now):
            raise RuntimeError(
                f"the model's parameter '{name}' was split over processes anew since the network last followed it: "
                "trace the whole model again, shard it then, and make a new optimizer"
            )
        raise RuntimeError(
            f"the model's parameter '{name}' is whole at present: FSDP gathered it for a forward pass without a "
            "backward pass (or with set_reshard_after_backward(False)). Call reshard() of the model's FSDP modules "
            "first"
        )
    why = layout_refused(now, traced.shape)
    if not why and any(p.device_mesh != now.device_mesh for p in split.values()):
        why = (
            "over another mesh than other parameters: give all fully_shard(..., mesh=...) the same"
        )
    if why:
        raise RuntimeError(
            f"the model's parameter '{name}' was split over processes {why}. {WHAT_TO_DO}"
        )
