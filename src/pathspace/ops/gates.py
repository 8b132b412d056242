"""Operations that open and close edges depending on the data: ReLU and its kin, and maxima.

A gate g is 0 or 1, or the slope of a leaky ReLU: the output is g times the input (for a maximum,
the sum over the window, with ties shared). So an output of the network is a sum over paths of
input, gates, fixed factors and weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev
from torch.utils import _pytree as pytree

from pathspace.network.rules.order import RULES as ORDERED
from pathspace.network.rules.order import dimension
from pathspace.network.trace.functions import CLAMPS
from pathspace.ops.probing import each

_PIECEWISE = ("relu", "leaky_relu", "rrelu", "prelu", "_prelu_kernel", "abs", "threshold")
_UNARY = frozenset([*_PIECEWISE, "rrelu_"])
_POOLS = re.compile(r"_?(adaptive_)?max_pool[123]d(_with_indices)?|amax|amin|max|min")
_BILINEAR = frozenset(["mul", "div", "mm", "mv", "bmm"])
ACCUMULATED = frozenset(["index_add", "scatter_add"])
REDUCED = frozenset(["scatter_reduce"])

Edges = tuple[Tensor, Tensor, Tensor]
"""(o, i, g): elements of the result and of the operands, one after the other, and the gates between them."""


@dataclass(frozen=True)
class Gated:
    """A gated operation as a function of its operands."""

    operands: tuple[Tensor, ...]
    edges: Edges


def gated(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Gated | None:
    """Return the gates in a call of a torch function; None for an affine function."""
    if not args and "input" not in kwargs:
        return None
    x = args[0] if args else kwargs["input"]

    def on(value: Tensor) -> Tensor:
        if args:
            return func(value, *args[1:], **kwargs)
        return func(**{**kwargs, "input": value})

    if name in _UNARY or name in CLAMPS:
        return Gated((x,), _slopes(on, x))
    options = {key: value for key, value in kwargs.items() if key != "input"}
    of_all = name == "median" and len(args) < 2 and not kwargs
    if name in ORDERED and not of_all:
        return Gated((x,), _ordered(on, x, dimension(name, args[1:], options), name))
    return _maximum(name, on, x, args[1] if len(args) > 1 else kwargs.get("other"))


def _maximum(name: str, on: Callable[[Tensor], Any], x: Tensor, other: Any) -> Gated | None:
    """Return the gates of a maximum or minimum of two tensors, or of windows; None for any other function."""
    if name in _OF_TWO and isinstance(other, Tensor):
        sign = _OF_TWO[name]
        return Gated((x, other), _larger(sign * x, sign * other))
    if _POOLS.fullmatch(name) or "median" in name:
        return Gated((x,), _pooled(on, x, -1 if name in ("min", "amin") else 1))
    return None


_OF_TWO = {"maximum": 1, "max": 1, "minimum": -1, "min": -1}
"""Functions that return the larger of two tensors, times a sign."""


def _pooled(on: Callable[[Tensor], Any], x: Tensor, sign: int) -> Edges:
    """Return the edges of a maximum of windows; the smallest is the largest of the negatives."""

    def largest(value: Tensor) -> Tensor:
        result = on(sign * value)
        return sign * (result if isinstance(result, Tensor) else result[0])

    return _windows(largest, sign * x)


def is_relu(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a clamp with these arguments is a ReLU or the negative part."""
    limits = [*args[1:3], kwargs.get("min"), kwargs.get("max")]
    bounds = [bound for bound in limits if bound is not None]
    return len(bounds) == 1 and not bool(torch.as_tensor(bounds[0]).any())


def gated_by_data(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_unit: Callable[[Any], bool],
    is_data: Callable[[Any], bool],
) -> Gated | None:
    """Return the gates that data alone opens and closes, such as a mask; None for any other function.

    ``is_unit`` and ``is_data`` say which tensors are activations, and which depend on the inputs
    alone.
    """
    if name in _BILINEAR:
        return _weighted(func, args, kwargs, is_unit, is_data)
    if name in REDUCED:
        return _reduced(
            *args, given=is_data(args[2] if len(args) > 2 else kwargs["index"]), **kwargs
        )
    if name == "__getitem__":
        return _indexed(args[0], args[1], is_data)
    place = _PLACE_OF_DATA.get(name)
    if place is None or len(args) <= place or not is_data(args[place]):
        return None
    if name == "where":
        return chosen(args[0], *args[1:], *(kwargs[k] for k in ("input", "other") if k in kwargs))
    if name == "masked_fill":
        fill = [*args, kwargs.get("value")][2]
        return chosen(args[1], fill, args[0])
    if name == "gather":
        return Gated((args[0],), _picked(lambda h: func(h, *args[1:]), args[0], args[1], keep=True))
    if name == "index_select":
        return Gated((args[0],), _chosen_along(lambda h: func(h, *args[1:]), args[0], args[1]))
    return _accumulated(name, *args, **kwargs)


_PLACE_OF_DATA = {
    "where": 0,
    "masked_fill": 1,
    "gather": 2,
    "index_select": 2,
    **dict.fromkeys(ACCUMULATED, 2),
}
"""The argument that opens and closes edges if it is data."""


def _indexed(x: Tensor, place: Any, is_data: Callable[[Any], bool]) -> Gated | None:
    """Return the gates of ``x[place]`` with indices that are data; None if there is none."""
    items = place if isinstance(place, tuple) else (place,)
    dims = [d for d, item in enumerate(items) if is_data(item)]
    if not dims:
        return None
    if sum(isinstance(item, Tensor) for item in items) > 1:
        return Gated((x,), _picked(lambda h: h[place], x, dims[0], keep=False))
    return Gated((x,), _chosen_along(lambda h: h[place], x, dims[0]))


def _accumulated(
    name: str, base: Tensor, dim: int, index: Tensor, *given: Any, **kwargs: Any
) -> Gated:
    """Return the gates of ``index_add`` and ``scatter_add`` at places that are data."""
    source: Any = given[0] if given else kwargs.get("source", kwargs.get("src"))
    add = torch.scatter_add if name.startswith("scatter") else torch.index_add
    options = {"alpha": kwargs["alpha"]} if "alpha" in kwargs else {}
    return Gated(
        (base, source), _added(lambda t, s: add(t, dim, index, s, **options), base, dim, source)
    )


def _weighted(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    is_unit: Callable[[Any], bool],
    is_data: Callable[[Any], bool],
) -> Gated | None:
    """Return the gates of a product of activations with data; None for any other product."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    # an input that was read before has nodes, and is in both
    acts = [i for i, t in enumerate(leaves) if is_unit(t)]
    factors = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and is_data(t)]
    if len(acts) != 1 or len(factors) != 1:
        return None
    act = acts[0]
    factor = factors[0]

    def product(h: Tensor, d: Tensor) -> Tensor:
        new = list(leaves)
        new[act] = h.reshape(leaves[act].shape)
        new[factor] = d
        args, kwargs = pytree.tree_unflatten(new, form)
        return func(*args, **kwargs)

    h = leaves[act]
    d = leaves[factor].detach().double()
    one = torch.ones_like(d)
    return Gated((h,), _opened(lambda u: product(u, one), lambda u: product(u, d), h.numel()))


def _opened(
    possible: Callable[[Tensor], Tensor], actual: Callable[[Tensor], Tensor], elements: int
) -> Edges:
    """Return the edges of a linear map that data might open; the data's value is the gate.

    Args:
        possible: from a vector of elements to all that any data would make of it.
        actual: to what these data make of it.
        elements: how many there are.
    """
    units = torch.eye(elements, dtype=torch.float64)
    edges = each(lambda unit: possible(unit.clone()).reshape(-1), units)  # it may be written to
    i, o = edges.nonzero(as_tuple=True)
    return o, i, (each(lambda unit: actual(unit).reshape(-1), units) / edges)[i, o]


def _picked(pick: Callable[[Tensor], Tensor], x: Tensor, dim: int, *, keep: bool) -> Edges:
    """Return edges from all elements that can be picked along a dimension; the picked one's gate is open."""
    shape = pick(x).shape
    part = (
        tuple(slice(None) if d == dim % x.dim() else slice(n) for d, n in enumerate(shape))
        if keep
        else ()
    )

    def any_of(unit: Tensor) -> Tensor:
        return unit.reshape(x.shape).sum(dim, keepdim=keep)[part].expand(shape)

    return _opened(any_of, lambda unit: pick(unit.reshape(x.shape)), x.numel())


def _chosen_along(pick: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Edges:
    """Return edges from all along a dimension to each picked element, the other indices being equal."""
    size = pick(x).numel() // max(1, x.numel() // x.shape[dim])
    after = x.shape[dim % x.dim() + 1 :].numel()

    def any_of(unit: Tensor) -> Tensor:
        return unit.reshape(x.shape).sum(dim).reshape(-1, 1, after).expand(-1, size, -1)

    return _opened(any_of, lambda unit: pick(unit.reshape(x.shape)), x.numel())


def _added(
    add: Callable[[Tensor, Tensor], Tensor],
    base: Tensor,
    dim: int,
    source: Tensor,
    *,
    given: bool = True,
) -> Edges:
    """Return edges from every element, and from every summand to the place along a dimension where it is added.

    Where the places are ``given`` by data, there are edges to all of them, of which that one is
    open.
    """
    zero = torch.zeros(base.shape, dtype=torch.float64)
    n = base.numel()

    def there(unit: Tensor) -> Tensor:
        return add(zero, unit.reshape(source.shape))

    def anywhere(unit: Tensor) -> Tensor:
        return there(unit).sum(dim, keepdim=True).expand(base.shape)

    o, i, opened = _opened(anywhere if given else there, there, source.numel())
    direct = torch.arange(n)
    one = torch.ones(n, dtype=torch.float64)
    return torch.cat([direct, o]), torch.cat([direct, i + n]), torch.cat([one, opened])


def _reduced(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    given: bool,
) -> Gated | None:
    """Return edges of sums and maxima at places; in a maximum, the edge from the first largest element is open.

    Returns:
        None for sums at places that are not given by data, which are affine.
    """
    if reduce == "sum" and include_self and not given:
        return None
    n = input.numel()
    o, i, meet = _added(lambda t, s: t.scatter_add(dim, index, s), input, dim, src, given=given)
    if not include_self:
        ones = torch.ones(src.shape, dtype=torch.float64)
        reached = torch.zeros(input.shape, dtype=torch.float64).scatter_add(dim, index, ones)
        meet[:n] = (reached == 0).double().flatten()
    if reduce != "sum":
        values = torch.cat([t.detach().double().flatten() for t in (input, src)])[i]
        values = torch.where(meet > 0, values if reduce == "amax" else -values, -torch.inf)
        largest = torch.full((n,), -torch.inf, dtype=torch.float64).scatter_reduce(
            0, o, values, "amax"
        )
        (winners,) = ((values == largest[o]) & (meet > 0)).nonzero(as_tuple=True)
        first = torch.full((n,), len(o)).scatter_reduce(0, o[winners], winners, "amin")
        meet = torch.zeros_like(meet).index_fill(0, first[first < len(o)], 1.0)
    return Gated((input, src), (o, i, meet))


def chosen(condition: Tensor, x: Any, y: Any) -> Gated:
    """Return the edges of a choice between two values, of which a condition opens one."""
    operands = [
        t if isinstance(t, Tensor) else torch.tensor(float(t), dtype=torch.float64) for t in (x, y)
    ]
    shape = torch.broadcast_shapes(condition.shape, *(t.shape for t in operands))
    opened = condition.detach().double().expand(shape).flatten()
    parts = []
    before = 0
    for t, branch, gate in zip(operands, (x, y), (opened, 1 - opened), strict=True):
        if isinstance(branch, Tensor) or branch not in (
            0,
            torch.inf,
            -torch.inf,
        ):  # these have no path
            members = (
                torch.arange(before, before + t.numel()).reshape(t.shape).expand(shape).flatten()
            )
            parts.append(torch.stack([torch.arange(shape.numel()), members, gate]))
        before += t.numel()
    o, i, g = torch.cat(parts, 1)
    return Gated(tuple(operands), (o.long(), i.long(), g))


def _ordered(function: Callable[[Tensor], Any], x: Tensor, dim: int | None, name: str) -> Edges:
    """Return edges from all along a dimension, or from all up to a place; the one that the result shows is open."""
    dim = -1 if dim is None else dim
    running = name.startswith("cum")
    created = function(x.detach())
    places = torch.sort(x.detach(), 0)[1] if isinstance(created, Tensor) else created[1]
    places = places if places.dim() == x.dim() else places.unsqueeze(dim)

    def any_of(unit: Tensor) -> Tensor:
        t = unit.reshape(x.shape)
        return t.cumsum(dim) if running else t.sum(dim, keepdim=True).expand(places.shape)

    return _opened(any_of, lambda unit: unit.reshape(x.shape).gather(dim, places), x.numel())


def _slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> Edges:
    y = function(x.detach().clone())
    place = torch.arange(x.numel())
    return (
        place,
        place,
        torch.where(x != 0, y / torch.where(x != 0, x, 1.0), 0.0).flatten().detach(),
    )


def _larger(x: Tensor, y: Tensor) -> Edges:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    place = torch.arange(shape.numel())
    first = torch.arange(x.numel()).reshape(x.shape).expand(shape).flatten()
    second = torch.arange(y.numel()).reshape(y.shape).expand(shape).flatten() + x.numel()
    wins = ((x > y).double() + 0.5 * (x == y).double()).expand(shape).flatten().detach()
    return torch.cat([place, place]), torch.cat([first, second]), torch.cat([wins, 1 - wins])


def _windows(function: Callable[[Tensor], Tensor], x: Tensor) -> Edges:
    def flat(v: Tensor) -> Tensor:
        return function(v.reshape(x.shape)).reshape(-1)

    # one at element i and zero elsewhere: the largest of a window is one if i is in it
    member = each(flat, torch.eye(x.numel(), dtype=torch.float64)) > 0
    i, o = member.nonzero(as_tuple=True)
    chosen = jacrev(flat)(x.detach().reshape(-1))
    return o, i, chosen[o, i]  # type: ignore[index]
