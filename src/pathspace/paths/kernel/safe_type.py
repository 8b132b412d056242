"""Sums over paths in the parameters' own type, or in float64 where that overflows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.norm import all_widened
from pathspace.squared.parts import extremes, first_split
from pathspace.squared.squares import Outer, dense

Values = dict[str, Tensor | Outer]
Measure = Callable[[Mapping[str, Tensor | Outer]], list[Tensor]]
"""From values to more numbers that are wanted of them, as 0-dim tensors; rescaling must not change these."""

MODERATE = 1e15
"""Means beyond this or below its inverse ask for float64, so that no rescaling by thousands can make the difference."""


@dataclass
class Surveyed:
    """Values of parameters, and what a look at them told.

    Attributes:
        values: the values.
        bounds: by name, the smallest and largest element of each factor: of the tensor, or of rows and columns.
        measured: what the caller measured, as numbers.
    """

    values: Values
    bounds: dict[str, tuple[tuple[float, float], ...]]
    measured: list[float]

    def largest(self, name: str) -> float:
        """The largest element of a parameter's value; NaN if any is."""
        return math.prod(high for _, high in self.bounds[name])

    def fits(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a type holds the largest value, and not only digits lost near zero."""
        limits, largest = torch.finfo(dtype), self.largest(name)
        if dtype == torch.float64:
            return math.isfinite(largest)
        return limits.tiny / limits.eps <= largest <= limits.max

    @property
    def moderate(self) -> bool:
        """Whether what was measured is far from the ends of float32, in every member of the rescaling class alike."""
        return all(number == 0 or 1 / MODERATE <= number <= MODERATE for number in self.measured)


def survey(
    values: Values, measure: Measure | None = None, parameters: Mapping[str, Tensor] | None = None
) -> Surveyed:
    """Look at all values in one synchronisation.

    Args:
        values: tensors or outer products by name; none negative.
        measure: gives more numbers to read.
        parameters: whose values they are; where these are split over processes, bounds are those of all parts.
    """
    split = None if parameters is None else first_split(parameters.values())
    least, most = (1.0, 1.0) if split is None else (math.inf, -math.inf)
    places: dict[int, int] = {}
    result: list[Tensor] = []
    at: dict[str, list[int]] = {}
    for name, value in values.items():
        spans = at[name] = []
        for t in (value.rows, value.columns) if isinstance(value, Outer) else (value,):
            if id(t) not in places:  # biases share their kappa
                places[id(t)] = len(result)
                result += t.aminmax() if t.numel() else (t.new_tensor(least), t.new_tensor(most))
            spans.append(places[id(t)])
    measured = [] if measure is None else measure(values)
    if split is not None:
        result = [*extremes(torch.stack(result).view(-1, 2), split).view(-1)]
    numbers = torch.stack(result + measured).tolist() if result else []
    bounds = {name: tuple((numbers[i], numbers[i + 1]) for i in spans) for name, spans in at.items()}
    return Surveyed(values, bounds, numbers[len(result) :])


def in_safe_type(
    network: Network,
    parameters: Mapping[str, Tensor] | None,
    compute: Callable[[Mapping[str, Tensor]], Values],
    measure: Measure | None = None,
    seen: Callable[[Values], Values] | None = None,
) -> Surveyed:
    """Compute non-negative quantities of parameters, again in float64 if they overflow or vanish.

    Elements grow and shrink with the scales of the weights, so that of two members of a rescaling class one may fit a
    type and the other not, and rounding would tell them apart. What ``measure`` finds does not: where it is extreme,
    both are computed and kept in float64.

    Args:
        network: a traced network.
        parameters: values by name; the network's own if None.
        compute: from parameters to a tensor for each of some of them.
        measure: see :func:`survey`.
        seen: what is looked at and returned in the place of the quantities, as in the gauge of the network.

    Returns:
        The tensors, in the parameters' types (float32 for half precision), or all in float64 if one of
        them has a largest value that those cannot hold, or what was measured is extreme.

    Raises:
        FloatingPointError: a value is not finite even in float64.
    """
    source = network.parameters if parameters is None else parameters
    source = all_widened(source, network.parameters)
    shown = (lambda values: values) if seen is None else seen
    result = survey(shown(compute(source)), measure, source)
    moderate = result.moderate or all(value.dtype == torch.float64 for value in result.values.values())
    if moderate and all(result.fits(name, value.dtype) for name, value in result.values.items()):
        return result
    # factors of a product that fits need not fit themselves
    wide = compute({name: p.double() for name, p in source.items()})
    result = survey(shown({name: dense(value) for name, value in wide.items()}), measure, source)
    worst = next((name for name in result.values if not math.isfinite(result.largest(name))), None)
    if worst is not None:
        raise FloatingPointError(
            f"kappa of '{worst}' is not finite even in float64: the weights are not finite, because training diverged "
            "(lower the learning rate or clip) or a batch held NaN, or a recurrent layer grows beyond 1e308 over its "
            "time steps (use a smaller start for its recurrent weights)"
        )
    if moderate and all(
        result.largest(name) == 0.0 or result.fits(name, source[name].dtype) for name in result.values
    ):
        return survey({name: k.to(source[name].dtype) for name, k in result.values.items()}, measure, source)
    return result
