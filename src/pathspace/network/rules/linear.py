"""Linear maps: ``linear``, ``matmul`` and their kin with a parameter as the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.reasons import GATED
from pathspace.network.recorder import Recorder
from pathspace.network.rules.elementwise import add, add_bias
from pathspace.network.scales import WILD
from pathspace.network.values import Value


def require_parameter(recorder: Recorder, name: str, weight: Tensor) -> Value:
    """The value of a weight, which must be a parameter (or a view of one)."""
    value = recorder.value(weight)
    if value.kind == "hidden":
        recorder.refuse(name, f"its weight is computed by the network: {GATED}")
    if value.kind != "parameter":
        recorder.refuse(
            name,
            "its weight is no parameter of the model",
            "Register it as an nn.Parameter (requires_grad=False)",
        )
    return value


def linear(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Y = x W^T + b, W of shape ``[out, in]``: edges from the features of x to those of y."""
    del func
    x, w = recorder.as_units(input), require_parameter(recorder, name, weight)
    if x.shape[-1:] != w.shape[-1:]:
        raise RuntimeError(
            f"{recorder.where(name)}: {x.shape[-1] if x.shape else 0} features enter a weight for {w.shape[-1]}"
        )
    if x.batch is not None and x.batch == x.labels.dim() - 1:
        recorder.wrong_batch(name)
    wide = w.labels if w.labels.dim() == 2 else w.labels.reshape(1, -1)  # a vector weight has one output
    source = recorder.scales.unify_over(x.labels, (-1,))
    labels = map_units(recorder, name, w, wide.shape[0], source, vector=w.labels.dim() == 1)
    values = [x, w]
    if bias is not None:
        b = recorder.value(bias)
        if b.kind != "parameter":
            recorder.refuse(name, "its bias is no parameter of the model")
        labels = add_bias(recorder, name, b, labels)
        values.append(b)
    shape = (*x.shape[:-1], wide.shape[0]) if w.labels.dim() == 2 else x.shape[:-1]
    labels = labels.expand(*x.shape[:-1], wide.shape[0]).reshape(shape)
    batch = x.batch
    pullback = linear_pullback if w.labels.dim() == 2 else None
    out = recorder.emit(
        F.linear, values, labels, name=name, dtype=input.dtype, batch=batch, pullback=pullback
    )
    return recorder.note_linear(out)


def linear_pullback(
    inputs: Sequence[Tensor], _: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of y = h q^T + c in h, q and c."""
    h, q, g = inputs[0], inputs[1], gradients[0]
    assert g is not None
    rows, before = g.reshape(-1, q.shape[0]), h.reshape(-1, q.shape[1])
    found: list[Tensor | None] = [g @ q if needed[0] else None, rows.t() @ before if needed[1] else None]
    if len(inputs) > 2:
        found.append(rows.sum(0) if needed[2] else None)
    return found


def map_units(
    recorder: Recorder, name: str, weight: Value, count: int, source: Tensor, *, vector: bool = False
) -> Tensor:
    """Labels of the ``count`` outputs of a weight ``[out, in]`` applied to units with labels ``source``."""
    zero = bool((recorder.scales.resolve(source) == WILD).all())  # W 0 = 0, whatever W is
    target = torch.full((count,), WILD) if zero else recorder.uses.earlier_target(weight, source)
    if target is None:
        target = recorder.scales.fresh(count, recorder.where(name))
    column, row = target.reshape(-1, 1), source.reshape(1, -1)
    if vector:
        recorder.uses.add(weight, column.reshape(1), row.reshape(-1))
    else:
        recorder.uses.add(weight, column, row, target_dim=0)
    return recorder.scales.resolve(target)


def matmul(recorder: Recorder, name: str, func: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """``x @ W`` or ``W @ x`` with a parameter W of two dimensions."""
    a, b = recorder.value(x), recorder.value(y)
    if b.kind == "parameter" and b.labels.dim() == 2:
        return linear(recorder, name, func, x, recorder.apply("t", torch.Tensor.t, y))
    if a.kind == "parameter" and a.labels.dim() == 2 and b.kind != "parameter":
        if b.labels.dim() == 1:
            return linear(recorder, name, func, y, x)
        moved = recorder.apply("transpose", torch.Tensor.transpose, y, -1, -2)
        return recorder.apply(
            "transpose", torch.Tensor.transpose, linear(recorder, name, func, moved, x), -1, -2
        )
    if {a.kind, b.kind} <= {"input", "buffer"}:
        return recorder.preprocess(func, (x, y), {}, [a, b])
    return recorder.refuse(
        name, GATED if "hidden" in (a.kind, b.kind) else "its weight must be a matrix parameter"
    )


def addmm(
    recorder: Recorder, name: str, func: Callable[..., Any], input: Tensor, x: Tensor, y: Tensor, **scale: Any
) -> Tensor:
    """``b + x @ W``."""
    if scale:
        recorder.refuse(name, "its factors alpha and beta are not known; write the sum and the product apart")
    return add(recorder, name, func, input, matmul(recorder, name, func, x, y))


RULES: dict[str, Callable[..., Any]] = {
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "mv", "__matmul__"], matmul),
    "__rmatmul__": lambda recorder, name, func, x, y: matmul(recorder, name, func, y, x),
    **dict.fromkeys(["addmm", "addmv"], addmm),
}
