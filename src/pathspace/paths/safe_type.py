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
    source = network.parameters if parameters is None else parameters
    source = {name: widened(source[name].detach()) for name in network.parameters}
    result = compute(source)
    if all(_healthy(t) for t in result.values()):
        return result
    result = compute({name: p.double() for name, p in source.items()})
    worst = next((name for name, t in result.items() if not _healthy(t)), None)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, because training diverged "
            "(lower the learning rate or clip), or a recurrent layer grows beyond 1e308 over its time steps (use a "
            "smaller start for its recurrent weights)"
        )
    if all(_fits(k, source[name].dtype) for name, k in result.items()):
        return {name: k.to(source[name].dtype) for name, k in result.items()}
    return result


def _healthy(tensor: Tensor) -> bool:
    """Whether a non-negative tensor holds neither infinity nor NaN, and not only digits lost near zero."""
    if not tensor.numel():
        return True
    limits = torch.finfo(tensor.dtype)
    largest = float(tensor.amax())  # NaN if any element is
    if tensor.dtype == torch.float64:
        return math.isfinite(largest)
    return limits.tiny / limits.eps <= largest <= limits.max


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    limits = torch.finfo(dtype)
    largest = float(tensor.amax()) if tensor.numel() else 0.0
    return largest == 0.0 or limits.tiny / limits.eps <= largest <= limits.max
