"""Sums of which every element has its own members: cumulative sums, ``index_add``, ``fold``; maxima likewise.

They are linear with fixed edges of weight one, so the squared network is the same function. An
element of the result and all that was added to it share one scale. Where the places are inputs, any
element may be added to any place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.rules.elementwise import finish
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import WILD
from pathspace.network.trace.values import Value


def cumulative_sum(
    recorder: Recorder, input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Trace ``cumsum``: all elements along the dimension share one scale."""
    x = recorder.as_units(input)
    dim %= x.labels.dim()
    if x.batch == dim:
        recorder.wrong_batch()
    labels = recorder.scales.unify_along(x.labels, (dim,)).expand(x.shape)

    def squared(t: Tensor) -> Tensor:
        return t.cumsum(dim)

    out = recorder.emit(
        squared, [x], labels, dtype=dtype or input.dtype, batch=x.batch, kind=x.kind
    )
    return recorder.note_linear(out)


def add_at(
    recorder: Recorder,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Any = None,
    *,
    alpha: float = 1,
    **named: Any,
) -> Tensor:
    """Trace ``index_add`` and ``scatter_add``, which add summands to some elements of a tensor."""
    source = named["src"] if source is None else source
    base = recorder.as_units(input)
    more = recorder.as_units(source)
    of_index = recorder.lookup(index)
    dim %= base.labels.dim()
    if dim in (base.batch, more.batch):
        recorder.wrong_batch()
    by_element = recorder.name.startswith("scatter")
    shape = index.shape if by_element else more.shape
    part = tuple(slice(n) for n in shape)  # of the source, what is read
    if of_index is not None:
        return _anywhere(recorder, (input, source), base, more, dim, part, float(alpha))
    places = torch.arange(base.labels.numel()).reshape(base.shape)
    elements = index.detach().cpu().clone()
    places = places.gather(dim, elements) if by_element else places.index_select(dim, elements)
    labels = labels_at(recorder, base.labels, places, more.labels[part])
    accumulate = torch.scatter_add if by_element else torch.index_add

    def squared(b: Tensor, s: Tensor, power: float = 2.0) -> Tensor:
        weight = abs(float(alpha)) ** power
        return accumulate(b, dim, elements.to(b.device), s if weight == 1 else s * weight)

    return finish(recorder, squared, (input, source), (base, more), labels, fixed=True)


def reduce_at(
    recorder: Recorder,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Trace ``scatter_reduce``: a sum, or a maximum, of which every member can be on a path."""
    del include_self
    if reduce not in ("sum", "amax", "amin"):
        recorder.no_rule("its means and products have no rule; divide a sum by a number of members")
    return recorder.note_unit(add_at(recorder, input, dim, index, src))


def _anywhere(
    recorder: Recorder, operands: Any, base: Value, more: Value, dim: int, part: Any, alpha: float
) -> Tensor:
    """Trace a sum whose positions are inputs: every element along the dimension may receive every summand."""
    added = recorder.scales.unify_along(more.labels[part], (dim,))
    size = tuple(n if d != dim else 1 for d, n in enumerate(added.shape))
    if any(n != m for d, (n, m) in enumerate(zip(size, base.shape, strict=True)) if d != dim):
        recorder.no_rule(
            "it adds to a part of a tensor at places that are inputs", "Cut that part out first"
        )
    labels = recorder.scales.unify(base.labels, added)

    def squared(b: Tensor, s: Tensor, power: float = 2.0) -> Tensor:
        return b + abs(alpha) ** power * s[part].sum(dim, keepdim=True)

    return finish(recorder, squared, operands, (base, more), labels, fixed=True)


def labels_at(recorder: Recorder, base: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """Return the labels of a sum: those of ``base`` and, at each flat position, those of all that is added to it."""
    n = base.numel()
    both = torch.cat([base.reshape(-1), labels.reshape(-1)])
    place = torch.cat([torch.arange(n), places.reshape(-1)])

    def largest(t: Tensor) -> Tensor:
        return t.new_full((n,), -math.inf).scatter_reduce(0, place, t, "amax")

    return recorder.scales.unify_groups(both, largest).reshape(base.shape)


def fold(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace ``fold``, which adds overlapping patches."""
    x = recorder.as_units(input)
    if x.batch is not None and x.batch == x.labels.dim() - 2:
        recorder.wrong_batch()
    func = recorder.func
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    named = dict(
        zip(("output_size", "kernel_size", "dilation", "padding", "stride"), args, strict=False)
    )
    options = {k: v for k, v in {**named, **kwargs}.items() if k != "output_size"}
    # the place of every element of a patch, counted from one: zero is padding
    numbers = torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).reshape(shape)
    places = F.unfold(numbers, **options).long()
    wild = torch.full((shape.numel() + 1,), WILD)
    labels = labels_at(recorder, wild, places, x.labels)[1:].reshape(shape)

    def squared(t: Tensor) -> Tensor:
        return func(t, *args, **kwargs)

    out = recorder.emit(squared, [x], labels, dtype=input.dtype, batch=x.batch, kind=x.kind)
    return recorder.note_linear(out)


RULES: dict[str, Callable[..., Any]] = {
    "cumsum": cumulative_sum,
    **dict.fromkeys(["index_add", "index_add_", "scatter_add", "scatter_add_"], add_at),
    **dict.fromkeys(["scatter_reduce", "scatter_reduce_"], reduce_at),
    "fold": fold,
}
