"""Rules for the axes of tensors, one for each operation of a captured pass.

A rule is a function ``rule(reader, step)``. It gives the result its dimensions, and notes which
dimensions of the arguments are equal or fixed. An operation without a rule fixes all dimensions of
its arguments, so that nothing is taken for a symmetry by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pathspace.graph.capture import Step
from pathspace.rescaling.axes import (
    Dim,
    dim_of,
    fix,
    length,
    piece,
    regrouped,
    resolved,
    size_of,
    unify,
)
from pathspace.torch_private import pytree

_T = TypeVar("_T")

_AS_IT_IS = frozenset(
    [
        *("expand", "view", "_unsafe_view", "unsqueeze", "detach", "alias", "clone", "_to_copy"),
        "_weight_norm_interface",
    ]
)
"""Operations whose first result may be a weight as it is, with example dimensions in front, or with other lengths."""


@dataclass(frozen=True)
class Turned:
    """A weight with its dimensions in another order.

    Attributes:
        name: of the weight.
        order: for each dimension of the tensor, the dimension of the weight; None for a new one.
    """

    name: str
    order: tuple[int | None, ...]


class AxisReader:
    """Reads the steps of a pass, and holds the dimensions of all of its tensors.

    Attributes:
        read_along: (name of a weight, its dimension over which a step sums): the units along it are
            those that the weight reads.
    """

    def __init__(self) -> None:
        self._dims: dict[int, list[Dim]] = {}
        self._kept: list[Tensor] = []  # ids are those of living tensors
        self._weights: dict[int, Turned] = {}
        self.read_along: set[tuple[str, int | None]] = set()

    def bind_weight(self, name: str, weight: Tensor) -> None:
        """Give a parameter or a buffer dimensions of its own."""
        self.bind(weight, [dim_of(n) for n in weight.shape])
        self._weights[id(weight)] = Turned(name, tuple(range(weight.dim())))

    def _follow(self, step: Step) -> None:
        """Note over which dimensions of weights a step sums, and whether its result is a weight in another order."""
        for tensor, d in summed_dims(step):
            found = self._weights.get(id(tensor))
            if found is not None:
                self.read_along.add((found.name, found.order[d]))
        given = step.args[0] if step.args else None
        results = _tensors(step.result)
        if not isinstance(given, Tensor) or not results or id(given) not in self._weights:
            return
        result = results[0]
        turned = self._weights[id(given)]
        if step.name in ("t", "transpose", "permute"):
            self._weights[id(result)] = Turned(turned.name, _reordered(step, turned.order))
        elif step.name in _AS_IT_IS and result.shape[-given.dim() :] == given.shape:
            new = result.dim() - given.dim()
            self._weights[id(result)] = Turned(turned.name, (*[None] * new, *turned.order))

    def bind(self, tensor: Tensor, dims: Sequence[Dim]) -> None:
        """Give a tensor its dimensions."""
        assert [size_of(dim) for dim in dims] == list(tensor.shape)
        self._kept.append(tensor)
        self._dims[id(tensor)] = list(dims)

    def of(self, tensor: Tensor) -> list[Dim]:
        """Return the dimensions of a tensor; those of a constant are fixed where its values differ along them."""
        found = self._dims.get(id(tensor))
        if found is None:  # each use by itself: two layers may begin with the same zeros
            return [dim_of(n, fixed=not _is_even(tensor, d)) for d, n in enumerate(tensor.shape)]
        return found

    def read(self, step: Step) -> None:
        """Read one step."""
        # a constant is read where it is used
        if step.name in FACTORIES or not any(id(t) in self._dims for t in step.tensors):
            return
        has_empty = any(not t.numel() for t in step.tensors)
        rule = RULES.get(step.name, unknown)
        if has_empty and step.name != "cat":
            rule = unknown
        rule(self, step)
        self._follow(step)
        for tensor in _tensors(step.result):
            if id(tensor) not in self._dims:
                self.bind(tensor, [dim_of(n, fixed=True) for n in tensor.shape])


def _reordered(step: Step, order: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the dimensions of a weight in the order that a step gives them."""
    if step.name == "permute":
        return tuple(order[d] for d in step.args[1])
    return tuple(_transposed(step, order))


def _transposed(step: Step, items: Sequence[_T]) -> list[_T]:
    """Return one item for each dimension of a tensor, in the order that ``transpose`` or ``t`` gives them."""
    result = list(items)
    if len(result) > 1:
        a, b = step.args[1:3] if len(step.args) > 1 else (0, 1)
        result[a], result[b] = result[b], result[a]
    return result


def _is_even(tensor: Tensor, d: int) -> bool:
    """Return whether a tensor has the same values all along a dimension."""
    return tensor.shape[d] < 2 or bool((tensor == tensor.narrow(d, 0, 1)).all())


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _argument(step: Step, place: int, name: str, default: Any = None) -> Any:
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def unknown(reader: AxisReader, step: Step) -> None:
    """Fix all dimensions of all tensors that a step reads: the rule for operations without one."""
    for tensor in step.tensors:
        for dim in reader.of(tensor):
            fix(dim)


def elementwise(reader: AxisReader, step: Step) -> None:
    """Equate dimensions as they are broadcast, from the last one on."""
    for result in _tensors(step.result):
        dims = [dim_of(n) for n in result.shape]
        for tensor in step.tensors:
            given = reader.of(tensor)
            for dim, of_result in zip(reversed(given), reversed(dims), strict=False):
                if size_of(dim) != 1:
                    unify(of_result, dim)
        reader.bind(result, dims)


def view(reader: AxisReader, step: Step) -> None:
    """Keep the axes in their order."""
    reader.bind(step.result, regrouped(reader.of(step.args[0]), step.result.shape))


def permute(reader: AxisReader, step: Step) -> None:
    """Change the places of dimensions."""
    given = reader.of(step.args[0])
    reader.bind(step.result, [given[d] for d in step.args[1]])


def transpose(reader: AxisReader, step: Step) -> None:
    """Change the places of two dimensions."""
    reader.bind(step.result, _transposed(step, reader.of(step.args[0])))


def expand(reader: AxisReader, step: Step) -> None:
    """Make a dimension of size 1 one along which all is the same."""
    given = reader.of(step.args[0])
    new = len(step.result.shape) - len(given)
    padded: list[Dim | None] = [None] * new + [*given]
    reader.bind(
        step.result,
        [
            dim if dim is not None and size_of(dim) == n else dim_of(n)
            for dim, n in zip(padded, step.result.shape, strict=True)
        ],
    )


def select(reader: AxisReader, step: Step) -> None:
    """Fix a dimension of which one place is picked."""
    given = list(reader.of(step.args[0]))
    fix(given.pop(step.args[1]))
    reader.bind(step.result, given)


def slice_along(reader: AxisReader, step: Step) -> None:
    """Take a part of a dimension; with gaps it is fixed."""
    given = list(reader.of(step.args[0]))
    d = _argument(step, 1, "dim", 0) % len(given)
    start = _argument(step, 2, "start")
    stride = _argument(step, 4, "step", 1)
    size = step.result.shape[d]
    full_size = size_of(given[d])
    if stride != 1:
        given[d] = _strided(given[d], stride, size)
    elif size != full_size:
        first = 0 if start is None else start
        if first < 0:
            first += full_size
        given[d] = piece(given[d], max(0, first), size)
    reader.bind(step.result, given)


def _strided(dim: Dim, stride: int, size: int) -> Dim:
    """Return every stride-th element of a dimension, as units that all offsets share.

    Runs of ``stride`` elements may change places as a whole; within a run the order is fixed.
    """
    if size * stride != size_of(dim):
        fix(dim)
        return dim_of(size, fixed=True)
    runs = dim_of(size)
    within_a_run = dim_of(stride, fixed=True)
    unify(dim, product(runs, within_a_run))
    return runs


def split(reader: AxisReader, step: Step) -> None:
    """Take the parts of a dimension, one after the other."""
    given = reader.of(step.args[0])
    d = _argument(step, 2, "dim", 0) % len(given)
    start = 0
    for part in step.result:
        size = part.shape[d]
        dims = list(given)
        dims[d] = piece(given[d], start, size)
        start += size
        reader.bind(part, dims)


def scatter(reader: AxisReader, step: Step) -> None:
    """Write a slice, or one place, along a dimension of a tensor; that dimension is fixed."""
    target, source = step.args[:2]
    d = _argument(step, 2, "dim", 0)
    given = list(reader.of(target))
    of_source = list(reader.of(source))
    fix(given[d])
    remaining = list(given)
    if len(of_source) == len(given):
        fix(of_source[d])
    else:
        # select_scatter: the source lacks the dimension
        del remaining[d]
    for one, other in zip(remaining, of_source, strict=True):
        if size_of(one) == size_of(other):
            unify(one, other)
    reader.bind(step.result, given)


def index(reader: AxisReader, step: Step) -> None:
    """Fix the one dimension from which places are picked."""
    given = list(reader.of(step.args[0]))
    if step.name == "index":
        picked = [(d, numbers) for d, numbers in enumerate(step.args[1]) if numbers is not None]
    else:
        picked = [(step.args[1], step.args[2])]
    if len(picked) != 1 or not isinstance(step.args[0], Tensor):
        unknown(reader, step)
        return
    ((d, numbers),) = picked
    for dim in (given[d], *reader.of(numbers)):
        fix(dim)
    if numbers.dtype == torch.bool:
        unknown(reader, step)
        return
    places = [dim_of(n, fixed=True) for n in numbers.shape]
    d %= len(given)
    reader.bind(step.result, [*given[:d], *places, *given[d + 1 :]])


def unbind(reader: AxisReader, step: Step) -> None:
    """Fix a dimension whose places are taken apart."""
    given = list(reader.of(step.args[0]))
    fix(given.pop(_argument(step, 1, "dim", 0)))
    for part in step.result:
        reader.bind(part, given)


def concatenate(reader: AxisReader, step: Step) -> None:
    """Put the segments one after the other."""
    tensors = [t for t in step.args[0] if t.numel()]  # one without elements may have any form
    if not tensors:
        return
    d = _argument(step, 1, "dim", 0) % step.result.dim()
    given = [reader.of(t) for t in tensors]
    for other in given[1:]:
        for k, (a, b) in enumerate(zip(given[0], other, strict=True)):
            if k != d:
                unify(a, b)
    dims = list(given[0])
    dims[d] = tuple(segment for one in given for segment in resolved(one[d]) if length(segment))
    reader.bind(step.result, dims)


def stack(reader: AxisReader, step: Step) -> None:
    """Make a new dimension, whose places differ."""
    given = [reader.of(t) for t in step.args[0]]
    for other in given[1:]:
        for a, b in zip(given[0], other, strict=True):
            unify(a, b)
    d = _argument(step, 1, "dim", 0) % step.result.dim()
    dims = [*given[0][:d], dim_of(len(given), fixed=True), *given[0][d:]]
    reader.bind(step.result, dims)


def reduction(reader: AxisReader, step: Step) -> None:
    """Drop the dimensions of sums, means and maxima, which do not depend on an order."""
    _reduce(reader, step, _argument(step, 1, "dim"))


def vector_norm(reader: AxisReader, step: Step) -> None:
    """Drop the dimensions of vectors, whose lengths do not depend on an order."""
    _reduce(reader, step, _argument(step, 2, "dim"))


def _reduce(reader: AxisReader, step: Step, over: int | Sequence[int] | None) -> None:
    given = reader.of(step.args[0])
    if over is None or over == []:
        over = range(len(given))
    dropped = {d % len(given) for d in ([over] if isinstance(over, int) else over)}
    for result in _tensors(step.result):
        keeps = result.dim() == len(given)
        left = [
            dim_of(1) if d in dropped else dim
            for d, dim in enumerate(given)
            if keeps or d not in dropped
        ]
        reader.bind(result, left)


def along(reader: AxisReader, step: Step) -> None:
    """Fix the dimensions of running sums, sorting and flips; the others stay free."""
    dims = step.kwargs.get("dim", _argument(step, 2 if step.name == "roll" else 1, "dims", -1))
    given = reader.of(step.args[0])
    for d in [dims] if isinstance(dims, int) else dims:
        fix(given[d])
    for result in _tensors(step.result):
        if result.shape == step.args[0].shape:
            reader.bind(result, given)


def matrix_product(reader: AxisReader, step: Step) -> None:
    """Equate the dimensions that mm, bmm, mv and dot sum over."""
    a, b = (reader.of(t) for t in step.args[:2])
    inner = b[-2] if len(b) > 1 else b[0]
    unify(a[-1], inner)
    batch = a[:-2]
    for x, y in zip(batch, b[:-2], strict=False):
        unify(x, y)
    rows = a[-2:-1]
    columns = b[-1:] if len(b) > 1 else []
    reader.bind(step.result, [*batch, *rows, *columns])


def matrix_product_and_sum(reader: AxisReader, step: Step) -> None:
    """Read addmm, baddbmm and addmv."""
    added, *factors = step.args[:3]
    matrix_product(reader, Step(step.name, step.function, tuple(factors), {}, step.result))
    dims = reader.of(step.result)
    for dim, of_result in zip(reversed(reader.of(added)), reversed(dims), strict=False):
        if size_of(dim) != 1:
            unify(of_result, dim)


def convolution(reader: AxisReader, step: Step) -> None:
    """Equate channels; groups of them change places as a whole."""
    x, weight, bias = step.args[:3]
    transposed = step.args[6]
    groups = step.args[8]
    given = reader.of(x)
    of_weight = reader.of(weight)
    for dim in (*given[2:], *of_weight[2:]):
        fix(dim)
    outer, inner = of_weight[:2]
    group = dim_of(groups)
    # a transposed weight is [in channels, out channels of a group, ...]
    unify(given[1], outer if transposed else product(group, inner))
    unify(outer, product(group, dim_of(size_of(outer) // groups)))
    channels = product(group, inner) if transposed else outer
    if bias is not None:
        unify(channels, reader.of(bias)[0])
    places = [dim_of(n, fixed=True) for n in step.result.shape[2:]]
    reader.bind(step.result, [given[0], channels, *places])


def product(outer: Dim, inner: Dim) -> Dim:
    """Return the product of two dimensions; one of several segments is fixed, unless the other has size 1."""
    if size_of(outer) == 1:
        return inner
    if size_of(inner) == 1:
        return outer
    a = resolved(outer)
    b = resolved(inner)
    if len(a) != 1 or len(b) != 1:
        fix(outer)
        fix(inner)
        return dim_of(size_of(outer) * size_of(inner), fixed=True)
    return ((*a[0], *b[0]),)


def batch_norm(reader: AxisReader, step: Step) -> None:
    """Equate weights and statistics with channels."""
    x, *of_channels = (t for t in step.args[:5])
    given = reader.of(x)
    for tensor in of_channels:
        if isinstance(tensor, Tensor) and tensor.dim() == 1 and len(tensor) == x.shape[1]:
            unify(given[1], reader.of(tensor)[0])
    first, *others = _tensors(step.result)
    reader.bind(first, given)
    for result in others:
        reader.bind(
            result,
            [given[1]] if result.shape == x.shape[1:2] else [dim_of(n) for n in result.shape],
        )


def layer_norm(reader: AxisReader, step: Step) -> None:
    """Equate weights with the last dimensions, over which a mean is taken."""
    x, _, weight, bias = step.args[:4]
    given = reader.of(x)
    for tensor in (weight, bias):
        if tensor is not None:
            for a, b in zip(reversed(given), reversed(reader.of(tensor)), strict=False):
                unify(a, b)
    first, *others = _tensors(step.result)
    reader.bind(first, given)
    for result in others:
        dims = [
            dim if size_of(dim) == n else dim_of(n)
            for dim, n in zip(given, result.shape, strict=False)
        ]
        reader.bind(result, dims[: result.dim()])


def group_norm(reader: AxisReader, step: Step) -> None:
    """Divide channels into the groups over which a mean is taken."""
    x, weight, bias = step.args[:3]
    groups = step.args[6]
    given = reader.of(x)
    unify(given[1], product(dim_of(groups), dim_of(x.shape[1] // groups)))
    for tensor in (weight, bias):
        if tensor is not None:
            unify(given[1], reader.of(tensor)[0])
    reader.bind(_tensors(step.result)[0], given)


def weight_norm(reader: AxisReader, step: Step) -> None:
    """Equate gains with the slices of a weight whose length they set."""
    direction, gain = step.args[:2]
    dim = _argument(step, 2, "dim", 0)
    given = reader.of(direction)
    of_gain = reader.of(gain)
    unify(given[dim], of_gain[dim])
    weight, lengths = step.result
    reader.bind(weight, given)
    reader.bind(lengths, of_gain)


def embedding(reader: AxisReader, step: Step) -> None:
    """Fix the rows of a table, which numbers name."""
    table, numbers = step.args[:2]
    of_table = reader.of(table)
    fix(of_table[0])
    for dim in reader.of(numbers):
        fix(dim)
    reader.bind(step.result, [*reader.of(numbers), of_table[1]])


def positions(reader: AxisReader, step: Step) -> None:
    """Fix the positions of pooling and resizing; channels stay free."""
    given = reader.of(step.args[0])
    for dim in given[2:]:
        fix(dim)
    for result in _tensors(step.result):
        reader.bind(result, [*given[:2], *(dim_of(n, fixed=True) for n in result.shape[2:])])


def pad(reader: AxisReader, step: Step) -> None:
    """Fix dimensions that are padded."""
    given = list(reader.of(step.args[0]))
    for d, n in enumerate(step.result.shape):
        if size_of(given[d]) != n:
            fix(given[d])
            given[d] = dim_of(n, fixed=True)
    reader.bind(step.result, given)


def attention(reader: AxisReader, step: Step) -> None:
    """Equate features of queries and keys, and heads of all three."""
    query, key, value = (reader.of(t) for t in step.args[:3])
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    for q, k, v in zip(query[:-2], key[:-2], value[:-2], strict=True):
        unify(q, product(k, dim_of(size_of(q) // size_of(k))))  # several queries may share a key
        unify(k, v)
    for extra in step.tensors[3:]:
        *heads, rows, columns = reader.of(extra)
        fix(rows)
        fix(columns)
        for one, q in zip(reversed(heads), reversed(query[:-2]), strict=False):
            if size_of(one) != 1:
                unify(one, q)
    for dim in (query[-2], key[-2]):
        fix(dim)
    reader.bind(_tensors(step.result)[0], [*query[:-1], value[-1]])


Rule = Callable[[AxisReader, Step], None]
_ELEMENTWISE = (
    *("relu", "leaky_relu", "prelu", "_prelu_kernel", "elu", "celu", "gelu", "silu", "mish", "hardtanh"),
    *("hardswish", "hardsigmoid", "softplus", "sigmoid", "tanh", "log_sigmoid_forward", "abs", "neg", "exp"),
    *("expm1", "log", "log1p"),
    *("sqrt", "rsqrt", "square", "pow", "reciprocal", "erf", "sin", "cos", "sign", "floor", "ceil", "round"),
    *("add", "sub", "rsub", "mul", "div", "clamp", "clamp_min", "clamp_max", "threshold"),
    *("maximum", "minimum", "fmax", "fmin"),
    *("where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "isnan", "isinf", "addcmul", "addcdiv", "lerp", "_to_copy", "clone"),
    *("detach", "alias", "copy", "lift_fresh", "lift_fresh_copy", "_softmax", "_log_softmax"),
    *("softshrink", "hardshrink"),
)  # fmt: skip
FACTORIES = frozenset(
    [
        *("zeros", "ones", "full", "empty", "arange", "eye", "scalar_tensor"),
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    ]
)
"""Operations that make a tensor and read no values of another, such as ``zeros_like``."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "_reshape_alias"), view),
    "permute": permute,
    **dict.fromkeys(("transpose", "t"), transpose),
    "expand": expand,
    "select": select,
    "slice": slice_along,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"), split),
    "unbind": unbind,
    **dict.fromkeys(("select_scatter", "slice_scatter"), scatter),
    **dict.fromkeys(("index", "index_select"), index),
    "cat": concatenate,
    "stack": stack,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "var_mean", "logsumexp"), reduction),
    **dict.fromkeys(("prod", "any", "all"), reduction),
    **dict.fromkeys(("norm", "linalg_vector_norm"), vector_norm),
    **dict.fromkeys(("cumsum", "cumprod", "sort", "flip", "roll"), along),
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), matrix_product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), matrix_product_and_sum),
    "convolution": convolution,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_no_update"),
        batch_norm,
    ),
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "_weight_norm_interface": weight_norm,
    "embedding": embedding,
    **dict.fromkeys(
        (
            *(f"max_pool{d}d_with_indices" for d in (2, 3)), *(f"avg_pool{d}d" for d in (1, 2, 3)),
            *(f"_adaptive_avg_pool{d}d" for d in (2, 3)), *(f"adaptive_max_pool{d}d" for d in (2, 3)),
            *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")),
            "upsample_bicubic2d", "upsample_trilinear3d", "adaptive_avg_pool1d", "max_pool2d", "adaptive_avg_pool2d",
        ),
        positions,
    ),
    "constant_pad_nd": pad,
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"), attention
    ),
}  # fmt: skip
"""Rules by the name of an ATen operation."""


def summed_dims(step: Step) -> list[tuple[Tensor, int]]:
    """Return the operands of a product, each with the dimension over which the step sums; of a convolution the weight.

    The number of a dimension may be negative.
    """
    name = step.name
    args = step.args
    if name in ("mm", "bmm", "mv", "dot"):
        return [(args[0], -1), (args[1], -2 if args[1].dim() > 1 else 0)]
    if name in ("addmm", "baddbmm", "addmv"):
        return [(args[1], -1), (args[2], -2 if args[2].dim() > 1 else 0)]
    if name == "convolution":
        return [(args[1], 0 if args[6] else 1)]
    return []
