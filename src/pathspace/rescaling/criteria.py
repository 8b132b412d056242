"""Criteria of balancing before rounding: equal ranges at a unit class in the place of equal path mass.

    range         max |w| of what enters c = max |w| of what leaves c
    activations   (range of the values of c)^alpha = (max |w| of what leaves c)^(1 - alpha)

Multiplying what enters c by s_c > 0 and dividing what leaves it lets one side grow and the other
shrink, so every class has one scale at which they agree when those of its neighbours are held; all
of them together are found by going half of the way to it again and again. That map of log s moves
no two points further apart (in the largest coordinate: each of its coordinates is a mean of maxima
and minima of others plus constants), so half steps come to a point that it leaves alone, for n
layers after some n^2 of them. With Nesterov's momentum, begun anew where it would go back, some 10
n do. "activations" has one such point, since there distances shrink by 1 - alpha. So has "range" in
a feed-forward network: where two differ most, the heaviest edge leads to a class at which they
differ as much, and so on to an output, where they do not differ. Recurrences, and layers between
two gains, can have several.

A weight is *rounded* if it is a parameter of two dimensions or more; gains and biases are kept as
they are when a network is quantised, and do not count.

Letters: c unit class, C how many, s_c its factor, x_c = log s_c, w_e weight of an edge e = (u ->
v), alpha strength.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.trace.scales import without_repeats

Criterion = Literal[
    "path", "range", "activations", "rounding", "measure", "layers", "norm", "conditioning"
]
CRITERIA: tuple[str, ...] = get_args(Criterion)

TOLERANCE = 1e-9
"""How far from 1 a factor may be that a further step would multiply a scale by."""
SWEEPS = 3000
"""Steps after which the search ends; the latter half, which hardly any network needs, goes without momentum."""

Gap = Callable[[Tensor], Tensor]
"""From log s to how far each coordinate is from the one that makes the two sides of its class agree, ``[C]`` each."""


@dataclass(frozen=True)
class Scales:
    """The meaning of labels: scales of classes, their products, and inverses (see ``Network.scale_of``).

    A table by label has 2 L + 1 places, for the labels 0, 1, ..., L, -L, ..., -1.

    Attributes:
        classes: C.
        monomials: the factors of the products, labels ``[L - C, n]``.
    """

    classes: int
    monomials: Tensor

    @staticmethod
    def of(network: Network, device: torch.device) -> Scales:
        """Return the scales of a network, with their tables on a device."""
        return Scales(network.num_classes, network.monomials.to(device))

    @property
    def labels(self) -> Tensor:
        """All of them, in the order of a table."""
        largest = self.classes + len(self.monomials)
        order = torch.arange(2 * largest + 1, device=self.monomials.device)
        return torch.where(order > largest, order - len(order), order)

    def log(self, x: Tensor, labels: Tensor) -> Tensor:
        """log of the scale that each label stands for, from log s ``[C]``."""
        table = torch.cat([x.new_zeros(1), x])
        table = torch.cat([table, (self.monomials.sign() * table[self.monomials.abs()]).sum(-1)])
        return labels.sign() * table[labels.abs()]

    def table(self, like: Tensor, fill: float) -> Tensor:
        """Return a table of one number, float64."""
        return like.new_full(
            (2 * (self.classes + len(self.monomials)) + 1,), fill, dtype=torch.float64
        )

    def by_sign(
        self, table: Tensor, reduction: Literal["amax", "sum"] = "amax"
    ) -> tuple[Tensor, Tensor]:
        """Return what a table has for the classes: at their scales, and at the inverse ones.

        What it has for a product counts for each of its factors. The reduction joins it with what it
        has for the class.
        """
        largest = len(table) // 2
        C = self.classes
        values = torch.stack([table[1 : largest + 1], table[largest + 1 :].flip(0)])
        result = values[:, :C].clone()
        for factor in self.monomials.unbind(-1):
            used = factor != 0
            one = values[:, C:]
            one = torch.where(factor < 0, one.flip(0), one)[:, used]
            place = (factor[used].abs() - 1).expand(2, -1)
            result.scatter_reduce_(1, place, one, reduction)
        return result[0], result[1]


@dataclass(frozen=True)
class Edges:
    """The weights of one parameter.

    Attributes:
        log: log |w|, -inf for zeros; the largest along dimensions on which no label depends.
        target: labels (see ``network.units.EdgeLabels``), with as many dimensions.
        source: likewise.
    """

    log: Tensor
    target: Tensor
    source: Tensor

    def log_at(self, scales: Scales, x: Tensor) -> Tensor:
        """Return log |w| after a rescaling by log s = x."""
        return self.log + scales.log(x, self.target) - scales.log(x, self.source)


def rounded_edges(network: Network, factors: Tensor) -> list[Edges]:
    """Return the rounded weights as they are after a rescaling by ``factors`` (float64, ``[C]``), which is not done."""
    rounded = [name for name, parameter in network.parameters.items() if parameter.dim() >= 2]
    return [_edges(network, name, factors, largest=True) for name in rounded]


def all_edges(network: Network, factors: Tensor) -> list[Edges]:
    """Return all weights, biases too, as they are after a rescaling by ``factors``, one by one."""
    return [_edges(network, name, factors, largest=False) for name in network.parameters]


def _edges(network: Network, name: str, factors: Tensor, *, largest: bool) -> Edges:
    """Return the weights of a parameter after a rescaling.

    Args:
        network: a traced network.
        name: of the parameter.
        factors: of the rescaling.
        largest: whether to keep only the largest along dimensions on which no label depends.
    """
    device = factors.device
    weights = network.parameters[name].detach().to(device, torch.float64)
    size = (weights * network.edge_factors(name, factors)).abs()
    target, source = edge_labels(network, name, device)
    free = [d for d in range(size.dim()) if target.shape[d] == source.shape[d] == 1]
    if largest and free:
        size = size.amax(free, keepdim=True)
    # a weight between units of one class changes with no scale
    return Edges(size.masked_fill(target == source, 0.0).log(), target, source)


def edge_labels(network: Network, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the labels at the two ends of the edges of a parameter, target and source, with its dimensions."""
    labels = network.edges[name]
    dims = network.parameters[name].dim()
    return in_dims(labels.target, dims).to(device), in_dims(labels.source, dims).to(device)


def range_gap(edges: Sequence[Edges], scales: Scales) -> Gap:
    """Of the criterion "range". Where one side has no weight that is rounded, 1 stands for it."""

    def gap(x: Tensor) -> Tensor:
        entering, leaving = _largest(edges, scales, x)
        # of units that have the inverse scale, what leaves grows, and what enters shrinks
        grows = torch.maximum(entering[0], leaving[1])
        shrinks = torch.maximum(leaving[0], entering[1])
        enters = grows.isfinite()
        leaves = shrinks.isfinite()
        difference = torch.where(leaves, shrinks, 0.0) - torch.where(enters, grows, 0.0)
        return difference / (enters.double() + leaves.double()).clamp_min(1.0)

    return gap


def activation_gap(edges: Sequence[Edges], scales: Scales, ranges: Tensor, alpha: float) -> Gap:
    """Of the criterion "activations". A class that lacks one of the sides stays where it is.

    Args:
        edges: the rounded weights.
        scales: of the network.
        ranges: log of the ranges of the values at every label, a table; -inf where there are none.
        alpha: strength, in (0, 1].
    """

    def gap(x: Tensor) -> Tensor:
        _, leaving = _largest(edges, scales, x)
        values = scales.by_sign(ranges + scales.log(x, scales.labels))
        grows, slope = _larger(values[0], leaving[1], alpha)
        shrinks, other = _larger(values[1], leaving[0], alpha)
        both = grows.isfinite() & shrinks.isfinite()
        # 0 / 0: weights of power 1 - alpha = 0
        step = (shrinks - grows) / (slope + other).clamp_min(1e-300)
        return torch.where(both, step, 0.0)

    return gap


def _larger(values: Tensor, weights: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the larger one of alpha log(range of values) and (1 - alpha) log(range of weights), and its factor."""
    one = alpha * values
    other = torch.where(weights.isfinite(), (1 - alpha) * weights, weights)
    return torch.maximum(one, other), torch.where(one >= other, alpha, 1 - alpha).to(values.dtype)


def agreement(gap: Gap, start: Tensor) -> Tensor:
    """Return the factors at which the two sides of every class agree, float64 ``[C]``.

    Args:
        gap: of a criterion.
        start: where the search begins, log s.

    Warns:
        UserWarning: they do not after ``SWEEPS`` steps.
    """
    x = start
    before = start
    momentum = 1.0
    left = 0.0
    for sweep in range(SWEEPS):
        step = gap(x)
        left = float(step.abs().amax()) if len(step) else 0.0
        if not left > TOLERANCE:
            return x.exp()
        reached = x + step / 2
        last = 1.0 if step @ (reached - before) < 0 or sweep > SWEEPS / 2 else momentum
        momentum = (1 + math.sqrt(1 + 4 * last**2)) / 2
        x = reached + (last - 1) / momentum * (reached - before)
        before = reached
    warnings.warn(
        f"after {SWEEPS} steps the two sides of some unit class still differ by {2 * left:.2g} of their ranges; the "
        "function is kept all the same, and calling balance_ again does not help: use criterion='path'",
        stacklevel=5,
    )
    return x.exp()


def _largest(edges: Sequence[Edges], scales: Scales, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """log of the largest |w| that enters every class, and that leaves it; -inf where there is none.

    Each of them at units that have the scale of the class, and at those that have the inverse one.
    """
    at = [scales.table(x, -torch.inf) for _ in range(2)]
    for edge in edges:
        values = edge.log_at(scales, x)
        for table, labels in zip(at, (edge.target, edge.source), strict=True):
            note_largest_(table, values, labels)
    return [scales.by_sign(table) for table in at]


def note_largest_(table: Tensor, values: Tensor, labels: Tensor) -> None:
    """Put the largest value of every label into a table by label (see :class:`Scales`)."""
    labels = in_dims(labels, values.dim())
    alone = [d for d in range(values.dim()) if labels.shape[d] == 1 < values.shape[d]]
    values = values.amax(alone, keepdim=True) if alone else values
    places = labels.expand(torch.broadcast_shapes(labels.shape, values.shape)).remainder(len(table))
    table.scatter_reduce_(0, places.reshape(-1), values.expand(places.shape).reshape(-1), "amax")


def in_dims(labels: Tensor, dims: int) -> Tensor:
    """Return labels with so many dimensions, of size 1 where the labels do not change."""
    return without_repeats(labels)[(None,) * (dims - labels.dim())]
