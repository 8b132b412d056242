"""Factors of a rescaling that the type of the weights can bear.

A weight is lost if it overflows, becomes zero, or shrinks to where its type has few digits.
Training leaves weights at the lower end of their type: dead units, and single weights of healthy
ones, as the column of an input that is always zero. A weight of the second kind takes the smallest
number of its type instead of zero, with its sign: nobody sees the difference, and all paths stay.
Where that number could be seen, the factor of a unit class gives way.

Letters: e edge u -> v, w_e its weight, s_e its factor s_v / s_u, t the smallest positive number of
a type, kappa_e = dgamma^2 / dw_e^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.trace.scales import without_repeats
from pathspace.network.units import EdgeLabels
from pathspace.paths.kernel.kappa import kappa_in_float64
from pathspace.rescaling.criteria import Scales, note_largest_
from pathspace.rescaling.rescale import rescaled


@tables_on_the_cpu()
@torch.no_grad()
def within_range(
    network: Network, factors: Tensor, *, powers_of_two: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return factors under which no weight is lost, nearer to 1 where one would be, and the weights that they make.

    Of the two classes of a weight that would be lost, the one with the larger factor gives way.

    Args:
        network: a traced network, which is not changed.
        factors: one per unit class.
        powers_of_two: whether factors are powers of two, and stay such.
    """
    network.check_current()
    changed, yielding = _changed(network, factors)
    while bool(yielding.any()):
        exponents = factors.log2() / 2
        if powers_of_two:
            exponents = exponents.trunc()
        exponents = torch.where(exponents.abs() < 1e-3, 0.0, exponents)
        factors = torch.where(yielding, exponents.exp2(), factors)
        changed, yielding = _changed(network, factors)
    return factors, changed


def _changed(network: Network, factors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the rescaled weights, and the classes at those that are lost, bool ``[num_classes]``."""
    size = torch.cat([factors.new_zeros(1), factors.log2().abs()])
    yielding = torch.zeros(1 + network.num_classes, dtype=torch.bool, device=factors.device)
    changed = {}
    visible = _Visible(network, factors)
    for name, parameter in network.parameters.items():
        new, lost = rescaled(network, name, factors)
        limits = torch.finfo(parameter.dtype)
        vanished = lost & (new == 0)
        blurred = (new != 0) & (new.abs() < limits.tiny) & (new.abs() < parameter.abs())
        if bool(vanished.any()):
            seen = visible.at(name, limits.eps**2)
            new = torch.where(vanished & ~seen, parameter.sign() * _smallest(parameter.dtype), new)
            lost &= ~vanished | seen
        if bool(blurred.any()):
            # a rounding of the largest weight is as large
            lost |= blurred & visible.at(name, limits.eps)
        changed[name] = new
        if not bool(lost.any()):
            continue
        labels = network.edges[name]
        places = [
            end.expand(parameter.shape).to(lost.device)[lost].cpu()
            for end in (labels.target, labels.source)
        ]
        members = [_members(network, end) for end in places]
        both = torch.cat(members, dim=1).to(size.device)
        largest = size[both].amax(1, keepdim=True)
        yielding[both[size[both] == largest]] = True
    yielding[0] = False
    return changed, yielding[1:] & (factors != 1)


class _Visible:
    """Tells at which weights the smallest number of a type would change what a rescaled network computes.

    Args:
        network: a traced network.
        factors: of the rescaling.
    """

    def __init__(self, network: Network, factors: Tensor) -> None:
        self._network = network
        self._factors = factors

    def at(self, name: str, precision: float) -> Tensor:
        """Return the weights of a parameter at which it would, bool of its shape.

        It would not if it is below ``precision`` times the largest weight that enters the same
        unit, and the largest that leaves the same unit, and if the paths through it are below
        ``precision`` times those through some weight that enters the same unit.
        """
        parameter = self._network.parameters[name]
        labels = self._network.edges[name]
        least = _smallest(parameter.dtype)
        # t > precision max |s_e w_e|
        seen = least > precision * self._leaving[_places(self._leaving, labels.source)]
        seen = seen | (least > precision * self._beside(name, self._sizes, self._entering))
        # kappa_e (t / s_e)^2 > precision^2 max kappa_e w_e^2, as t behind the rescaling is t / s_e
        # before it
        through = self._kappa[name] * (least / self._scale(name)).square()
        seen = seen | ~(through <= precision**2 * self._beside(name, self._paths, self._paths_into))
        return seen.expand(parameter.shape).to(parameter.device)

    def _scale(self, name: str) -> Tensor:
        """Return s_e of a parameter."""
        return self._network.edge_factors(name, self._factors.double())

    def _weights(self, name: str) -> Tensor:
        """Return the weights of a parameter where the factors are."""
        return self._network.parameters[name].detach().to(self._factors.device, torch.float64)

    @cached_property
    def _sizes(self) -> dict[str, Tensor]:
        """|s_e w_e| by parameter."""
        return {
            name: self._weights(name).abs() * self._scale(name) for name in self._network.parameters
        }

    @cached_property
    def _kappa(self) -> dict[str, Tensor]:
        """kappa_e by parameter, in float64: paths of small weights underflow in the type of the weights."""
        found = kappa_in_float64(self._network)
        return {
            name: value.to(self._factors.device, torch.float64) for name, value in found.items()
        }

    @cached_property
    def _paths(self) -> dict[str, Tensor]:
        """kappa_e w_e^2 by parameter: the paths through each weight, which no rescaling changes."""
        return {name: value * self._weights(name).square() for name, value in self._kappa.items()}

    @cached_property
    def _entering(self) -> Tensor:
        """|s_e w_e| that a weight into the units of each label is compared with, a table."""
        return self._of_units(self._sizes)

    @cached_property
    def _leaving(self) -> Tensor:
        """The largest |s_e w_e| that leaves the units of each label, a table."""
        table = self._largest(self._sizes, "source")
        # inputs have no scale, so what leaves one may be as small as it likes
        table[0] = torch.inf
        return table

    @cached_property
    def _paths_into(self) -> Tensor:
        """kappa_e w_e^2 that a weight into the units of each label is compared with, a table."""
        return self._of_units(self._paths)

    @cached_property
    def _shared(self) -> Tensor:
        """Return for each label whether several rows enter its units; a row of a table may be read by itself."""
        count = self._table(0.0)
        for places, rows in self._rows(self._sizes, count):
            count.scatter_add_(0, places, torch.ones_like(rows))
        return count > 1

    def _rows(self, values: Mapping[str, Tensor], table: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the largest values of the rows of each parameter, after the places of their units in a table."""
        for name, value in values.items():
            labels = self._network.edges[name]
            rows = _largest_of_rows(value, labels)
            if rows is not None:
                places = _places(table, labels.target).expand(rows.shape)
                yield places.reshape(-1), rows.reshape(-1)

    def _beside(self, name: str, values: Mapping[str, Tensor], of_units: Tensor) -> Tensor:
        """Return the largest value among the weights that enter the same unit as each weight of a parameter.

        At two places only the row of the weight itself counts: at label 0, which outputs and
        operations without a rule share though each has a size of its own, and where values are
        added, which may be read one by one. At label 0 it is 0 if rows are unknown, so that nothing
        is negligible.

        Args:
            name: of the parameter.
            values: one per weight, by parameter.
            of_units: a table, see :meth:`_of_units`.
        """
        labels = self._network.edges[name]
        target = labels.target.to(self._factors.device)
        result = of_units[_places(of_units, target)]
        rows = _largest_of_rows(values[name], labels)
        if rows is not None:
            result = torch.where(self._shared[_places(of_units, target)], rows, result)
        fixed = target == 0
        if not bool(fixed.any()):
            return result
        outputs = _largest_of_rows(values[name], labels, kernels=False)
        return torch.where(
            fixed, torch.zeros_like(values[name]) if outputs is None else outputs, result
        )

    def _of_units(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return what a weight that enters the units of each label is compared with, a table.

        It is the largest value there. Where several rows enter, each may be read by itself, and it
        is the largest value of the row that has the least of these.
        """
        least = self._table(torch.inf)
        for places, rows in self._rows(values, least):
            least.scatter_reduce_(0, places, rows, "amin")
        return torch.where(self._shared, least, self._largest(values, "target"))

    def _table(self, fill: float) -> Tensor:
        """Return a table by label (see ``criteria.Scales``)."""
        return Scales.of(self._network, self._factors.device).table(self._factors, fill)

    def _largest(self, values: Mapping[str, Tensor], end: Literal["target", "source"]) -> Tensor:
        """Return the largest value at each label of one end of the edges, a table."""
        table = self._table(0.0)
        for name, value in values.items():
            ends = getattr(self._network.edges[name], end)
            note_largest_(table, value, without_repeats(ends).to(table.device))
        return table


def _places(table: Tensor, labels: Tensor) -> Tensor:
    """Return where a table by label has each of the labels."""
    return labels.to(table.device).remainder(len(table))


def _largest_of_rows(values: Tensor, labels: EdgeLabels, *, kernels: bool = True) -> Tensor | None:
    """Return the largest value of each row of a parameter: of the weights that are added at one unit.

    Args:
        values: one per weight.
        labels: of the parameter.
        kernels: whether a row holds all positions of a kernel, or sources at one position alone.

    Returns:
        One per row, broadcastable to the parameter, or None if no dimension is one of sources
        alone.
    """
    target, source = (
        end[(None,) * (values.dim() - end.dim())] for end in (labels.target, labels.source)
    )
    alike = [d for d in range(values.dim()) if target.shape[d] == 1]
    sources = [d for d in alike if source.shape[d] > 1]
    if not sources:
        return None
    return values.amax(alike if kernels else sources, keepdim=True)


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a type."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps


def _members(network: Network, labels: Tensor) -> Tensor:
    """Return the classes that labels are products of, ``[len(labels), n]``, padded with 0."""
    products = network.monomials.abs().cpu()
    width = max(1, products.shape[1] if products.numel() else 1)
    table = torch.zeros(1 + network.num_classes + len(products), width, dtype=torch.long)
    table[: 1 + network.num_classes, 0] = torch.arange(1 + network.num_classes)
    if products.numel():
        table[1 + network.num_classes :] = products
    return table[labels.abs()]
