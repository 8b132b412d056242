"""Products of single elements: with a constant, an input or a parameter, and of two activations.

The scale of a product of activations is the product of their scales, s_y = s_a s_b, and so is its
path mass, gamma_y^2 = gamma_a^2 gamma_b^2: a path of the product is a path of each factor, and its
value the product of theirs. Powers are products of a value with itself. Where both factors depend
on data and neither has a scale, as in a loss written out, nothing would be won: the network is cut.
A gain that is computed from parameters, such as 1 + w, is a factor like any other.

kappa = dG/dp^2 stays equivariant. With y = a b, whose mass transforms by s_a^2 s_b^2, the
derivative of G in gamma_y^2 transforms by 1 / (s_a s_b)^2, and that in gamma_a^2, which is
gamma_b^2 times as large, by 1 / s_a^2, as for any unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.boundary import cut_inside
from pathspace.network.rules.elementwise import finish, number
from pathspace.network.trace.functions import changes
from pathspace.network.trace.lattice import DEGREE
from pathspace.network.trace.reasons import BOUNDED, GATED, OF_PARAMETERS, ROUNDED
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import WILD, without_repeats
from pathspace.network.trace.values import Value
from pathspace.squared.tape import raised


def multiply(recorder: Recorder, x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Trace a product with a constant (a fixed weight), with a parameter (one edge per element) or of activations."""
    if rounding_mode is not None:
        recorder.no_rule(ROUNDED)
    a = recorder.lookup(x) if isinstance(x, Tensor) else None
    b = recorder.lookup(y) if isinstance(y, Tensor) else None
    divides_by_buffer = a is not None and b is not None and b.kind == "buffer"
    if "div" in recorder.name and not divides_by_buffer:
        return _divide(recorder, (x, y), a, b)
    if a is None:
        return _by_constant(recorder, (x, y), y, x)
    if b is None:
        return _by_constant(recorder, (x, y), x, y)
    return _by_value(recorder, (x, y), a, b)


def _divide(
    recorder: Recorder, operands: tuple[Any, Any], a: Value | None, b: Value | None
) -> Tensor:
    """Trace a division by a constant or an input."""
    x, y = operands
    if b is None:
        divisor = y if isinstance(y, Tensor) else number(y)
        return scaled(recorder, x, operands, 1.0 / divisor)
    if a is not None and b.kind == "input":
        return _by_input(recorder, operands, a, b)
    advice = "Multiply by a parameter" if b.kind == "parameter" else None
    return recorder.no_rule(
        "it divides by a traced tensor, which is not positively homogeneous", advice
    )


def _by_constant(
    recorder: Recorder, operands: tuple[Any, Any], traced: Tensor, constant: Any
) -> Tensor:
    """Trace a product of a traced tensor with a constant."""
    constant = constant if isinstance(constant, Tensor) else number(constant)
    weighs = recorder.value(traced).kind == "parameter" and not changes(recorder.name)
    # a gain at the start of a recurrence
    if weighs and constant.dim() and bool(recorder.zeros(constant).all()):
        return torch.zeros(torch.broadcast_shapes(traced.shape, constant.shape), dtype=traced.dtype)
    return scaled(recorder, traced, operands, constant)


def _by_value(recorder: Recorder, operands: tuple[Any, Any], a: Value, b: Value) -> Tensor:
    """Trace a product, or a quotient by a buffer, of two traced tensors."""
    kinds = {a.kind, b.kind}
    if kinds <= {"input", "buffer"}:
        return recorder.preprocess(recorder.func, operands, {})
    if kinds == {"parameter"}:
        recorder.no_rule(*OF_PARAMETERS)
    if "buffer" in kinds:
        buffer, other = _ordered(a, b, first="buffer")
        return _by_buffer(recorder, operands, other, buffer)
    if "parameter" in kinds:
        weight, other = _ordered(a, b, first="parameter")
        return learned_scale(recorder, operands, other, weight)
    if "input" in kinds:
        factor, activation = _ordered(a, b, first="input")
        return _by_input(recorder, operands, activation, factor)
    return _of_activations(recorder, operands, a, b)


def _by_buffer(
    recorder: Recorder, operands: tuple[Any, Any], value: Value, buffer: Value
) -> Tensor:
    """Trace a product with a buffer, or a quotient by one: a fixed weight."""
    combine = torch.div if "div" in recorder.name else torch.mul
    labels = value.labels.expand(torch.broadcast_shapes(value.shape, buffer.shape))
    kind = "parameter" if value.kind == "parameter" else None
    return finish(recorder, combine, operands, (value, buffer), labels, kind=kind)


def _of_activations(recorder: Recorder, operands: tuple[Any, Any], a: Value, b: Value) -> Tensor:
    """Trace a product of two activations, one of which may be a gain that is computed from parameters."""
    # what is computed from parameters alone is the same for all examples
    has_gain = a.batch is None or b.batch is None
    has_scale = _has_scale(recorder, a) or _has_scale(recorder, b)
    if recorder.strict or not (has_gain or has_scale):
        recorder.no_rule(GATED)
    labels = recorder.scales.product(a.labels, b.labels, recorder.where())
    return finish(recorder, torch.mul, operands, (a, b), labels, form="product")


def _ordered(a: Value, b: Value, *, first: str) -> tuple[Value, Value]:
    """Return both values, that of the kind `first` first."""
    return (a, b) if a.kind == first else (b, a)


def power(recorder: Recorder, input: Tensor, exponent: Any = 2) -> Tensor:
    """Trace ``x ** k`` of an activation, k a positive whole number."""
    if not isinstance(input, Tensor):
        recorder.no_rule(BOUNDED)
    value = recorder.value(input)
    whole = isinstance(exponent, (int, float)) and exponent in range(1, DEGREE + 1)
    if value.kind != "hidden" or not whole or recorder.strict or not _has_scale(recorder, value):
        recorder.no_rule(BOUNDED)
    count = int(exponent)
    labels = value.labels
    for _ in range(count - 1):
        labels = recorder.scales.product(labels, value.labels, recorder.where())

    def squared(h: Tensor) -> Tensor:
        return math.prod([h] * (count - 1), start=h)

    return finish(
        recorder, squared, (input,), (value,), labels, form="product" if count > 1 else None
    )


def glu(recorder: Recorder, input: Tensor, dim: int = -1) -> Tensor:
    """Trace ``a * sigmoid(b)``, a and b the halves of the input. The network is cut at the sigmoid, and a continues."""
    if recorder.strict or recorder.value(input).kind != "hidden":
        recorder.no_rule(BOUNDED)
    a, b = recorder.apply("chunk", torch.Tensor.chunk, input, 2, dim)
    gate = recorder.value(b)
    result = recorder.apply("mul", torch.mul, a, cut_inside(recorder, gate, input.dtype))
    recorder.inside[recorder.value(result).slot] = gate.slot
    return result


def _has_scale(recorder: Recorder, value: Value) -> bool:
    return bool(recorder.scales.resolve(without_repeats(value.labels)).any())


def _by_input(recorder: Recorder, operands: Any, value: Value, factor: Value) -> Tensor:
    """Trace a factor that depends on data alone, such as a mask, as one: every path that it can open counts."""
    shape = torch.broadcast_shapes(value.shape, factor.shape)

    def squared(t: Tensor, _: Tensor) -> Tensor:
        return t.expand(shape)

    labels = value.labels.expand(shape)
    return finish(recorder, squared, operands, (value, factor), labels, value.kind)


def scaled(recorder: Recorder, traced: Tensor, operands: Any, constant: Tensor) -> Tensor:
    """Return the product of a traced tensor with a constant, as the result of an operation on ``operands``."""
    value = recorder.value(traced)
    weights = constant.detach().double()

    def squared(t: Tensor, power: float = 2.0) -> Tensor:
        return t * raised(weights, power).to(dtype=t.dtype, device=t.device)

    labels = value.labels
    if value.kind == "hidden" and bool(recorder.zeros(constant).all()):  # the start of a recurrence
        labels = torch.tensor(WILD)
    labels = labels.expand(torch.broadcast_shapes(value.shape, constant.shape))
    return finish(recorder, squared, operands, (value,), labels, kind=value.kind, fixed=True)


def learned_scale(recorder: Recorder, operands: Any, other: Value, weight: Value) -> Tensor:
    """Trace ``x * p`` with a parameter p: one edge from every element of x to one of the result."""
    shape = torch.broadcast_shapes(other.shape, weight.shape)
    n = len(shape)
    ndim = weight.labels.dim()
    keep = tuple(d for d in range(n) if d >= n - ndim and weight.shape[d - n] == shape[d])
    source = recorder.scales.unify_over(other.labels.expand(shape), keep)
    target = recorder.scales.fresh(source.numel(), recorder.where())
    full = [shape[d] if d in keep else 1 for d in range(n)]
    source = source.reshape(full)
    target = target.reshape(full)
    recorder.uses.add(weight, target.reshape(full[n - ndim :]), source.reshape(full[n - ndim :]))
    labels = recorder.scales.resolve(target).expand(shape)
    return recorder.note_linear(finish(recorder, torch.mul, operands, (other, weight), labels))


RULES: dict[str, Callable[..., Any]] = {
    "glu": glu,
    **dict.fromkeys(["pow", "pow_", "square", "square_"], power),
    **dict.fromkeys(["mul", "mul_", "div", "div_"], multiply),
}
