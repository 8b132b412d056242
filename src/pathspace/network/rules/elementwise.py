"""Operations on single elements: sums, differences and dropout.

A difference is a sum with a fixed edge of weight -1, whose square is that of +1: like a negative
weight it changes the sign of a path's value, never its square, and scales alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.drawn import draws_in_training
from pathspace.network.trace.functions import changes
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED, WILD
from pathspace.network.trace.values import Value, apart, common_kind


def number(value: Any) -> Tensor:
    """Return a Python number as a tensor without loss: float32 would round 0.1."""
    return torch.tensor(float(value), dtype=torch.float64)


def counted(constant: Tensor) -> Tensor:
    """Return the value as which a constant counts that is added, filled in or compared with.

    A number as large as an infinity counts as a mask.

    An infinity itself fits every scale and starts no path, as a zero does: a maximum may pass it
    over.
    """
    large = (constant >= _LARGE) | (constant <= -_LARGE)
    return constant.masked_fill(large, 1.0).masked_fill(constant.isinf(), 0.0)


def as_counted(recorder: Recorder, term: Tensor) -> Tensor:
    """Return a traced term as it is, and a constant as the value that it counts as."""
    if recorder.lookup(term) is not None:
        return term
    counts = counted(term)
    if of := recorder.made_of_buffers(term):
        recorder.of_buffers[id(counts)] = of._replace(constant=counts)
    return counts


def unchanged(recorder: Recorder, input: Tensor, *, in_place: bool) -> Tensor:
    """Return the result of a function of single elements that is the identity in the squared network."""
    value = recorder.value(input)
    if recorder.name.endswith("_") or in_place:
        recorder.check_write(input)
        return recorder.bind(input, value)
    fresh = torch.empty(value.shape, dtype=input.dtype, device="meta")
    return recorder.bind(fresh, apart(value))


def dropout(recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Trace dropout of activations or weights. All paths count, so it is the identity in the squared network."""
    in_place = recorder.name.endswith("_") or option("inplace", 2, args, kwargs, default=False)
    probability = option("p", 0, args, kwargs, default=0.5)
    drops = probability != 0 and draws_in_training(recorder.name, (None, *args), kwargs)
    if not drops and not in_place:
        return input  # torch returns the tensor itself, and a write into it is one into both
    return unchanged(recorder, input, in_place=in_place)


def option(
    name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, default: Any
) -> Any:
    """Return an argument that is given by name, or by position after the input."""
    if name in kwargs:
        return kwargs[name]
    return args[place] if len(args) > place else default


def add(recorder: Recorder, x: Any, y: Any, *, alpha: float = 1) -> Tensor:
    """Trace a sum or difference, whose terms share one scale.

    A parameter is a bias; a constant fixes the scale at 1.
    """
    terms = [t if isinstance(t, Tensor) else number(t) for t in (x, y)]
    a, b = (recorder.value(as_counted(recorder, t)) for t in terms)
    if a.kind == b.kind == "parameter":
        recorder.no_rule(_COMBINED, _APART)
    if "parameter" in (a.kind, b.kind):
        bias, other = (a, b) if a.kind == "parameter" else (b, a)
        labels = add_bias(
            recorder, bias, other.labels.expand(torch.broadcast_shapes(a.shape, b.shape))
        )
    else:
        labels = recorder.scales.unify(a.labels, b.labels)
    reverse = recorder.name == "rsub"  # rsub(x, y) = y - alpha x
    constant = [value.kind == "buffer" for value in (a, b)]

    def squared(u: Tensor, v: Tensor, power: float = 2.0) -> Tensor:
        weight = abs(float(alpha)) ** power
        large = _LARGE**power
        u, v = (
            t.masked_fill(t >= large, 1.0) if of else t
            for t, of in zip((u, v), constant, strict=True)
        )
        return torch.add(v, u, alpha=weight) if reverse else torch.add(u, v, alpha=weight)

    return finish(recorder, squared, (x, y), (a, b), labels, fixed=True)


def add_bias(recorder: Recorder, bias: Value, labels: Tensor) -> Tensor:
    """Add edges from the bias node to units with these labels; return the labels of the sum."""
    n = labels.dim()
    ndim = bias.labels.dim()
    keep = tuple(d for d in range(n - ndim, n) if bias.shape[d - n] > 1)
    target = recorder.scales.unify_over(labels, keep)
    if bool((target == WILD).any()):  # zero plus a bias is a unit of its own
        created = recorder.scales.fresh(target.numel(), recorder.where()).reshape(target.shape)
        target = torch.where(target == WILD, created, target)
    target = target.reshape([labels.shape[d] if d in keep else 1 for d in range(n)])
    of_bias = target.reshape(target.shape[n - ndim :])
    recorder.uses.add(bias, of_bias, torch.full_like(of_bias, FIXED), bias=True)
    return recorder.scales.resolve(target).expand(labels.shape)


def finish(
    recorder: Recorder,
    squared: Callable[..., Tensor],
    operands: Sequence[Any],
    values: Sequence[Value],
    labels: Tensor,
    kind: str | None = None,
    form: Any = None,
    *,
    fixed: bool = False,
) -> Tensor:
    """Emit the result of an operation on two operands, into the first one where its name says so."""
    batch = None
    for value in values:
        if value.batch is not None and value.kind != "parameter":
            before = batch
            batch = value.batch + labels.dim() - value.labels.dim()
            if before not in (None, batch):
                if recorder.examples.count > 1:
                    recorder.mixes()
                recorder.examples.doubtful = True
                batch = None
                break
    kind = kind or common_kind(values)
    types = [t.dtype for t in operands if isinstance(t, Tensor)]
    dtype = torch.promote_types(types[0], types[-1])
    parameter = values[0].name if kind == "parameter" else ""
    out = recorder.emit(
        squared,
        values,
        labels,
        dtype=dtype,
        batch=batch,
        kind=kind,
        parameter=parameter,
        form=form,
        fixed=fixed,
    )
    return recorder.write(operands[0], out) if changes(recorder.name) else out


# with -1e4, -1e9 or torch.finfo(dtype).min people hide elements from a maximum or a softmax
_LARGE = 1e4
_COMBINED = (
    "it combines two parameters into weights that are no parameter, so no edges of their own"
)
_APART = "Apply each of them to the activations and combine the results"

RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ["dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"], dropout
    ),
    **dict.fromkeys(["add", "add_"], add),
    **dict.fromkeys(["sub", "sub_", "rsub"], add),
}
