"""Linear maps: ``linear``, ``matmul`` and their kin with a parameter as the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.rules.contraction import Form, contract, matmul_form
from pathspace.network.rules.elementwise import add, add_bias
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value


def require_parameter(recorder: Recorder, weight: Tensor) -> Value:
    """Return the value of a weight, which must be a parameter or a view of one."""
    value = recorder.value(weight)
    if value.kind == "hidden":
        recorder.no_rule(
            "its weight is computed from activations (which multiplies two of them) or joined from several parameters, "
            "whose elements are then no edges of their own",
            "Apply each parameter to the activations and combine the results, or leave that part to the plain rule "
            "with outside=[...]",
        )
    if value.kind != "parameter":
        recorder.no_rule(
            "its weight is no parameter of the model",
            "Register it as an nn.Parameter (requires_grad=False)",
        )
    if not weight.numel():
        recorder.refuse(
            f"its weight of shape {tuple(weight.shape)} has no elements, so no path leads through it",
            "Build the model without that layer, or leave its module outside",
        )
    return value


def linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Trace y = x W^T + b with W of shape ``[out, in]``: edges from the features of x to those of y."""
    of_weight = recorder.lookup(weight)
    if of_weight is None or of_weight.kind in ("input", "buffer"):
        return _fixed(recorder, input, weight, bias)
    normed = of_weight.slot in recorder.normed
    x = recorder.as_units(input)
    w = of_weight if normed else require_parameter(recorder, weight)
    _check_features(recorder, x, w)
    vector = w.labels.dim() == 1  # a weight that is a vector has one output
    outputs = 1 if vector else w.shape[0]
    source = recorder.scales.unify_over(x.labels, (-1,))
    if normed:
        labels = by_normed(recorder, w, source)
        form = "product"
    else:
        labels = map_units(recorder, w, outputs, source, vector=vector)
        form = None if vector else "linear"
    values = [x, w]
    if bias is not None:
        b = recorder.value(bias)
        if b.kind != "parameter":
            recorder.no_rule("its bias is no parameter of the model")
        labels = add_bias(recorder, b, labels)
        values.append(b)
    labels = labels.expand(*x.shape[:-1], outputs)
    if vector:
        labels = labels.squeeze(-1)
    out = recorder.emit(F.linear, values, labels, dtype=input.dtype, batch=x.batch, form=form)
    return recorder.note_linear(out)


def _check_features(recorder: Recorder, x: Value, w: Value) -> None:
    """Refuse units of another number than the weight is for, and examples in the place of features."""
    if x.shape[-1:] != w.shape[-1:]:
        features = x.shape[-1] if x.shape else 0
        raise RuntimeError(
            f"{recorder.where()}: {features} features enter a weight for {w.shape[-1]}"
        )
    if x.batch is not None and x.batch == x.labels.dim() - 1:
        recorder.wrong_batch()


def _fixed(recorder: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Trace a linear map whose weight is a constant, a buffer or an input."""
    n = input.dim()
    form = Form(
        [*range(n)], [n, n - 1][-weight.dim() :], [*range(n - 1), n][: n - 2 + weight.dim()]
    )
    y = contract(recorder, (input, weight), input, weight, form)
    return y if bias is None else add(recorder, y, bias)


def map_units(
    recorder: Recorder, weight: Value, count: int, source: Tensor, *, vector: bool = False
) -> Tensor:
    """Return the labels of the ``count`` outputs of a weight ``[out, in]`` that reads units with labels ``source``."""
    target = recorder.uses.earlier_target(weight, source)
    if target is None:
        target = recorder.made_of(source, count)
    column = target.reshape(-1, 1)
    row = source.reshape(1, -1)
    if vector:
        recorder.uses.add(weight, column.reshape(1), row.reshape(-1))
    else:
        recorder.uses.add(weight, column, row, target_dim=0)
    return recorder.scales.resolve(target)


def by_normed(
    recorder: Recorder, w: Value, source: Tensor, groups: int = 1, *, transposed: bool = False
) -> Tensor:
    """Return the labels of a normalized weight's outputs: scales of the weight and the units are multiplied.

    Args:
        recorder: the traced values so far.
        w: the weight, ``[out, in / groups, ...]``, or ``[in, out / groups, ...]`` if transposed.
        source: labels of the units, ``[in]``.
        groups: of them.
        transposed: of a transposed convolution.
    """
    scales, first, second = recorder.scales, *w.shape[:2]
    labels = scales.unify_along(w.labels, range(2, w.labels.dim()))
    labels = labels.reshape(first, second, -1)[..., 0]
    labels = scales.distinct(labels)
    labels = labels.expand(first if labels.shape[0] > 1 else groups, labels.shape[1])
    labels = labels.reshape(groups, -1, labels.shape[1])  # [groups, first / groups, second]
    labels = labels.transpose(1, 2) if transposed else labels  # [groups, out, in]
    units = source.reshape(groups, 1, -1)
    # the sums of all rows have one scale each: so have the units that they read
    if labels.shape[1] > 1:
        units = scales.unify_along(units, (2,))[..., :1]
    product = scales.product(scales.resolve(labels), units, recorder.where())
    target = scales.unify_along(product, (2,))[..., 0]
    count = (second * groups if transposed else first) // groups
    return scales.resolve(target).expand(groups, count).reshape(-1)


def matmul(recorder: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """Trace ``x @ y``; a parameter of two dimensions makes it a linear map."""
    a = recorder.lookup(x)
    b = recorder.lookup(y)
    weights = [v is not None and v.kind == "parameter" for v in (a, b)]
    if weights == [False, True] and y.dim() == 2:
        return linear(recorder, x, recorder.apply("t", torch.Tensor.t, y))
    if weights == [True, False] and x.dim() == 2:
        if y.dim() == 1:
            return linear(recorder, y, x)
        moved = recorder.apply("transpose", torch.Tensor.transpose, y, -1, -2)
        return recorder.apply(
            "transpose", torch.Tensor.transpose, linear(recorder, moved, x), -1, -2
        )
    return contract(recorder, (x, y), x, y, matmul_form(x.shape, y.shape))


RULES: dict[str, Callable[..., Any]] = {
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "mv", "bmm"], matmul),
    "__rmatmul__": lambda recorder, x, y: matmul(recorder, y, x),
}
