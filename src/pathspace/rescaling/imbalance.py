"""Distances of the unit classes of a network from balance, layer by layer.

Letters: c unit class, b_c its scale beside that in the balanced member: balancing multiplies what
enters c by 1 / b_c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_weights
from pathspace.network.network import current_values
from pathspace.paths.kernel.node_mass import node_mass

_NEAR = 4.0
_FAR = 16.0
"""Spreads up to which a network is called near balance, and from which it is called far from it."""
_WORST = 5


@dataclass(frozen=True)
class LayerScales:
    """The scales of the unit classes that one operation makes.

    Attributes:
        name: of the operation and its module.
        classes: how many there are, dead ones included.
        low: b_c that 5 % of the others are below.
        median: b_c in the middle.
        high: b_c that 5 % are above.
        dead: how many classes no path enters, or none leaves.
    """

    name: str
    classes: int
    low: float
    median: float
    high: float
    dead: int


@dataclass(frozen=True)
class Imbalance:
    """The result of :func:`imbalance`; ``print`` shows it as a table.

    Attributes:
        spread: the one number: 5 to 95 % of all b_c span this factor; 1 in the balanced member.
        scales: b_c, float64 ``[num_classes]``.
        layers: by operation, in the order of the network.
        worst: names and b_c of the classes furthest from the median, most of all first.
        dead: names of classes that no path enters, or none leaves.
    """

    spread: float
    scales: Tensor
    layers: tuple[LayerScales, ...]
    worst: tuple[tuple[str, float], ...]
    dead: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The spread in a sentence."""
        if self.spread <= _NEAR:
            how = "near balance"
        elif self.spread < _FAR:
            how = "somewhat unbalanced"
        else:
            how = "far from balance: what rounding and plain optimizers do depends on scales that the function ignores"
        return f"5 to 95 % of the unit classes span a factor of {self.spread:.3g}: the network is {how}."

    def __str__(self) -> str:
        """Return the table, the worst classes and the verdict."""
        width = max([len("layer"), *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer':{width}s}  classes       5 %    median      95 %  dead"]
        for x in self.layers:
            numbers = "  ".join(f"{value:8.3g}" for value in (x.low, x.median, x.high))
            lines.append(f"{x.name:{width}s}  {x.classes:7d}  {numbers}  {x.dead:4d}")
        if self.worst:
            lines.append(
                "furthest: " + ", ".join(f"{name} {value:.3g}" for name, value in self.worst)
            )
        return "\n".join([*lines, self.verdict])

    def figure(self) -> Any:
        """Draw the scales of all classes, layer by layer, as a matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed (it is in the extra ``experiments``).
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot()
        start = 0
        for layer in self.layers:
            values = self.scales[start : start + layer.classes]
            axes.plot(range(start, start + layer.classes), values.tolist(), ".", label=layer.name)
            start += layer.classes
        axes.set_yscale("log")
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_xlabel("unit class")
        axes.set_ylabel("scale beside the balanced network")
        if len(self.layers) <= 12:
            axes.legend(fontsize="small")
        return figure


@tables_on_the_cpu()
@torch.no_grad()
def imbalance(network: Network) -> Imbalance:
    """Tell how far a network is from the balanced member of its rescaling class.

    b_c is the scale of a unit class beside the one that it has there: :func:`balance_` multiplies
    what enters it by 1 / b_c. All members compute the same function. Where b_c spreads widely, what
    depends on scales (steps of plain optimizers, rounding, magnitudes of weights) treats units
    unevenly for no reason in the function.

    Args:
        network: a traced network, which is not changed.

    Returns:
        The spread over all classes, by layer, the worst classes, and dead ones.

    Raises:
        FloatingPointError: the path mass of a class is not finite.
        ValueError: the network has no unit class, so no scale is free.
        RuntimeError: a parameter of the model was replaced after tracing.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> _ = ps.rescaling.balance_(network)
        >>> print(ps.rescaling.imbalance(network).verdict)
        5 to 95 % of the unit classes span a factor of 1: the network is near balance.
    """
    expect_weights(network)
    current_values(network)
    if not network.num_classes:
        raise ValueError(
            f"expected a network with unit classes, but nothing in it can be rescaled: {network}"
        )
    mass = node_mass(network)
    scales = mass.gauge().cpu()
    dead = ((mass.into == 0) | (mass.out_of == 0)).cpu()
    names = network.class_names
    layers = tuple(_layer(name, scales[at], dead[at]) for name, at in _places(names))
    alive = scales[~dead] if bool((~dead).any()) else scales
    low, median, high = _quantiles(alive)
    away = (scales / median).log().abs().masked_fill(dead, 0.0)
    furthest = away.argsort(descending=True, stable=True)[:_WORST].tolist()
    worst = tuple((names[c], float(scales[c])) for c in furthest if float(away[c]) > 1e-9)
    return Imbalance(
        high / low, scales, layers, worst, tuple(names[c] for c in dead.nonzero()[:, 0].tolist())
    )


def _places(names: tuple[str, ...]) -> list[tuple[str, slice]]:
    """Return each run of classes that one operation makes, with its name."""
    found = []
    start = 0
    for layer, run in groupby(re.sub(r"\[\d+\]$", "", name) for name in names):
        end = start + len(list(run))
        found.append((layer, slice(start, end)))
        start = end
    return found


def _layer(name: str, scales: Tensor, dead: Tensor) -> LayerScales:
    alive = scales[~dead] if bool((~dead).any()) else scales
    return LayerScales(name, len(scales), *_quantiles(alive), int(dead.sum()))


def _quantiles(scales: Tensor) -> tuple[float, float, float]:
    """Return the scales at 5, 50 and 95 %."""
    at = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = scales.log().quantile(at).exp().tolist()
    return low, median, high
