"""The elements of constants made of buffers that may become different from zero, for any values of the buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.trace.functions import ARITHMETIC, tensors_in


class OfBuffers(NamedTuple):
    """A constant made of buffers, where it may come to differ from zero, and the names of the buffers."""

    constant: Tensor
    differs: Tensor
    names: frozenset[str]


def anywhere(like: Tensor) -> Tensor:
    """Return a mask of this shape, all true, in the memory of one element."""
    return torch.ones((), dtype=torch.bool).expand(like.shape)


def differing(
    name: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    differs: Callable[[Tensor], Tensor],
    *,
    moves: bool,
) -> list[Tensor] | None:
    """Return where the results of an operation on constants may differ from zero; None if anywhere.

    Args:
        name: of the operation.
        func: its function.
        args: its arguments.
        kwargs: those by name.
        differs: where an argument may.
        moves: whether it moves the elements of its first argument, and does no more.
    """
    if name in ARITHMETIC and len(args) > 1:
        return [_of_arithmetic(name, args[0], args[1], differs)]
    if name.rstrip("_") in _ALIKE and isinstance(args[0], Tensor):
        return [differs(args[0])]
    if not moves and name not in _SUMS:
        return None
    taken = 1 if moves else len(args)
    shown = pytree.tree_map_only(Tensor, lambda t: differs(t).float(), tuple(args[:taken]))
    try:
        made = func(*shown, *args[taken:], **kwargs)
    except (RuntimeError, TypeError):  # such as numbers read as those of another type
        return None
    return [t != 0 for t in tensors_in([made], {})]


def _of_arithmetic(name: str, x: Any, y: Any, differs: Callable[[Tensor], Tensor]) -> Tensor:
    """Return where a sum, a product or a quotient of two operands may differ from zero."""
    a = differs(x) if isinstance(x, Tensor) else torch.tensor(x != 0)
    b = differs(y) if isinstance(y, Tensor) else torch.tensor(y != 0)
    if "div" in name:
        dividend = b if name.startswith("__r") else a
        return dividend.expand(torch.broadcast_shapes(a.shape, b.shape))
    return a & b if "mul" in name else a | b


_ALIKE = {
    "abs",
    "neg",
    "sqrt",
    "square",
    "relu",
    "clone",
    "contiguous",
    "detach",
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "type",
    "cpu",
}
_SUMS = {
    "sum",
    "mean",
    "cumsum",
    "matmul",
    "mm",
    "bmm",
    "mv",
    "dot",
    "diag",
    "tril",
    "triu",
}
