"""Products with a sum over common indices: ``einsum``, and ``matmul`` in all its forms.

A parameter in such a product is a weight between units, whatever its number of dimensions. A
constant, a buffer or an input is a set of fixed edges between them: every unit of the result has
the scale of all the units that it reads, so those share one. The squared network reads the squares
of constants and buffers, and ones for an input, which is a factor like any input node. Two
activations have scales inverse to each other.

Letters: those of the einsum. A letter of both operands is *summed* where the result lacks it, else
it runs along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.parameter_uses import repeats
from pathspace.network.trace.reasons import GATED, OF_PARAMETERS
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import WILD, without_repeats
from pathspace.network.trace.values import Value

Letters = list[int]


@dataclass(frozen=True)
class Form:
    """The index of each dimension of two operands and of their product."""

    first: Letters
    second: Letters
    out: Letters

    def swapped(self) -> Form:
        """Return the same product with its operands exchanged."""
        return Form(self.second, self.first, self.out)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the product."""
        return torch.einsum(x, self.first, y, self.second, self.out)


def matmul_form(x: Sequence[int], y: Sequence[int]) -> Form:
    """Return the form of ``torch.matmul`` of tensors of these shapes."""
    inner = 0
    row = 1
    column = 2
    x_batch = max(0, len(x) - 2)
    y_batch = max(0, len(y) - 2)
    batch = list(range(3, 3 + max(x_batch, y_batch)))
    rows = [row] if len(x) > 1 else []
    columns = [column] if len(y) > 1 else []
    # batch dimensions are broadcast from the last one on
    first = [*batch[len(batch) - x_batch :], *rows, inner]
    second = [*batch[len(batch) - y_batch :], inner, *columns]
    return Form(first, second, [*batch, *rows, *columns])


def tensordot_form(x: Sequence[int], y: Sequence[int], dims: Any = 2) -> Form:
    """Return the form of ``torch.tensordot`` of tensors of these shapes."""
    if isinstance(dims, int):
        dims = (range(len(x) - dims, len(x)), range(dims))
    of_x, of_y = dims
    first = list(range(len(x)))
    second = list(range(len(x), len(x) + len(y)))
    for a, b in zip(of_x, of_y, strict=True):
        second[b] = first[a]
    common = set(first) & set(second)
    return Form(first, second, [n for n in first + second if n not in common])


def inner_form(x: Sequence[int], y: Sequence[int]) -> Form:
    """Return the form of ``torch.inner`` of tensors of these shapes, summed over the last dimension of both."""
    inner = 0
    rows = list(range(1, len(x)))
    columns = list(range(len(x), len(x) + len(y) - 1))
    return Form([*rows, inner], [*columns, inner], [*rows, *columns])


def einsum_form(equation: str, x: Sequence[int], y: Sequence[int]) -> Form:
    """Return the form of ``torch.einsum`` of an equation with two operands of these shapes."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        result = ("..." if "..." in left else "") + "".join(letters)
    of_x, of_y = left.split(",")
    hidden_in_x = _dimensions_of_dots(of_x, x)
    hidden_in_y = _dimensions_of_dots(of_y, y)
    hidden = max(hidden_in_x, hidden_in_y)

    def numbers(side: str, count: int) -> Letters:
        """Return the indices of an operand, of which an ellipsis has the last ``count`` of the hidden ones."""
        before, ellipsis, after = side.partition("...")
        middle = list(range(hidden - count, hidden)) if ellipsis else []
        return [*(hidden + ord(c) for c in before), *middle, *(hidden + ord(c) for c in after)]

    first = numbers(of_x, hidden_in_x)
    second = numbers(of_y, hidden_in_y)
    out = numbers(result, hidden)
    # torch wants the indices counted from zero on
    number = {letter: n for n, letter in enumerate(dict.fromkeys([*first, *second]))}
    return Form([number[n] for n in first], [number[n] for n in second], [number[n] for n in out])


def _dimensions_of_dots(side: str, shape: Sequence[int]) -> int:
    """Return the number of dimensions for which the ellipsis of an operand stands."""
    return len(shape) - len(side.replace("...", ""))


def _without_ones(form: Form, x: Sequence[int], y: Sequence[int]) -> Form:
    """Give each broadcast dimension of size one an index of its own, which is summed over."""
    fresh = count(max([*form.first, *form.second], default=0) + 1)
    first = _renamed(form.first, x, dict(zip(form.second, y, strict=True)), fresh)
    second = _renamed(form.second, y, dict(zip(first, x, strict=True)), fresh)
    return Form(first, second, form.out)


def _renamed(
    letters: Letters, shape: Sequence[int], others: Mapping[int, int], fresh: Iterator[int]
) -> Letters:
    """Return the indices of an operand, with new ones where it has size one and the other operand more."""
    result = []
    for letter, size in zip(letters, shape, strict=True):
        is_broadcast = size <= 1 and others.get(letter, size) != size
        result.append(next(fresh) if is_broadcast else letter)
    return result


def contract(recorder: Recorder, args: Any, x: Tensor, y: Tensor, form: Form) -> Tensor:
    """Trace a product of two tensors; its edges depend on whether they are weights, constants or activations."""
    if len(set(form.first)) < len(form.first) or len(set(form.second)) < len(form.second):
        recorder.no_rule("an index occurs twice in one operand", "Take the diagonal first")
    a = recorder.lookup(x)
    b = recorder.lookup(y)
    first = "constant" if a is None else a.kind
    second = "constant" if b is None else b.kind
    if {first, second} <= {"input", "buffer", "constant"}:
        return recorder.preprocess(recorder.func, args, {})
    if first == second == "parameter":
        recorder.no_rule(*OF_PARAMETERS)
    if _RANKS.get(first, 1) > _RANKS.get(second, 1):
        return contract(recorder, args, y, x, form.swapped())
    form = _without_ones(form, x.shape, y.shape)
    if second == "hidden":
        assert a is not None
        assert b is not None
        return _by_activations(recorder, a, b, form, x.dtype)
    if second == "parameter":
        assert b is not None
        return _by_weights(recorder, recorder.as_units(x), b, form, x.dtype)
    assert a is not None
    return _by_fixed_edges(recorder, a, y, form, x.dtype)


_RANKS = {"hidden": 0, "parameter": 2}
"""The order of the operands: activations, fixed edges (1), parameters."""


def _batch(recorder: Recorder, value: Value, letters: Letters, form: Form) -> int | None:
    """Return the dimension of the product that holds the examples of an operand."""
    if value.batch is None:
        return None
    if letters[value.batch] not in form.out:
        recorder.wrong_batch()
    return form.out.index(letters[value.batch])


def _sizes(form: Form, x: Sequence[int], y: Sequence[int]) -> dict[int, int]:
    """Return the size of each index."""
    return dict(zip([*form.first, *form.second], [*x, *y], strict=True))


def _by_weights(recorder: Recorder, x: Value, w: Value, form: Form, dtype: torch.dtype) -> Tensor:
    """Trace a product with a parameter, each of whose elements is an edge to a unit of the result."""
    form = _without_broadcasts(form, x, w)
    batch = _batch(recorder, x, form.first, form)
    if x.batch is not None and form.first[x.batch] in form.second:
        recorder.wrong_batch()
    size = _sizes(form, x.shape, w.shape)
    common = [n for n in form.first if n in form.second]
    source = recorder.scales.unify_over(x.labels, tuple(form.first.index(n) for n in common))
    created = [n for n in form.second if n in form.out]
    units = torch.Size([size[n] for n in created])
    target = recorder.made_of(source, units.numel()).reshape(units)
    recorder.uses.add(
        w,
        _laid_out(target, created, form.second),
        _laid_out(source, common, form.second),
        target_dim=_only_new_dimension(form),
    )
    labels = _laid_out(recorder.scales.resolve(target), created, form.out)
    labels = labels.expand([size[n] for n in form.out])
    out = recorder.emit(form, [x, w], labels, dtype=dtype, batch=batch)
    return recorder.note_linear(out)


def _only_new_dimension(form: Form) -> int | None:
    """Return the one dimension of a weight that the result has and the activations have not."""
    new = [d for d, n in enumerate(form.second) if n in form.out and n not in form.first]
    return new[0] if len(new) == 1 else None


def _without_broadcasts(form: Form, x: Value, w: Value) -> Form:
    """Give dimensions along which the weight repeats an index of their own; the batch may be one of them."""
    fresh = count(max([*form.first, *form.second]) + 1)
    examples = None if x.batch is None else form.first[x.batch]
    second = []
    for d, n in enumerate(form.second):
        repeats_itself = w.shape[d] == 1 or (n == examples and repeats(w.labels, d))
        second.append(next(fresh) if repeats_itself and n in form.first else n)
    return Form(form.first, second, form.out)


def _by_fixed_edges(
    recorder: Recorder, x: Value, factor: Tensor, form: Form, dtype: torch.dtype
) -> Tensor:
    """Trace a product with a constant, buffer or input: all units that one unit of the result reads share its scale."""
    of_factor = recorder.lookup(factor)
    batch = _batch(recorder, x, form.first, form)
    if of_factor is not None:
        its_batch = _batch(recorder, of_factor, form.second, form)
        apart = None not in (batch, its_batch) and batch != its_batch
        if apart and recorder.examples.count > 1:
            recorder.mixes()
    size = _sizes(form, x.shape, factor.shape)
    summed = [n for n in size if n not in form.out]
    order = [*form.out, *summed]
    labels = _laid_out(without_repeats(x.labels), form.first, order)
    zeros = recorder.zeros(factor) if of_factor is None else None
    if zeros is not None and bool(zeros.any()):  # a zero is no edge
        labels = torch.where(_laid_out(zeros.cpu(), form.second, order), WILD, labels)
    else:
        labels = labels.expand([size[n] for n in order])
    labels = _of_a_sum(recorder, labels, len(summed)).expand([size[n] for n in form.out])
    out = recorder.emit(form, [x, recorder.value(factor)], labels, dtype=dtype, batch=batch)
    return recorder.note_linear(out)


def _by_activations(
    recorder: Recorder, x: Value, y: Value, form: Form, dtype: torch.dtype
) -> Tensor:
    """Trace a sum of products of activations.

    Products that are added up must have one scale. Scores of attention enter a softmax, so this
    scale is 1 there: for each dimension of a head, queries and keys have inverse scales. The
    squared network is the same sum of products, of squares.
    """
    batch = _batch_of_both(recorder, x, y, form)
    size = _sizes(form, x.shape, y.shape)
    summed = [n for n in size if n not in form.out]
    order = [*form.out, *summed]
    scales = recorder.scales
    a = _laid_out(scales.distinct(x.labels), form.first, order)
    b = _laid_out(scales.distinct(y.labels), form.second, order)
    if torch.broadcast_shapes(a.shape, b.shape).numel() > _MOST:
        a = _of_common(recorder, x, form.first, form, order)
        b = _of_common(recorder, y, form.second, form, order)
    labels = scales.product(a, b, recorder.where())
    labels = _of_a_sum(recorder, labels, len(summed)).expand([size[n] for n in form.out])
    product = recorder.emit(form, [x, y], labels, dtype=dtype, batch=batch, form="product")
    return recorder.note_linear(product)


def _batch_of_both(recorder: Recorder, x: Value, y: Value, form: Form) -> int | None:
    """Return the dimension of a product of activations that holds the examples; refuse one that mixes them."""
    letters = set()
    if x.batch is not None:
        letters.add(form.first[x.batch])
    if y.batch is not None:
        letters.add(form.second[y.batch])
    if recorder.strict or len(letters) > 1 or not letters <= {*form.out}:
        recorder.no_rule(GATED)
    return form.out.index(letters.pop()) if letters else None


def _of_common(
    recorder: Recorder, value: Value, letters: Letters, form: Form, order: Letters
) -> Tensor:
    """Return one label for each element along the indices that both factors have, in the given order."""
    common = [n for n in form.first if n in form.second]
    keep = tuple(letters.index(n) for n in common)
    return _laid_out(recorder.scales.unify_over(value.labels, keep), common, order)


_MOST = 2**16
"""Products of different scales in one contraction; beyond them those share one that are no factors of one sum."""


def _of_a_sum(recorder: Recorder, labels: Tensor, count: int) -> Tensor:
    """Return the labels of sums over the last ``count`` dimensions, whose summands share one label each."""
    dims = tuple(range(-count, 0))
    return recorder.scales.unify_along(labels, dims).squeeze(dims)


def _laid_out(t: Tensor, letters: Letters, order: Letters) -> Tensor:
    """Permute the dimensions to this order, with new ones of size one for missing letters."""
    t = t.permute([letters.index(n) for n in order if n in letters])
    return t[tuple(slice(None) if n in letters else None for n in order)]


def einsum(recorder: Recorder, equation: Any, *operands: Any) -> Tensor:
    """Trace an einsum of one tensor or two; ``written_out`` splits those of more."""
    if not isinstance(equation, str):
        recorder.no_rule("its indices are given as lists", "Give them as a string of letters")
    in_a_list = len(operands) == 1 and isinstance(operands[0], (list, tuple))
    tensors = list(operands[0] if in_a_list else operands)
    if len(tensors) > 2:  # not written out
        _refuse_several(recorder, tensors)
    args = (equation, *tensors)
    if len(tensors) == 1:  # a constant one beside it
        given, arrow, result = equation.partition("->")
        tensors = [*tensors, torch.ones(())]
        equation = f"{given},{arrow}{result}"
    x, y = tensors
    return contract(recorder, args, x, y, einsum_form(equation, x.shape, y.shape))


def _refuse_several(recorder: Recorder, tensors: Sequence[Tensor]) -> None:
    """Refuse a product of more than two tensors."""
    values = [recorder.lookup(t) for t in tensors]
    hidden = sum(value is not None and value.kind == "hidden" for value in values)
    if recorder.strict and hidden > 1:
        recorder.no_rule(GATED)
    recorder.no_rule(*_SEVERAL)


_SEVERAL = (
    "it multiplies more than two tensors, with an ellipsis or with two parameters (between which are units)",
    "Multiply them two at a time",
)


Forms = Callable[..., Form]
"""From the shapes of two tensors, and the other arguments of a function, to the form of its product."""


def of_form(form: Forms) -> Callable[..., Tensor]:
    """Return the rule of a function of two tensors that is the product of a form."""

    def rule(recorder: Recorder, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = (x, y, *args, *kwargs.values())
        return contract(recorder, given, x, y, form(x.shape, y.shape, *args, **kwargs))

    return rule


CONTRACTIONS: dict[str, Forms] = {"tensordot": tensordot_form, "inner": inner_form}
"""Functions of two tensors that sum their products, by name. A new one is an entry here."""

RULES: dict[str, Callable[..., Any]] = {
    "einsum": einsum,
    **{name: of_form(form) for name, form in CONTRACTIONS.items()},
}
