"""An operation as an affine function of its activations and of its parameters, found by running it.

    f(h, w)_o = k_o + sum_i c_oi h_i + sum_e c_oe w_e + sum_{i,e} c_oie h_i w_e

Letters: h activations, one vector for each operand a; w weights, one vector for each parameter b; o
an element of the result; k constant, c factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError
from pathspace.ops.probing import Reads, reads, reads_of_each

_AGREES = 1e-9
NOT_WRITTEN = "Paths of this network cannot be written down; its path norm and kappa can"


class Operation:
    """A function of some of its tensors, flattened; it writes into none of them.

    Args:
        func: the function.
        args: the positional arguments it was called with.
        kwargs: the keyword arguments.
        places: which leaves of the arguments are variables.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: Sequence[int],
    ) -> None:
        self.func = func
        self.places = tuple(places)
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """Compute the result, all its tensors in one vector, for other values ``[n]`` of the variables."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value.reshape(self.leaves[place].shape)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.func(*args, **kwargs)
        vector = torch.cat([t.reshape(-1) for t in floats(result)])
        # no path starts at an infinity of padding
        return vector.masked_fill(vector.isinf(), 0.0)

    def form(self) -> tuple[Any, ...]:
        """Return a key of the facts on which the terms depend: everything but the values of the variables.

        Constants go by identity, so they must be kept alive.
        """
        parts: list[Any] = [self.func, repr(self.spec), self.places]
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                parts.append(leaf.shape if place in self.places else id(leaf))
            else:
                parts.append(repr(leaf))
        return tuple(parts)


def floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested tuples, lists and dicts."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors of these shapes."""
    parts = vector.split([t.numel() for t in like])
    return [part.reshape(t.shape) for part, t in zip(parts, like, strict=True)]


@dataclass(frozen=True)
class Terms:
    """The terms of an affine operation.

    Attributes:
        constant: k, ``[outputs]``.
        fixed: (a, reads of operand a).
        biased: (b, reads of parameter b alone).
        mixed: (a, b, reads of operand a, ``member`` being the element of parameter b).
    """

    constant: Tensor
    fixed: tuple[tuple[int, Reads], ...]
    biased: tuple[tuple[int, Reads], ...]
    mixed: tuple[tuple[int, int, Reads], ...]


def single(terms: Terms, operand: int) -> Reads:
    """Return the reads of one operand, which may be none."""
    for a, found in terms.fixed:
        if a == operand:
            return found
    nothing = torch.zeros(0, dtype=torch.long)
    return Reads(nothing, nothing, torch.zeros(0, dtype=torch.float64), nothing)


def terms_of(operation: Operation, values: Sequence[Tensor], operands: int) -> Terms:
    """Find the terms of an operation.

    Args:
        operation: a function of the operands, then of the parameters.
        values: the values it was called with, flattened.
        operands: how many of them are activations.

    Returns:
        The terms; meaningless for an operation that is not affine, see :func:`check_terms`.

    Raises:
        UntraceableError: there are too many of them.
    """
    probe = _Probe(operation, values)
    alone = [reads(probe.of_one(i), len(value)) for i, value in enumerate(values)]
    fixed = [(i, found) for i, found in enumerate(alone[:operands]) if len(found.target)]
    biased = [(i, found) for i, found in enumerate(alone[operands:]) if len(found.target)]
    mixed = []
    for a, b in itertools.product(range(operands), range(operands, len(values))):
        if probe.only_adds(a, b):
            continue
        result = reads_of_each(
            probe.of_two(a, b), len(values[a]), len(values[b]), len(probe.constant)
        )
        mixed.append((a, b - operands, result))
    return Terms(probe.constant, tuple(fixed), tuple(biased), tuple(mixed))


class _Probe:
    """An operation as a function of one or two of its variables, the others being zero."""

    def __init__(self, operation: Operation, values: Sequence[Tensor]) -> None:
        self._operation = operation
        self._zeros = [torch.zeros_like(value) for value in values]
        self.constant = self.at({})

    def at(self, given: Mapping[int, Tensor]) -> Tensor:
        """Compute the operation with some variables as given."""
        return self._operation([given.get(i, zero) for i, zero in enumerate(self._zeros)])

    def of_one(self, i: int) -> Callable[[Tensor], Tensor]:
        """Return the linear part of the operation in one variable."""
        return lambda v: self.at({i: v}) - self.constant

    def of_two(self, i: int, j: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the bilinear part of the operation in two variables."""
        first = self.of_one(i)
        second = self.of_one(j)
        return lambda v, w: self.at({i: v, j: w}) - first(v) - second(w) - self.constant

    def only_adds(self, i: int, j: int) -> bool:
        """Return whether the bilinear part is zero, up to rounding."""
        generator = torch.Generator().manual_seed(0)
        v = torch.rand(len(self._zeros[i]), generator=generator, dtype=torch.float64) + 1
        w = torch.rand(len(self._zeros[j]), generator=generator, dtype=torch.float64) + 1
        together = self.at({i: v, j: w})
        size = together.abs().amax() if together.numel() else torch.zeros(())
        product = self.of_two(i, j)(v, w)
        return bool((product.abs() <= 1e-12 * size).all())


def check_terms(
    name: str, terms: Terms, values: Sequence[Tensor], operands: int, actual: Tensor
) -> None:
    """Make sure that terms add up to what the operation really returned.

    Args:
        name: what the operation is called, for the error.
        terms: from :func:`terms_of`.
        values: the values it was called with, flattened.
        operands: how many of them are activations.
        actual: what it returned.

    Raises:
        UntraceableError: the operation is not affine in its activations and in its parameters.
    """
    result = terms.constant.clone()
    for a, found in terms.fixed:
        result.index_add_(0, found.target, found.factor * values[a][found.source])
    for b, found in terms.biased:
        result.index_add_(0, found.target, found.factor * values[operands + b][found.source])
    for a, b, found in terms.mixed:
        weights = values[operands + b][found.member]
        result.index_add_(0, found.target, found.factor * values[a][found.source] * weights)
    # an infinity that a mask put there is moved, and a maximum passes it over
    is_finite = ~torch.isinf(actual)
    actual = actual[is_finite]
    error = (result[is_finite] - actual).abs()
    scale = 1 + actual.abs().amax() if actual.numel() else 1.0
    if bool((error <= _AGREES * scale).all()):
        return
    why = (
        "its result is not the sum of paths that its arguments allow: it is neither affine nor a "
        "ReLU or maximum"
    )
    raise UntraceableError(name, "", why, NOT_WRITTEN)
