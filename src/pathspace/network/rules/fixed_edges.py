"""Fixed edges from few elements: negation, neighbours subtracted, triangles of matrices.

A fixed edge of weight c is c^2 in the squared network, whatever its sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.elementwise import finish
from pathspace.network.rules.products import scaled
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import identity


def negative(recorder: Recorder, input: Tensor) -> Tensor:
    """Trace ``-x``: a fixed edge of weight -1 from every element, also of a parameter."""
    value = recorder.value(input)
    return finish(recorder, identity, (input,), (value,), value.labels, value.kind)


def triangle(recorder: Recorder, input: Tensor, diagonal: int = 0) -> Tensor:
    """Trace ``tril`` and ``triu`` as products with zeros and ones."""
    mask = recorder.func(torch.ones(input.shape[-2:], dtype=torch.float64), diagonal)
    return scaled(recorder, input, (input,), mask)


def difference(
    recorder: Recorder,
    input: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Trace ``diff``, n differences of neighbours, as fixed edges of binomial coefficients of either sign."""
    ends = [t for t in (prepend, input, append) if t is not None]
    x = input if len(ends) == 1 else recorder.apply("cat", torch.cat, ends, dim)
    value = recorder.as_units(x)
    dim %= value.labels.dim()
    if value.batch == dim:
        recorder.wrong_batch()
    n = min(n, value.shape[dim])  # more leave nothing, as in torch
    size = value.shape[dim] - n
    labels = value.labels.narrow(dim, 0, size)
    for k in range(n):
        labels = recorder.scales.unify(labels, value.labels.narrow(dim, k + 1, size))

    def squared(t: Tensor, power: float = 2.0) -> Tensor:
        # (D^n x)_i = sum_k (-1)^(n - k) C(n, k) x_(i + k)
        terms = [t.narrow(dim, k, size) * math.comb(n, k) ** power for k in range(n + 1)]
        return torch.stack(terms).sum(0)

    return finish(recorder, squared, (x,), (value,), labels, fixed=True)


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["neg", "neg_"], negative),
    "diff": difference,
    **dict.fromkeys(["tril", "triu"], triangle),
}
