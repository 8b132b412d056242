"""An operation as an affine function of its activations and of its parameters, found by running it.

    f(h, w)_o = k_o + sum_i c_oi h_i + sum_e c_oe w_e + sum_{i,e} c_oie h_i w_e

Letters: h activations, one vector for each operand a; w weights, one vector for each parameter b; o
an element of the result; k constant, c factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        found = torch.cat([t.reshape(-1) for t in floats(result)])
        return found.masked_fill(found.isinf(), 0.0)  # no path starts at an infinity of padding

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
    zeros = [torch.zeros_like(g) for g in values]

    def at(**changed: Tensor) -> Tensor:
        return operation([changed.get(f"v{i}", z) for i, z in enumerate(zeros)])

    constant = at()

    def alone(i: int) -> Callable[[Tensor], Tensor]:
        return lambda v: at(**{f"v{i}": v}) - constant

    single = [reads(alone(i), len(g)) for i, g in enumerate(values)]
    mixed = []
    for a in range(operands):
        for b in range(operands, len(values)):

            def product(h: Tensor, w: Tensor, a: int = a, b: int = b) -> Tensor:
                return at(**{f"v{a}": h, f"v{b}": w}) - alone(a)(h) - alone(b)(w) - constant

            generator = torch.Generator().manual_seed(0)
            h, w = (
                torch.rand(len(values[i]), generator=generator, dtype=torch.float64) + 1
                for i in (a, b)
            )
            size = (
                at(**{f"v{a}": h, f"v{b}": w}).abs().amax() if constant.numel() else torch.zeros(())
            )
            if bool((product(h, w).abs() <= 1e-12 * size).all()):
                continue  # they only add up

            result = reads_of_each(product, len(h), len(w), len(constant))
            mixed.append((a, b - operands, result))
    return Terms(
        constant,
        tuple((a, single[a]) for a in range(operands) if len(single[a].target)),
        tuple(
            (b - operands, single[b]) for b in range(operands, len(values)) if len(single[b].target)
        ),
        tuple(mixed),
    )


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
    for a, r in terms.fixed:
        result.index_add_(0, r.target, r.factor * values[a][r.source])
    for b, r in terms.biased:
        result.index_add_(0, r.target, r.factor * values[operands + b][r.source])
    for a, b, r in terms.mixed:
        result.index_add_(
            0, r.target, r.factor * values[a][r.source] * values[operands + b][r.member]
        )
    shown = ~torch.isinf(
        actual
    )  # an infinity that a mask put there is moved, and passed over by a maximum
    actual = actual[shown]
    result = result[shown]
    scale = 1 + actual.abs().amax() if actual.numel() else 1.0
    if not bool(((result - actual).abs() <= _AGREES * scale).all()):
        why = "its result is not the sum of paths that its arguments allow: it is neither affine nor a ReLU or maximum"
        raise UntraceableError(name, "", why, NOT_WRITTEN)
