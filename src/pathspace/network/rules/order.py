"""Operations that put values in order: ``sort``, ``topk``, ``median``, running maxima.

Each value of the result is one of the values along a dimension, whichever it is: like a maximum it
has a path from any of them, and they share one scale. Where they were is the same at every scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.choice import indices
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value

_DIMENSION = {
    "topk": 1,
    "kthvalue": 1,
    "sort": 0,
    "argsort": 0,
    "median": 0,
    "nanmedian": 0,
    "cummax": 0,
    "cummin": 0,
}
"""The position of ``dim`` among the arguments after the tensor, by function."""


def ordered(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace a sort: return the values, in the order and number that the function gives, and their indices."""
    x = recorder.as_units(input)
    name = recorder.name
    if x.kind == "input":
        return _ordered_inputs(recorder, x, input, args, kwargs)
    dim = dimension(name, args, kwargs)
    if dim is None:  # the median of all
        return recorder.apply("amax", torch.amax, input)
    dim %= x.labels.dim()
    if x.batch == dim:
        recorder.wrong_batch()
    created = recorder.func(torch.empty(x.shape, device="meta"), *args, **kwargs)
    shape = (created if isinstance(created, Tensor) else created[0]).shape
    keeps = len(shape) == x.labels.dim()
    batch = x.batch
    labels = recorder.scales.unify_along(x.labels, (dim,))
    if not keeps:
        labels = labels.squeeze(dim)
        if batch is not None and dim < batch:
            batch -= 1
    if name == "argsort":
        return indices(recorder, x, shape, batch)

    def squared(t: Tensor) -> Tensor:
        if name in ("cummax", "cummin"):
            return t.cumsum(dim)
        return t.sum(dim, keepdim=keeps).expand(shape)

    labels = labels.expand(shape)
    values = recorder.emit(squared, [x], labels, dtype=input.dtype, batch=batch, kind=x.kind)
    recorder.note_unit(values)
    if name == "msort":
        return values
    return type(created)((values, indices(recorder, x, shape, batch)))


def _ordered_inputs(recorder: Recorder, x: Value, input: Tensor, args: Any, kwargs: Any) -> Any:
    """Put inputs in order; examples by their lengths are in an order that packed sequences know."""
    created = recorder.preprocess(recorder.func, (input, *args), kwargs)
    places = created if isinstance(created, Tensor) else created[1]
    if places.dim() == 1 and x.batch == 0:
        recorder.bind(places, replace(recorder.value(places), batch=0, order=True))
    return created


def dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension that a function sorts; None for all of them."""
    if name == "msort":
        return 0
    at = _DIMENSION[name]
    values = [a for a in args if type(a) is not bool]
    dim = kwargs.get("dim", values[at] if len(values) > at else None)
    return -1 if dim is None and "median" not in name else dim


RULES: dict[str, Callable[..., Any]] = dict.fromkeys([*_DIMENSION, "msort"], ordered)
