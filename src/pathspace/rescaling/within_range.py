"""Factors of a rescaling that the type of the weights can bear.

A weight is lost if it overflows, becomes zero, or shrinks to where its type has few digits. Training leaves weights at
the lower end of their type: dead units, and single weights of healthy ones, as the column of an input that is always
zero. A weight of the second kind takes the smallest number of its type instead of zero, with its sign: nobody sees the
difference, and all paths stay. Where that number could be seen, the factor of a unit class gives way.

Letters: e edge u -> v, w_e its weight, s_e its factor s_v / s_u, t the smallest positive number of a type,
kappa_e = dgamma^2 / dw_e^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.trace.scales import without_repeats
from pathspace.network.units import EdgeLabels
from pathspace.paths.kernel.kappa import kappa
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
            end.expand(parameter.shape).to(lost.device)[lost].cpu() for end in (labels.target, labels.source)
        ]
        members = [_members(network, end) for end in places]
        both = torch.cat(members, dim=1).to(size.device)
        largest = size[both].amax(1, keepdim=True)
        yielding[both[size[both] == largest]] = True
    yielding[0] = False
    return changed, yielding[1:] & (factors != 1)


class _Visible:
    """Where the smallest number of a type would change what a rescaled network computes.

    Args:
        network: a traced network.
        factors: of the rescaling.
    """

    def __init__(self, network: Network, factors: Tensor) -> None:
        self._network = network
        self._factors = factors

    def at(self, name: str, precision: float) -> Tensor:
        """Return the weights of a parameter at which it would, bool of its shape.

        It would not if it is below ``precision`` times the largest weight that enters the same unit, and the largest
        that leaves the same unit, and if the paths through it are below ``precision`` times those through some weight
        that enters the same unit.
        """
        parameter, labels = self._network.parameters[name], self._network.edges[name]
        least = _smallest(parameter.dtype)
        # t > precision max |s_e w_e|
        seen = least > precision * _at_labels(self._leaving, labels.source)
        seen = seen | (least > precision * _beside(self._sizes[name], self._entering, labels))
        # kappa_e (t / s_e)^2 > precision^2 max kappa_e w_e^2, as t behind the rescaling is t / s_e before it
        through = self._kappa[name] * (least / self._scale(name)).square()
        seen = seen | ~(through <= precision**2 * _beside(self._paths[name], self._paths_into, labels))
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
        return {name: self._weights(name).abs() * self._scale(name) for name in self._network.parameters}

    @cached_property
    def _kappa(self) -> dict[str, Tensor]:
        """kappa_e by parameter, in float64: paths of small weights underflow in the type of the weights."""
        parameters = self._network.parameters
        wide = {name: parameter.detach().double() for name, parameter in parameters.items()}
        found = kappa(self._network, parameters=wide)
        return {name: value.to(self._factors.device, torch.float64) for name, value in found.items()}

    @cached_property
    def _paths(self) -> dict[str, Tensor]:
        """kappa_e w_e^2 by parameter: the paths through each weight, which no rescaling changes."""
        return {name: value * self._weights(name).square() for name, value in self._kappa.items()}

    @cached_property
    def _entering(self) -> Tensor:
        """The largest |s_e w_e| that enters the units of each label, a table."""
        return self._largest(self._sizes, "target")

    @cached_property
    def _leaving(self) -> Tensor:
        """The largest |s_e w_e| that leaves the units of each label, a table."""
        table = self._largest(self._sizes, "source")
        # inputs have no scale, so what leaves one may be as small as it likes
        table[0] = torch.inf
        return table

    @cached_property
    def _paths_into(self) -> Tensor:
        """The largest kappa_e w_e^2 that enters the units of each label, a table."""
        return self._largest(self._paths, "target")

    def _largest(self, values: Mapping[str, Tensor], end: Literal["target", "source"]) -> Tensor:
        """Return the largest value at each label of one end of the edges, a table (see ``criteria.Scales``)."""
        network, factors = self._network, self._factors
        table = Scales(network.num_classes, network.monomials.to(factors.device)).table(factors, 0.0)
        for name, value in values.items():
            ends = getattr(network.edges[name], end)
            note_largest_(table, value, without_repeats(ends).to(factors.device))
        return table


def _at_labels(table: Tensor, labels: Tensor) -> Tensor:
    """Return what a table has for each label."""
    return table[labels.to(table.device).remainder(len(table))]


def _beside(values: Tensor, entering: Tensor, labels: EdgeLabels) -> Tensor:
    """Return the largest value among the weights that enter the same unit as each weight of a parameter.

    Outputs and operations without a rule share the label 0, but each has a size of its own. There only the row of a
    weight counts. Where no dimension is one of sources alone, rows are unknown, and 0 is returned.

    Args:
        values: one per weight.
        entering: the largest at each label of targets, a table.
        labels: of the parameter.
    """
    of_unit = _at_labels(entering, labels.target)
    fixed = (labels.target == 0).to(values.device)
    if not bool(fixed.any()):
        return of_unit
    along = _source_dimensions(labels, values.dim())
    of_row = values.amax(along, keepdim=True) if along else torch.zeros_like(values)
    return torch.where(fixed, of_row, of_unit)


def _source_dimensions(labels: EdgeLabels, dims: int) -> list[int]:
    """Return the dimensions of a parameter along which its sources change and its targets do not."""
    target, source = (end[(None,) * (dims - end.dim())] for end in (labels.target, labels.source))
    return [d for d in range(dims) if target.shape[d] == 1 < source.shape[d]]


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
