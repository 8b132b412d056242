"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.squares import Outer, dense
from pathspace.paths.norm import widened

Values = dict[str, Tensor | Outer]


def in_safe_type(
    network: Network,
    parameters: Mapping[str, Tensor] | None,
    compute: Callable[[Mapping[str, Tensor]], Values],
) -> Values:
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
    if all(_fits(size, t.dtype) for size, t in zip(_largest(result.values()), result.values(), strict=True)):
        return result
    # factors of a product that fits need not fit themselves
    result = {k: dense(v) for k, v in compute({name: p.double() for name, p in source.items()}).items()}
    sizes = dict(zip(result, _largest(result.values()), strict=True))
    worst = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, because training diverged "
            "(lower the learning rate or clip), or a recurrent layer grows beyond 1e308 over its time steps (use a "
            "smaller start for its recurrent weights)"
        )
    if all(size == 0.0 or _fits(size, source[name].dtype) for name, size in sizes.items()):
        return {name: k.to(source[name].dtype) for name, k in result.items()}
    return dict(result)


def _largest(values: Iterable[Tensor | Outer]) -> list[float]:
    """The largest element of each, NaN if any element is; 1 for those without elements. One synchronisation."""
    known: dict[int, Tensor] = {}
    found = []
    for value in values:
        factors = (value.rows, value.columns) if isinstance(value, Outer) else (value,)
        for t in factors:
            if id(t) not in known:  # biases share their kappa
                known[id(t)] = t.amax() if t.numel() else t.new_ones(())
        largest = [known[id(t)] for t in factors]
        found.append(largest[0] if len(largest) == 1 else largest[0] * largest[1])
    return torch.stack(found).tolist() if found else []


def _fits(largest: float, dtype: torch.dtype) -> bool:
    """Whether a type holds a largest value, and not only digits lost near zero."""
    limits = torch.finfo(dtype)
    if dtype == torch.float64:
        return math.isfinite(largest)
    return limits.tiny / limits.eps <= largest <= limits.max
