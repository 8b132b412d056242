"""Weight normalization: w = g v / |v|, the length over the slice that has one gain.

The gain carries the scale of its slice, as in a normalization layer. The length of v is free: each
slice is a class of its own, whose only edges are v. In the squared network

    w^2 = g^2 v^2 / m,     m = sum of v^2 over the slice, held constant in derivatives

(see ``squared.normalization``). Rescaling a single unit before the layer would change lengths. So
the unit is rescaled by the gain of its column, if it has one, or together with all units that share
the gains of their columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.linear import require_parameter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import identity


def weight_norm(recorder: Recorder, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Trace ``torch._weight_norm``: of slices along ``dim``, or of all of v for -1."""
    direction, gain = (require_parameter(recorder, t) for t in (v, g))
    if recorder.strict:
        recorder.no_rule("it divides by the length of a parameter")
    over = tuple(d for d in range(v.dim()) if dim == -1 or d != dim)
    where = recorder.where()
    fixed = torch.full(g.shape, FIXED)
    length, scale = (recorder.scales.fresh(g.numel(), where).reshape(g.shape) for _ in range(2))
    recorder.uses.add(direction, length, fixed)
    recorder.uses.add(gain, scale, fixed)
    length, scale = (recorder.scales.resolve(t).expand(v.shape) for t in (length, scale))
    units = recorder.note_unit(recorder.emit(identity, [direction], length, dtype=v.dtype))

    def inverse(u: Tensor, _: Tensor) -> Tensor:
        m = u.detach().sum(over, keepdim=True)
        return torch.where(m == 0, 0.0, m.reciprocal())

    def squared(u: Tensor, q: Tensor, held: Tensor | None = None) -> Tensor:
        return u * q * (inverse(u, q) if held is None else held)

    parts = [recorder.value(units), gain]
    made = recorder.emit(squared, parts, scale, dtype=v.dtype, form="product", statistic=inverse)
    recorder.normed.add(recorder.value(made).slot)
    return made


RULES: dict[str, Callable[..., Any]] = {"_weight_norm": weight_norm}
