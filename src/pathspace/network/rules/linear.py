"""Linear maps: ``linear``, ``matmul`` and their kin with a parameter as the weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.reasons import GATED
from pathspace.network.recorder import Recorder
from pathspace.network.rules.contraction import Form, contract, matmul_form
from pathspace.network.rules.elementwise import add, add_bias
from pathspace.network.scales import WILD
from pathspace.network.squares import Outer, Square, dense, single_row, single_value
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
    given = recorder.known(weight)
    if given is None or given.kind in ("input", "buffer"):
        return _fixed(recorder, name, func, input, weight, bias)
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
    by_hand = w.labels.dim() == 2
    out = recorder.emit(
        F.linear,
        values,
        labels,
        name=name,
        dtype=input.dtype,
        batch=batch,
        pullback=linear_pullback if by_hand else None,
        forward=linear_forward if by_hand else None,
        form="linear" if by_hand else None,
    )
    return recorder.note_linear(out)


def _fixed(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """A linear map whose weight is a constant, a buffer or an input."""
    n = input.dim()
    form = Form([*range(n)], [n, n - 1][-weight.dim() :], [*range(n - 1), n][: n - 2 + weight.dim()])
    y = contract(recorder, name, func, (input, weight), input, weight, form)
    return y if bias is None else add(recorder, name, torch.add, y, bias)


def linear_forward(
    h: Tensor, q: Tensor | Square, c: Tensor | Square | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """Y = h q^T + c, with no more of q than it needs: its row sums where h is one number."""
    bias = None if c is None else dense(c)
    value = single_value(h) if isinstance(q, Square) else None
    if value is not None and isinstance(q, Square):
        # value is the 1 of an input
        row = q.row_sums() * value if bias is None else torch.addcmul(bias, q.row_sums(), value)
        return row.expand(*h.shape[:-1], row.shape[0]), ()
    matrix, row = dense(q), single_row(h)
    if row is None:
        return F.linear(h, matrix, bias), ()
    made = torch.mv(matrix, row) if bias is None else torch.addmv(bias, matrix, row)
    return made.expand(*h.shape[:-1], made.shape[0]), ()


def linear_pullback(
    inputs: Sequence[Any], _: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | Outer | None]:
    """Gradients of y = h q^T + c in h, q and c; that in q is an outer product if g or h repeats one row."""
    h, q, g = inputs[0], inputs[1], gradients[0]
    assert g is not None
    out, before = g.shape[-1], h.shape[-1]
    count = g.numel() // max(1, out)
    g_row, h_row = single_row(g), single_row(h)
    g_sum = g.reshape(-1, out).sum(0) if g_row is None else g_row * count if count > 1 else g_row
    found: list[Tensor | Outer | None] = [None] * len(inputs)
    if needed[0] and g_row is None:
        found[0] = g @ dense(q)
    elif needed[0] and g_row is not None:
        value = single_value(g_row)
        sums = q.column_sums() * value if value is not None and isinstance(q, Square) else None
        back = torch.mv(dense(q).t(), g_row) if sums is None else sums
        found[0] = back.expand(h.shape)
    if needed[1]:
        if h_row is not None:
            found[1] = Outer(g_sum, h_row)
        elif g_row is not None:
            found[1] = Outer(g_row, h.reshape(-1, before).sum(0))
        else:
            found[1] = g.reshape(-1, out).t() @ h.reshape(-1, before)
    if len(inputs) > 2 and needed[2]:
        found[2] = g_sum
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
    """``x @ y``; with a parameter of two dimensions it is a linear map like any other."""
    a, b = recorder.known(x), recorder.known(y)
    weights = [v is not None and v.kind == "parameter" for v in (a, b)]
    if weights == [False, True] and y.dim() == 2:
        return linear(recorder, name, F.linear, x, recorder.apply("t", torch.Tensor.t, y))
    if weights == [True, False] and x.dim() == 2:
        if y.dim() == 1:
            return linear(recorder, name, F.linear, y, x)
        moved = recorder.apply("transpose", torch.Tensor.transpose, y, -1, -2)
        return recorder.apply(
            "transpose", torch.Tensor.transpose, linear(recorder, name, F.linear, moved, x), -1, -2
        )
    return contract(recorder, name, func, (x, y), x, y, matmul_form(x.shape, y.shape))


def addmm(
    recorder: Recorder, name: str, func: Callable[..., Any], input: Tensor, x: Tensor, y: Tensor, **scale: Any
) -> Tensor:
    """``b + x @ W``."""
    if scale:
        recorder.refuse(name, "its factors alpha and beta are not known; write the sum and the product apart")
    return add(recorder, name, func, input, matmul(recorder, name, func, x, y))


RULES: dict[str, Callable[..., Any]] = {
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "mv", "bmm", "__matmul__"], matmul),
    "__rmatmul__": lambda recorder, name, func, x, y: matmul(recorder, name, func, y, x),
    **dict.fromkeys(["addmm", "addmv", "baddbmm"], addmm),
}
