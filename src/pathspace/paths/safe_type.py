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
    """Compute non-negative quantities of parameters, again in float64 if they overflow.

    Args:
        network: a traced network.
        parameters: values by name; the network's own if None.
        compute: from parameters to a tensor for each of some of them.

    Returns:
        The tensors, in the parameters' types (float32 for half precision), or all in float64 if a value exceeds
        what those can hold.

    Raises:
        FloatingPointError: a value is not finite even in float64.
    """
    source = network.parameters if parameters is None else parameters
    source = {name: widened(source[name].detach()) for name in network.parameters}
    result = compute(source)
    if _first_overflow(result) is None:
        return result
    result = compute({name: p.double() for name, p in source.items()})
    worst = _first_overflow(result)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, or a recurrent layer "
            "grows beyond 1e308 over its time steps. Use a smaller start for the recurrent weights."
        )
    if all(float(k.max()) <= torch.finfo(source[name].dtype).max for name, k in result.items() if k.numel()):
        return {name: k.to(source[name].dtype) for name, k in result.items()}
    return result


def _first_overflow(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with an infinity or a NaN: the sum of non-negative numbers hides none."""
    return next((name for name, t in tensors.items() if not math.isfinite(float(t.sum()))), None)
