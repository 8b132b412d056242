"""Factors of a rescaling that the type of the weights can bear.

A weight is lost if it overflows, becomes zero, or shrinks to where its type has few digits. Training leaves weights at
the lower end of their type: dead units, and single weights of healthy ones, as the column of an input that is always
zero. A weight of the second kind takes the smallest number of its type instead of zero, with its sign: nobody sees the
difference, and all paths stay. Where that number could be seen, the factor of a unit class gives way.

Letters: e edge u -> v, w_e its weight, s_e its factor s_v / s_u, t the smallest positive number of a type,
kappa_e = dgamma^2 / dw_e^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.trace.scales import without_repeats
from pathspace.paths.kernel.kappa import kappa
from pathspace.paths.kernel.norm import squared_path_norm
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
        self._largest: tuple[Tensor, Tensor] | None = None
        self._paths: tuple[dict[str, Tensor], Tensor] | None = None

    def at(self, name: str, precision: float) -> Tensor:
        """Return the weights of a parameter at which it would, bool of its shape.

        It would not if it is below ``precision`` times the largest weight that enters the same units, and the largest
        that leaves the same units, and if the paths through it are below ``precision`` times all paths.
        """
        if self._largest is None or self._paths is None:
            self._largest = self._largest_weights()
            self._paths = kappa(self._network), squared_path_norm(self._network)
        parameter, labels = self._network.parameters[name], self._network.edges[name]
        least = _smallest(parameter.dtype)
        seen = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        for table, ends in zip(self._largest, (labels.target, labels.source), strict=True):
            # t > precision max |s_e w_e|
            limits = precision * table[ends.to(table.device).remainder(len(table))]
            seen |= (least > limits).to(parameter.device)
        scale = self._network.edge_factors(name, self._factors.to(parameter.device, torch.float64))
        values, total = self._paths
        # kappa_e (t / s_e)^2 > precision^2 gamma^2, as t behind the rescaling is t / s_e before it
        through = values[name].double() * (least / scale).square()
        return seen | ~(through <= precision**2 * total.to(parameter.device, torch.float64))

    def _largest_weights(self) -> tuple[Tensor, Tensor]:
        """Return the largest rescaled |w| that enters the units of each label, and that leaves them, as two tables."""
        network, factors = self._network, self._factors
        scales = Scales(network.num_classes, network.monomials.to(factors.device))
        entering, leaving = (scales.table(factors, 0.0) for _ in range(2))
        for name, parameter in network.parameters.items():
            size = parameter.detach().to(factors.device, torch.float64).abs()
            size = size * network.edge_factors(name, factors.double())
            labels = network.edges[name]
            for table, ends in ((entering, labels.target), (leaving, labels.source)):
                note_largest_(table, size, without_repeats(ends).to(factors.device))
        # inputs have no scale, so what leaves one may be as small as it likes
        leaving[0] = torch.inf
        return entering, leaving


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
