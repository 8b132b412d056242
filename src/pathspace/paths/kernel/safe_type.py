"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.norm import all_widened
from pathspace.squared.parts import extremes, first_split, is_split, local, totals
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

    def fits(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a type holds the largest value, and not only digits lost near zero."""
        limits, largest = torch.finfo(dtype), self.largest(name)
        if dtype == torch.float64:
            return math.isfinite(largest)
        return limits.tiny / limits.eps <= largest <= limits.max

    @property
    def moderate(self) -> bool:
        """Whether means are far from the ends of float32, in every member of the rescaling class alike."""
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
        means = numbers[2 * self.count :]
        spans = self.spans.items()
        return Surveyed(
            self.values,
            {
                name: tuple((numbers[2 * i], numbers[2 * i + 1]) for i in span)
                for name, span in spans
            },
            {name: tuple(means[i] for i in span) for name, span in spans} if self.has_means else {},
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
    split = first_split(owners.values())
    least, most = (1.0, 1.0) if split is None else (math.inf, -math.inf)
    places: dict[int, int] = {}
    ends: list[Tensor] = []
    means: list[Tensor] = []
    at: dict[str, list[int]] = {name: [] for name in values}
    of: list[Tensor] = []  # what has rows in this process: what columns have is alike everywhere
    for name, value in values.items():
        for t in (value.rows, value.columns) if isinstance(value, Outer) else (value,):
            if id(t) not in places:  # biases share their kappa
                places[id(t)] = len(of)
                of.append(t if at[name] else owners.get(name, t))
                ends += t.aminmax() if t.numel() else (t.new_full((), least), t.new_full((), most))
                if with_means:
                    means.append(t.mean() if t.numel() else t.new_zeros(()))
            at[name].append(places[id(t)])
    if split is not None:
        ends = [*extremes(torch.stack(ends).view(-1, 2), split).view(-1)]
        shares = [local(p).shape[0] / p.shape[0] if is_split(p) else 1.0 for p in of]
        shared = [mean * share for mean, share in zip(means, shares, strict=False)]
        means = [*totals(torch.stack(shared), of)] if shared else []
    numbers = torch.stack(ends + means) if ends else None
    return Measured(values, numbers, at, len(of), with_means)


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

    def look(values: Values) -> Measured:
        return measured(
            values if seen is None else seen(values), source, with_means=seen is not None
        )

    def evaluate() -> Measured:
        return look(compute(all_widened(source, network.parameters)))

    result = (evaluate() if repeat is None else repeat(evaluate)).read()
    moderate = result.moderate or all(
        value.dtype == torch.float64 for value in result.values.values()
    )
    if moderate and all(result.fits(name, value.dtype) for name, value in result.values.items()):
        return result
    # factors of a product that fits need not fit themselves
    wide = compute({name: source[name].double() for name in network.parameters})
    result = look({name: dense(value) for name, value in wide.items()}).read()
    worst = next((name for name in result.values if not math.isfinite(result.largest(name))), None)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, because training diverged "
            "(lower the learning rate or clip) or a batch held NaN, or a recurrent layer grows beyond 1e308 over its "
            "time steps (use a smaller start for its recurrent weights)"
        )
    types = {name: p.dtype for name, p in all_widened(source, network.parameters).items()}
    if moderate and all(
        result.largest(name) == 0.0 or result.fits(name, types[name]) for name in result.values
    ):
        narrow: Values = {name: dense(k).to(types[name]) for name, k in result.values.items()}
        return survey(narrow, source, with_means=seen is not None)
    return result


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
