"""The elements that a linear operation reads, found by running it on numbers that identify their origin.

An operation f that is linear in h has f(h)_o = sum_i c_oi h_i. Where an output reads a single
element, as in all operations that move values, h = 1 gives its factor c_oi and h = i (i = 1, 2,
...) the element; h at random says whether this is all that the output reads. (h = i^2 would not:
extrapolation by (1, -3, 3) agrees with it.) Elsewhere unit vectors find the factors.

Letters: i an element of the argument, o one of the result, b an optional batch of linear maps, c a
factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from pathspace.network.errors import UntraceableError

LARGEST = 10_000_000
"""Most numbers that one probe may make at a time; 80 MB."""
MOST = 400_000_000
"""Most numbers that the probes of one operation may make; seconds."""
_FITS = 1e-9


@dataclass(frozen=True)
class Reads:
    """Triples (o, i, c), and the number of the linear map in a batch of them."""

    target: Tensor
    source: Tensor
    factor: Tensor
    member: Tensor


def reads(function: Callable[[Tensor], Tensor], elements: int) -> Reads:
    """Find all (o, i, c) with f(h)_o = sum_i c_oi h_i, c not zero.

    Args:
        function: f, from h ``[elements]`` to ``[outputs]`` or to a batch of maps ``[members,
            outputs]``; linear.
        elements: how many elements h has.
    """
    # element i is numbered i + 1, so that zero stands for none
    numbers = torch.arange(elements + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    randoms = torch.rand(elements + 1, dtype=torch.float64, generator=generator)
    factor = function(torch.ones_like(numbers[1:]))
    weighted = function(numbers[1:])
    checked = function(randoms[1:])
    is_read = factor != 0
    quotient = weighted / torch.where(is_read, factor, 1.0)
    number = torch.where(is_read, quotient, 0.0).round()
    within = number.nan_to_num().clamp(0, elements).long()
    error = (checked - factor * randoms[within]).abs()
    reads_one = (number == within) & (error <= _FITS * factor.abs())
    if not bool(reads_one.all()):
        return _by_unit_vectors(function, elements)
    member, target = _split(is_read)
    return Reads(target, number[is_read].long() - 1, factor[is_read], member)


def reads_of_each(
    function: Callable[[Tensor, Tensor], Tensor], elements: int, members: int, outputs: int
) -> Reads:
    """Find all c_oie of a bilinear f(h, w)_o = sum_ie c_oie h_i w_e.

    For w a unit vector e, f is linear in h. Several e are tried at once, as many as memory allows.

    Args:
        function: f, from h ``[elements]`` and w ``[members]`` to ``[outputs]``.
        elements: the number of elements of h.
        members: the number of elements of w.
        outputs: the number of elements of the result.

    Returns:
        (o, i, c) with ``member`` = e.
    """
    if members * (members + outputs) > MOST:
        raise too_large(members * outputs)
    step = max(1, LARGEST // (members + outputs))
    result: list[Reads] = []
    for first in range(0, members, step):
        count = min(step, members - first)
        units = torch.zeros(count, members, dtype=torch.float64)
        units[torch.arange(count), first + torch.arange(count)] = 1
        part = reads(_at_each(function, units), elements)
        result.append(Reads(part.target, part.source, part.factor, part.member + first))
    return Reads(
        torch.cat([part.target for part in result]),
        torch.cat([part.source for part in result]),
        torch.cat([part.factor for part in result]),
        torch.cat([part.member for part in result]),
    )


def _at_each(
    function: Callable[[Tensor, Tensor], Tensor], rows: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return h -> f(h, w) for every row w, ``[rows, outputs]``."""
    return lambda h: each(lambda w: function(h, w), rows)


def too_large(size: int) -> UntraceableError:
    """Return the error for an operation that has too many pairs of elements."""
    return UntraceableError(
        "writing down the graph",
        "",
        f"one operation has {size:,} pairs of elements",
        "Use smaller layers, images or a shorter sequence; path norm and kappa need no written-out graph",
    )


def _by_unit_vectors(function: Callable[[Tensor], Tensor], elements: int) -> Reads:
    size = elements * function(torch.zeros(elements, dtype=torch.float64)).numel()
    if size > 5 * LARGEST:
        raise too_large(size)
    matrix = each(function, torch.eye(elements, dtype=torch.float64))  # [i, o] or [i, b, o]
    where = matrix.nonzero(as_tuple=True)
    member = where[1] if matrix.dim() == 3 else torch.zeros_like(where[0])
    return Reads(where[-1], where[0], matrix[where], member)


def _split(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps and the outputs at which a mask ``[outputs]`` or ``[members, outputs]`` holds."""
    if mask.dim() == 2:
        member, target = mask.nonzero(as_tuple=True)
        return member, target
    (target,) = mask.nonzero(as_tuple=True)
    return torch.zeros_like(target), target


def each(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function to every row, one after the other if it cannot be vectorized."""
    try:
        return vmap(function)(rows)
    except (RuntimeError, NotImplementedError):  # an operation without a batching rule
        return torch.stack([function(row) for row in rows])
