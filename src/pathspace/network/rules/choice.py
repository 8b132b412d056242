"""Operations that choose among values: maxima, minima, ``where`` and masks.

A path may leave through any of the values, so the squared network adds them, as it reads a ReLU as
the identity. Where the choice is a constant, the others have no path at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.elementwise import add_bias, as_counted, finish, number
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import Origin, Value


def extreme(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Trace ``max`` and ``min`` in their three forms: of two tensors, over a dimension, and over all dimensions."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return larger(recorder, x, other)
    if not args and "dim" not in kwargs:
        return recorder.apply("amax", torch.amax, x)
    values = recorder.apply("amax", torch.amax, x, *args, **kwargs)
    kind = torch.return_types.max if recorder.name == "max" else torch.return_types.min
    created = recorder.value(values)
    return kind((values, indices(recorder, created, created.shape, created.batch)))


def indices(recorder: Recorder, of: Value, shape: torch.Size, batch: int | None) -> Tensor:
    """Make the positions of a maximum a constant: like a mask, they are the same at every scale.

    In a strict trace it may be returned, but nothing may depend on it.
    """
    created = torch.empty(shape, dtype=torch.long, device="meta")
    if recorder.strict:
        labels = torch.tensor(FIXED).expand(shape)
        value = Value(
            recorder.new_slot(), labels, "indices", recorder.name, batch, module=recorder.path
        )
        return recorder.bind(created, value)
    created = recorder.add_leaf(created, "input", batch=batch, examples=of.examples)
    recorder.origins[recorder.value(created).slot] = Origin((of.slot,))
    return created


def position(
    recorder: Recorder, x: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """Trace ``argmax`` and ``argmin``: the compared elements have one scale."""
    largest = recorder.value(recorder.apply("amax", torch.amax, x, dim, keepdim))
    return indices(recorder, largest, largest.shape, largest.batch)


def larger(recorder: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """Trace the larger or smaller of two tensors: a path can pass through either, so the squared network adds them.

    A parameter is a bound, which scales with the units that it bounds: its elements are edges from
    the bias node.
    """
    a, b = (recorder.value(as_counted(recorder, t)) for t in (x, y))
    if a.kind == b.kind == "parameter":
        recorder.no_rule("it compares two parameters, so its result is no parameter")
    if "parameter" in (a.kind, b.kind):
        bound, other = (a, b) if a.kind == "parameter" else (b, a)
        labels = add_bias(
            recorder, bound, other.labels.expand(torch.broadcast_shapes(a.shape, b.shape))
        )
    else:
        labels = recorder.scales.unify(a.labels, b.labels)
    return recorder.note_unit(finish(recorder, torch.add, (x, y), (a, b), labels))


def where(recorder: Recorder, condition: Tensor, *branches: Any, **named: Any) -> Tensor:
    """Trace ``where`` with a condition that is a constant or depends on data alone."""
    both = _both(recorder, branches, named)
    gate = recorder.lookup(condition)
    if gate is not None and gate.kind not in ("input", "buffer"):
        recorder.no_rule("its condition depends on activations", _AS_RELU)
    a, b = (recorder.as_units(as_counted(recorder, t)) for t in _as_numbers(recorder, both))
    # first what masked_fill_ writes into
    operands = tuple(t for t in reversed(both) if isinstance(t, Tensor))
    shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
    mask = condition.detach().to("cpu", copy=True) if gate is None else condition
    if gate is None and recorder.buffers_in(condition, "drawn"):
        gate = recorder.value(condition)  # either branch may be taken
    another_may_come = recorder.buffers_in(condition, "numbers", "single")
    if gate is not None or another_may_come:
        labels = recorder.scales.unify(a.labels, b.labels).expand(shape)
    else:
        labels = torch.where(
            mask, recorder.scales.resolve(a.labels), recorder.scales.resolve(b.labels)
        )

    def chosen(u: Tensor, v: Tensor) -> Tensor:
        return torch.where(mask.to(u.device), u, v)

    def either(u: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return (u + v).expand(shape)

    if gate is None:
        return finish(recorder, chosen, operands, (a, b), labels)
    return finish(recorder, either, operands, (a, b, gate), labels)


def _both(recorder: Recorder, branches: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return both branches of ``where``, by position or by name."""
    both = [*branches, *(named[key] for key in ("input", "self", "other") if key in named)]
    if len(both) != 2:
        recorder.no_rule("with a condition alone it returns places that depend on the data")
    return both


def _as_numbers(recorder: Recorder, branches: list[Any]) -> list[Tensor]:
    """Return the branches as tensors, and refuse NaN."""
    tensors = [t if isinstance(t, Tensor) else number(t) for t in branches]
    if any(_is_no_number(recorder, t) for t in tensors):
        recorder.no_rule("it fills in what is no number", "Fill in zeros or infinities")
    return tensors


def _is_no_number(recorder: Recorder, t: Tensor) -> bool:
    """Return whether a tensor is a constant with a NaN in it."""
    return recorder.lookup(t) is None and bool(torch.isnan(t).any())


def masked_fill(recorder: Recorder, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Trace ``masked_fill``, which replaces some elements by a number."""
    return where(recorder, mask, value, input)


def pool_with_indices(
    recorder: Recorder, input: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Trace max-pooling that also returns the positions of the maxima."""
    plain = recorder.name.removesuffix("_with_indices")
    kwargs = {key: value for key, value in kwargs.items() if key != "return_indices"}
    largest = 5 if not plain.startswith("adaptive") else 1  # arguments before return_indices
    values = recorder.apply(plain, recorder.func, input, *args[:largest], **kwargs)
    created = recorder.value(values)
    return values, indices(recorder, created, created.shape, created.batch)


_AS_RELU = (
    "Write what it does as relu, leaky_relu, abs or maximum, or move that part into a module of its own and leave that "
    "to the plain rule with outside=[...]"
)

RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["max", "min"], extreme),
    **dict.fromkeys(["maximum", "minimum"], larger),
    **dict.fromkeys(["argmax", "argmin"], position),
    "where": where,
    **{
        f"{kind}max_pool{n}d_with_indices": pool_with_indices
        for n in (1, 2, 3)
        for kind in ("", "adaptive_")
    },
    **dict.fromkeys(["masked_fill", "masked_fill_"], masked_fill),
}
