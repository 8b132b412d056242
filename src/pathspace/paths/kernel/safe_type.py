"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.squared.precision import all_widened
from pathspace.squared.sharding import extremes, first_sharded, is_sharded, to_local, totals
from pathspace.squared.squares import Outer, dense

Values = dict[str, Tensor | Outer]
WELL_SCALED = 1e15
"""Values with a mean above this, or below its inverse, are computed in float64.

The margin to the range of float32 is large enough that no rescaling by thousands decides the type.
"""


@dataclass
class RangeReport:
    """Values of parameters, with their bounds and means.

    A value is a tensor, which is one factor, or an outer product of two factors, rows and columns.

    Attributes:
        values: tensors or outer products, by name.
        bounds: by name, the smallest and the largest element of each factor.
        means: by name, the mean of each factor; empty if no means were asked for.
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
        """Return whether a type holds the largest value with all of its digits."""
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
    def well_scaled(self) -> bool:
        """True if all means are well within the range of float32; rescaling does not change the answer."""
        numbers = (number for numbers in self.means.values() for number in numbers)
        return all(number == 0 or 1 / WELL_SCALED <= number <= WELL_SCALED for number in numbers)


@dataclass
class PendingReport:
    """Values of parameters, and the numbers of their report while these are on the device.

    Attributes:
        values: tensors or outer products, by name.
        numbers: the smallest and the largest element of each of the n distinct factors, then their
            means if ``has_means``: ``[2 n]`` or ``[3 n]``; None without factors.
        factors_of: by name, the numbers of the factors of a value.
        count: n.
        has_means: whether means are among the numbers.
    """

    values: Values
    numbers: Tensor | None
    factors_of: dict[str, list[int]]
    count: int
    has_means: bool

    def read(self) -> RangeReport:
        """Wait for the device, and return the report."""
        numbers = [] if self.numbers is None else self.numbers.tolist()
        smallest = numbers[: 2 * self.count : 2]
        largest = numbers[1 : 2 * self.count : 2]
        ends = list(zip(smallest, largest, strict=True))
        means = numbers[2 * self.count :]
        bounds = {name: tuple(ends[i] for i in own) for name, own in self.factors_of.items()}
        means_of: dict[str, tuple[float, ...]] = {}
        if self.has_means:
            means_of = {name: tuple(means[i] for i in own) for name, own in self.factors_of.items()}
        return RangeReport(self.values, bounds, means_of)


def range_report(
    values: Values, parameters: Mapping[str, Tensor] | None = None, *, with_means: bool = False
) -> RangeReport:
    """Report bounds and means of all values in one synchronisation; see :func:`pending_report`."""
    return pending_report(values, parameters, with_means=with_means).read()


def pending_report(
    values: Values, parameters: Mapping[str, Tensor] | None = None, *, with_means: bool = False
) -> PendingReport:
    """Compute the numbers of a report; a single process does not wait for its device.

    Args:
        values: tensors or outer products by name; none negative.
        parameters: the parameters with these values, by name. If some are sharded, the report is
            about the shards of all processes.
        with_means: whether to compute means, too.
    """
    owners = {} if parameters is None else {name: parameters[name] for name in values}
    sharded = first_sharded(owners.values())
    factors, holders, factors_of = _distinct_factors(values, owners)
    # the bounds of an empty shard must not change those of the others
    empty = (1.0, 1.0) if sharded is None else (math.inf, -math.inf)
    ends: list[Tensor] = []
    for t in factors:
        if t.numel():
            ends.extend(t.aminmax())
        else:
            ends.extend(t.new_full((), end) for end in empty)
    means: list[Tensor] = []
    if with_means:
        means = [t.mean() if t.numel() else t.new_zeros(()) for t in factors]
    if sharded is not None:
        ends = [*extremes(torch.stack(ends).view(-1, 2), sharded).view(-1)]
        means = _means_over_shards(means, holders)
    numbers = torch.stack(ends + means) if ends else None
    return PendingReport(values, numbers, factors_of, len(factors), with_means)


def _distinct_factors(
    values: Values, owners: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, list[int]]]:
    """Collect the factors of all values; one that several values share, as biases do, is there once.

    Returns:
        The factors; for each factor the tensor that is sharded like it, itself for columns, which
        are the same in every process; and by name, the numbers of the factors of a value.
    """
    factors: list[Tensor] = []
    holders: list[Tensor] = []
    number_of: dict[int, int] = {}
    factors_of: dict[str, list[int]] = {}
    for name, value in values.items():
        own = (value.rows, value.columns) if isinstance(value, Outer) else (value,)
        for i, t in enumerate(own):
            if id(t) not in number_of:
                number_of[id(t)] = len(factors)
                factors.append(t)
                holders.append(t if i else owners.get(name, t))
        factors_of[name] = [number_of[id(t)] for t in own]
    return factors, holders, factors_of


def _means_over_shards(means: Sequence[Tensor], holders: Sequence[Tensor]) -> list[Tensor]:
    """Return the means over all processes from those of the local shards."""
    if not means:
        return []
    shares = [to_local(p).shape[0] / p.shape[0] if is_sharded(p) else 1.0 for p in holders]
    summands = [mean * share for mean, share in zip(means, shares, strict=True)]
    return [*totals(torch.stack(summands), holders)]


def in_safe_type(
    network: Network,
    parameters: Mapping[str, Tensor] | None,
    compute: Callable[[Mapping[str, Tensor]], Values],
    to_frame: Callable[[Values], Values] | None = None,
    recorded: Callable[[Callable[[], PendingReport]], PendingReport] | None = None,
) -> RangeReport:
    """Compute non-negative quantities of parameters, again in float64 if they overflow or vanish.

    Elements grow and shrink with the scales of the weights. So of two members of a rescaling class
    one may fit a type and the other not, and they would be rounded differently. Means in the frame
    are the same for both members: if a mean is extreme, both are computed and kept in float64.

    Args:
        network: a traced network.
        parameters: values by name; the network's own if None.
        compute: from parameters to a value for each of some of them.
        to_frame: moves the values into the frame. The result is then in the frame, with means;
            without ``to_frame`` it has no means.
        recorded: runs the evaluation in the parameters' types, from a recording if there is one.

    Returns:
        The tensors, in the parameters' types (float32 for half precision), or all in float64 if one
        of them has a largest value that those cannot hold, or a mean is extreme.

    Raises:
        FloatingPointError: a value is not finite even in float64.
    """
    source = network.parameters if parameters is None else parameters
    with_means = to_frame is not None

    def report_of(values: Values) -> PendingReport:
        framed = values if to_frame is None else to_frame(values)
        return pending_report(framed, source, with_means=with_means)

    def evaluate() -> PendingReport:
        return report_of(compute(all_widened(source, network.parameters)))

    pending = evaluate() if recorded is None else recorded(evaluate)
    result = pending.read()
    own_types = result.types()
    well_scaled = result.well_scaled or set(own_types.values()) <= {torch.float64}
    if well_scaled and result.fits_all(own_types):
        return result
    # factors of a product that fits need not fit themselves
    wide = compute({name: source[name].double() for name in network.parameters})
    result = report_of({name: dense(value) for name, value in wide.items()}).read()
    _expect_finite(result)
    types = {name: p.dtype for name, p in all_widened(source, network.parameters).items()}
    if not (well_scaled and result.fits_all(types, zero_fits=True)):
        return result
    return narrowed(result, types, source, with_means=with_means)


def narrowed(
    report: RangeReport,
    types: Mapping[str, torch.dtype],
    parameters: Mapping[str, Tensor] | None = None,
    *,
    with_means: bool = False,
) -> RangeReport:
    """Return a report of the same values in other types; see :func:`pending_report`."""
    values: Values = {name: dense(value).to(types[name]) for name, value in report.values.items()}
    return range_report(values, parameters, with_means=with_means)


def _expect_finite(result: RangeReport) -> None:
    for name in result.values:
        if not math.isfinite(result.largest(name)):
            raise FloatingPointError(
                f"kappa of '{name}' is not finite even in float64: the weights are not finite, because training "
                "diverged (lower the learning rate or clip) or a batch held NaN, or a recurrent layer grows beyond "
                "1e308 over its time steps (use a smaller start for its recurrent weights)"
            )


def own_memory(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors with memory of their own, which may be written to.

    Autograd may return one gradient for two summands, or one that is expanded over a sum.
    """
    seen: set[int] = set()
    result = {}
    for name, value in values.items():
        dense = value.contiguous()
        if dense.data_ptr() in seen:
            dense = dense.clone()
        seen.add(dense.data_ptr())
        result[name] = dense
    return result
