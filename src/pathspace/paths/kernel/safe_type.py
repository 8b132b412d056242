"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.norm import all_widened
from pathspace.squared.sharding import extremes, first_sharded, is_sharded, to_local, totals
from pathspace.squared.squares import Outer, dense

Values = dict[str, Tensor | Outer]
MODERATE = 1e15
"""Means beyond this or below its inverse ask for float64, so that no rescaling by thousands can make the difference."""


@dataclass
class Surveyed:
    """Values of parameters, and what a look at them told.

    Attributes:
        values: the values.
        bounds: by name, the smallest and largest element of each factor: of the tensor, or of rows
            and columns.
        means: by name, the mean of each factor; empty where nobody asked for them.
    """

    values: Values
    bounds: dict[str, tuple[tuple[float, float], ...]]
    means: dict[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        """Return the mean of a parameter's value."""
        return math.prod(self.means[name])

    def largest(self, name: str) -> float:
        """Return the largest element of a parameter's value; NaN if any is."""
        return math.prod(high for _, high in self.bounds[name])

    def types(self) -> dict[str, torch.dtype]:
        """Return the types of the values, by name."""
        return {name: value.dtype for name, value in self.values.items()}

    def fits(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a type holds the largest value, and not only digits lost near zero."""
        limits = torch.finfo(dtype)
        largest = self.largest(name)
        if dtype == torch.float64:
            return math.isfinite(largest)
        return limits.tiny / limits.eps <= largest <= limits.max

    def fits_all(self, types: Mapping[str, torch.dtype], *, zero_fits: bool = False) -> bool:
        """Return whether each type holds the largest value of its parameter.

        Args:
            types: by name.
            zero_fits: whether values that are all zero fit.
        """
        return all(
            (zero_fits and self.largest(name) == 0.0) or self.fits(name, types[name])
            for name in self.values
        )

    @property
    def moderate(self) -> bool:
        """True if all means are well within the range of float32; rescaling does not change the answer."""
        numbers = (number for numbers in self.means.values() for number in numbers)
        return all(number == 0 or 1 / MODERATE <= number <= MODERATE for number in numbers)


@dataclass
class Measured:
    """Values of parameters, and what was computed of them, where they are.

    Attributes:
        values: the values.
        numbers: the smallest and largest element of every factor, then their means, if asked for.
        spans: name -> the places of its factors among these.
        count: of the factors.
        has_means: whether means are there.
    """

    values: Values
    numbers: Tensor | None
    spans: dict[str, list[int]]
    count: int
    has_means: bool

    def read(self) -> Surveyed:
        """Wait for the numbers."""
        numbers = [] if self.numbers is None else self.numbers.tolist()
        ends = list(
            zip(numbers[: 2 * self.count : 2], numbers[1 : 2 * self.count : 2], strict=True)
        )
        means = numbers[2 * self.count :]
        bounds = {name: tuple(ends[i] for i in span) for name, span in self.spans.items()}
        if not self.has_means:
            return Surveyed(self.values, bounds, {})
        return Surveyed(
            self.values,
            bounds,
            {name: tuple(means[i] for i in span) for name, span in self.spans.items()},
        )


def survey(
    values: Values, parameters: Mapping[str, Tensor] | None = None, *, with_means: bool = False
) -> Surveyed:
    """Look at all values in one synchronisation; for the arguments see :func:`measured`."""
    return measured(values, parameters, with_means=with_means).read()


def measured(
    values: Values, parameters: Mapping[str, Tensor] | None = None, *, with_means: bool = False
) -> Measured:
    """Compute what a survey tells, without a synchronisation in one process.

    Args:
        values: tensors or outer products by name; none negative.
        parameters: whose values they are; where these are split over processes, it is all parts
            that are looked at.
        with_means: whether to find means, too.
    """
    owners = {} if parameters is None else {name: parameters[name] for name in values}
    split = first_sharded(owners.values())
    factors, holders, spans = _distinct_factors(values, owners)
    # of an empty part, the ends that change those of no other part
    empty = (1.0, 1.0) if split is None else (math.inf, -math.inf)
    ends: list[Tensor] = []
    for t in factors:
        if t.numel():
            ends.extend(t.aminmax())
        else:
            ends.extend(t.new_full((), end) for end in empty)
    means: list[Tensor] = []
    if with_means:
        means = [t.mean() if t.numel() else t.new_zeros(()) for t in factors]
    if split is not None:
        ends = [*extremes(torch.stack(ends).view(-1, 2), split).view(-1)]
        means = _means_of_all_parts(means, holders)
    numbers = torch.stack(ends + means) if ends else None
    return Measured(values, numbers, spans, len(factors), with_means)


def _distinct_factors(
    values: Values, owners: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, list[int]]]:
    """Return the factors of all values, each once, since biases share their kappa.

    Returns:
        The factors; for each, the tensor that has its rows in this process, as what columns have is
        alike everywhere; and name -> the places of its factors.
    """
    factors: list[Tensor] = []
    holders: list[Tensor] = []
    places: dict[int, int] = {}
    spans: dict[str, list[int]] = {}
    for name, value in values.items():
        own = (value.rows, value.columns) if isinstance(value, Outer) else (value,)
        for i, t in enumerate(own):
            if id(t) not in places:
                places[id(t)] = len(factors)
                factors.append(t)
                holders.append(t if i else owners.get(name, t))
        spans[name] = [places[id(t)] for t in own]
    return factors, holders, spans


def _means_of_all_parts(means: Sequence[Tensor], holders: Sequence[Tensor]) -> list[Tensor]:
    """Return the means over the parts in all processes."""
    if not means:
        return []
    shares = [to_local(p).shape[0] / p.shape[0] if is_sharded(p) else 1.0 for p in holders]
    shared = [mean * share for mean, share in zip(means, shares, strict=True)]
    return [*totals(torch.stack(shared), holders)]


def in_safe_type(
    network: Network,
    parameters: Mapping[str, Tensor] | None,
    compute: Callable[[Mapping[str, Tensor]], Values],
    seen: Callable[[Values], Values] | None = None,
    repeat: Callable[[Callable[[], Measured]], Measured] | None = None,
) -> Surveyed:
    """Compute non-negative quantities of parameters, again in float64 if they overflow or vanish.

    Elements grow and shrink with the scales of the weights, so that of two members of a rescaling
    class one may fit a type and the other not, and rounding would tell them apart. Means in the
    gauge do not: where one is extreme, both are computed and kept in float64.

    Args:
        network: a traced network.
        parameters: values by name; the network's own if None.
        compute: from parameters to a tensor for each of some of them.
        seen: what is looked at and returned in the place of the quantities: they as they are in the
            gauge of the network. Means are found of these.
        repeat: evaluates what is computed in the parameters' types, as a recording does.

    Returns:
        The tensors, in the parameters' types (float32 for half precision), or all in float64 if one
        of them has a largest value that those cannot hold, or a mean is extreme.

    Raises:
        FloatingPointError: a value is not finite even in float64.
    """
    source = network.parameters if parameters is None else parameters
    with_means = seen is not None

    def look(values: Values) -> Measured:
        return measured(values if seen is None else seen(values), source, with_means=with_means)

    def evaluate() -> Measured:
        return look(compute(all_widened(source, network.parameters)))

    result = (evaluate() if repeat is None else repeat(evaluate)).read()
    own_types = result.types()
    moderate = result.moderate or set(own_types.values()) <= {torch.float64}
    if moderate and result.fits_all(own_types):
        return result
    # factors of a product that fits need not fit themselves
    wide = compute({name: source[name].double() for name in network.parameters})
    result = look({name: dense(value) for name, value in wide.items()}).read()
    _expect_finite(result)
    types = {name: p.dtype for name, p in all_widened(source, network.parameters).items()}
    if not (moderate and result.fits_all(types, zero_fits=True)):
        return result
    return survey(_narrowed(result, types), source, with_means=with_means)


def _narrowed(result: Surveyed, types: Mapping[str, torch.dtype]) -> Values:
    """Return the tensors in other types."""
    return {name: dense(values).to(types[name]) for name, values in result.values.items()}


def _expect_finite(result: Surveyed) -> None:
    for name in result.values:
        if not math.isfinite(result.largest(name)):
            raise FloatingPointError(
                f"kappa of '{name}' is not finite even in float64: the weights are not finite, because training "
                "diverged (lower the learning rate or clip) or a batch held NaN, or a recurrent layer grows beyond "
                "1e308 over its time steps (use a smaller start for its recurrent weights)"
            )


def own_memory(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that may be written to: one gradient may belong to two summands, or be expanded for a sum."""
    seen: set[int] = set()
    result = {}
    for name, value in values.items():
        dense = value.contiguous()
        if dense.data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.data_ptr())
        result[name] = dense
    return result
