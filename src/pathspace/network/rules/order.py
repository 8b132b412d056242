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

_DIMENSION = {
    "topk": 1,
    "kthvalue": 1,
    "sort": 0,
    "median": 0,
    "nanmedian": 0,
    "cummax": 0,
    "cummin": 0,
}
_DIMENSION |= {"argsort": 0}
"""Where the dimension stands among the arguments after the tensor."""


def ordered(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace a sort: return the values, in the order and number that the function gives, and their indices."""
    x = recorder.as_units(input)
    name = recorder.name
    func = recorder.func
    if x.kind == "input":
        created = recorder.preprocess(func, (input, *args), kwargs)
        places = created if isinstance(created, Tensor) else created[1]
        if places.dim() == 1 and x.batch == 0:  # examples by their lengths, as for packed sequences
            recorder.bind(places, replace(recorder.value(places), batch=0, order=True))
        return created
    dim = dimension(name, args, kwargs)
    if dim is None:  # the median of all
        return recorder.apply("amax", torch.amax, input)
    dim %= x.labels.dim()
    if x.batch == dim:
        recorder.wrong_batch()
    created = func(torch.empty(x.shape, device="meta"), *args, **kwargs)
    shape = (created if isinstance(created, Tensor) else created[0]).shape
    common = recorder.scales.unify_along(x.labels, (dim,))
    keeps = len(shape) == x.labels.dim()
    labels = (common if keeps else common.squeeze(dim)).expand(shape)

    def squared(t: Tensor) -> Tensor:
        if name in ("cummax", "cummin"):
            return t.cumsum(dim)
        return t.sum(dim, keepdim=keeps).expand(shape)

    batch = x.batch if x.batch is None or keeps else x.batch - (dim < x.batch)
    if name == "argsort":
        return indices(recorder, x, shape, batch)
    values = recorder.emit(squared, [x], labels, dtype=input.dtype, batch=batch, kind=x.kind)
    recorder.note_unit(values)
    return (
        values if name == "msort" else type(created)((values, indices(recorder, x, shape, batch)))
    )


def dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension that a function sorts; None for all of them."""
    if name == "msort":
        return 0
    at = _DIMENSION[name]
    values = [a for a in args if type(a) is not bool]
    dim = kwargs.get("dim", values[at] if len(values) > at else None)
    return -1 if dim is None and "median" not in name else dim


RULES: dict[str, Callable[..., Any]] = dict.fromkeys([*_DIMENSION, "msort"], ordered)
