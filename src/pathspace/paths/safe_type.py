"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.norm import widened


def in_safe_type(
    network: Network,
    parameters: Mapping[str, Tensor] | None,
    compute: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Compute non-negative quantities of parameters, again in float64 if they overflow or vanish.

    Args:
        network: a traced network.
        parameters: values by name; the network's own if None.
        compute: from parameters to a tensor for each of some of them.

    Returns:
        The tensors, in the parameters' types (float32 for half precision), or all in float64 if one of
        them has a largest value that those cannot hold.

    Raises:
        FloatingPointError: a value is not finite even in float64.
    """
    if parameters is None:
        network.check_current()
    source = network.parameters if parameters is None else parameters
    source = {name: widened(source[name].detach()) for name in network.parameters}
    result = compute(source)
    if _first_overflow(result) is None and not any(_vanished(t) for t in result.values()):
        return result
    result = compute({name: p.double() for name, p in source.items()})
    worst = _first_overflow(result)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, or a recurrent layer "
            "grows beyond 1e308 over its time steps. Use a smaller start for the recurrent weights."
        )
    if all(_fits(k, source[name].dtype) for name, k in result.items()):
        return {name: k.to(source[name].dtype) for name, k in result.items()}
    return result


def _first_overflow(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with an infinity or a NaN: the sum of non-negative numbers hides none."""
    return next((name for name, t in tensors.items() if not math.isfinite(float(t.sum()))), None)


def _vanished(tensor: Tensor) -> bool:
    """Whether all of a tensor is zero or so small that it may have lost its digits (very deep networks)."""
    limits = torch.finfo(tensor.dtype)
    return (
        tensor.numel() > 0
        and tensor.dtype != torch.float64
        and float(tensor.amax()) < limits.tiny / limits.eps
    )


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    limits = torch.finfo(dtype)
    largest = float(tensor.amax()) if tensor.numel() else 0.0
    return largest == 0.0 or limits.tiny / limits.eps <= largest <= limits.max
