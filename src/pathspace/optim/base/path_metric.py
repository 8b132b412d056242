"""kappa as the metric of an optimizer: normalized, damped and safe to divide by.

Raw kappa has no natural unit: its mean for a recurrent matrix runs from 4e-8 to 1e2 over common starts (see
docs/optim.md), so a learning rate for g / kappa means something else for every network. Each parameter's kappa is
therefore divided by one number c that node-wise rescaling does not change: the mean of kappa over the parameter's
elements, seen in the balanced member of the rescaling class. With it a learning rate has about the size it has for SGD
on the balanced network.

Letters: e an element of a parameter, an edge u -> v; b_c the gauge of unit class c (see ``paths.node_mass``), taken
once, when an optimizer starts; w_e = (b_v / b_u)^2, which makes kappa_e w_e invariant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import scale_of
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.paths.kernel.norm import widened
from pathspace.squared.squares import Outer, dense


class Gauge:
    """The weights w_e of one parameter of shape ``[n, ...]``, in its type (float32 for half precision).

    Attributes:
        rows: ``[n, 1]``, or ``[1, 1]`` where all rows are alike.
        columns: ``[1, m]`` with m elements a row, or ``[n, m]`` where w is no product (grouped convolutions).
    """

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.rows, self.columns = rows, columns
        self._is_product = columns.shape[0] == 1
        self._ends: dict[torch.dtype, tuple[_Weights, _Weights]] = {}

    def mean(self, kappa: Tensor | Outer) -> tuple[list[Tensor], float]:
        """The mean of kappa_e w_e, a number that rescaling does not change. One pass over kappa.

        Returns:
            0-dim tensors and a number, whose product it is: so many means can be read in one go.
        """
        count = 1.0 / max(1, kappa.shape.numel())
        rows, columns = self._weights(kappa.dtype)
        if isinstance(kappa, Outer) and self._is_product:
            (left, a), (right, b) = rows.sum(kappa.rows), columns.sum(kappa.columns)
            return [left, right], a * b * count
        kappa = dense(kappa)
        if self._is_product and (kappa.dim() == 1 or kappa.numel() == kappa.shape[:1].numel()):
            total, a = rows.sum(kappa.reshape(-1))
            return [total], a * columns.total * count
        flat = kappa if kappa.dim() == 2 else kappa.reshape(kappa.shape[0] if kappa.dim() else 1, -1)
        if self._is_product:
            full = columns.values if columns.values is not None else flat.new_ones(())
            by_row, b = torch.mv(flat, full.expand(flat.shape[1])), columns.scale
        else:
            by_row, b = torch.linalg.vecdot(flat, self.columns.to(flat.dtype)), 1.0
        total, a = rows.sum(by_row)
        return [total], a * b * count

    def _weights(self, dtype: torch.dtype) -> tuple[_Weights, _Weights]:
        if dtype not in self._ends:
            self._ends[dtype] = _Weights.of(self.rows[:, 0].to(dtype)), _Weights.of(self.columns[0].to(dtype))
        return self._ends[dtype]

    def damping(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """1 / w_e, which transforms like kappa, in the gauge's or another type; broadcastable to ``shape``."""
        # a kappa that asks for float64 has factors whose product float32 does not hold
        inverse = self.rows.to(dtype).reciprocal() * self.columns.to(dtype).reciprocal()
        full = inverse.expand(shape[0] if shape else 1, inverse.shape[1])
        size = torch.Size(shape).numel() // max(1, full.shape[0])
        return full.expand(full.shape[0], size).reshape(shape)


@dataclass(frozen=True)
class _Weights:
    """A vector of weights, or one number for all."""

    values: Tensor | None
    scale: float  # 1 where there are values
    total: float  # their sum, or the number

    @staticmethod
    def of(weights: Tensor) -> _Weights:
        total = float(weights.sum())
        return _Weights(None, total, total) if weights.shape[0] == 1 else _Weights(weights, 1.0, total)

    def sum(self, t: Tensor) -> tuple[Tensor, float]:
        """The weighted sum of a vector, as a tensor times a number; one value may be repeated."""
        if self.values is None:
            return t.sum(), self.scale
        return (t[0], self.total) if t.stride(0) == 0 else (torch.dot(t, self.values), 1.0)


def gauges(network: Network, names: Iterable[str], scales: Tensor | None = None) -> dict[str, Gauge]:
    """Gauges of parameters.

    Args:
        network: a traced network.
        names: parameters of it.
        scales: b_c of every unit class; those of the present weights if None.

    Returns:
        Parameter name -> gauge.

    Raises:
        FloatingPointError: the path mass of a unit class is not finite.
    """
    scales = node_mass(network).gauge() if scales is None else scales
    result = {}
    for name in names:
        parameter, labels = network.parameters[name], network.edges[name]
        rows, columns = scales.new_ones(1, 1), scales.new_ones(1, 1)
        for end, power in ((labels.target, 2), (labels.source, -2)):
            weight = scale_of(scales, end).pow(power)
            shape = (1,) * (parameter.dim() - weight.dim()) + tuple(weight.shape)
            if all(n == 1 for n in shape[1:]):  # varies from row to row only
                rows = rows * weight.reshape(-1, 1)
            else:
                wide = weight.reshape(shape).expand(shape[0], *parameter.shape[1:])
                columns = columns * wide.reshape(shape[0], -1)
        if columns.shape[0] > 1 and bool((columns == columns[:1]).all()):
            columns = columns[:1].clone()
        dtype = widened(parameter).dtype  # a factor of 1024, squared, is too large for float16
        if not all(_fits(weights) for weights in (rows, columns)):
            dtype = torch.float64
        result[name] = Gauge(rows.to(dtype), columns.to(dtype))
    return result


_ROOM = 2.0**120  # weights between this and its inverse are kept in float32


def _fits(weights: Tensor) -> bool:
    return not weights.numel() or bool(((weights < _ROOM) & (weights > 1 / _ROOM)).all())


def safe_divisor_(metric: Tensor) -> Tensor:
    """Let zeros of a metric divide to zero: kappa_i = 0 implies dL/dp_i = 0, and 0/0 is defined as 0."""
    if not float(metric.amin()) > 0:
        metric.masked_fill_(metric == 0, float("inf"))
    return metric


def powered_(kappa: Tensor, gauge: Gauge, normalizer: float, power: float) -> Tensor:
    """D = (kappa w_e / c)^power / w_e, written over kappa.

    kappa w_e is what kappa is in the gauge, where nothing depends on the scales of the weights and any power may be
    taken; 1 / w_e transforms like kappa, hence D does.

    Args:
        kappa: of one parameter.
        gauge: the weights w_e of it.
        normalizer: c.
        power: 1 for kappa / c itself, 0 for the metric of the balanced network.
    """
    inverse = gauge.damping(kappa.shape, kappa.dtype)
    return kappa.div_(inverse).div_(normalizer).pow_(power).mul_(inverse)


_FACTORS = 1e18  # g may be divided by one factor after the other if both are between this and its inverse


def divisor(kappa: Tensor | Outer, bounds: Sequence[tuple[float, float]]) -> Tensor | Outer:
    """Kappa made safe to divide by, without writing to it; see :func:`safe_divisor_`.

    An outer product stays one, unless its factors are so large or small that dividing by one after the other could
    overflow where dividing by the product does not.

    Args:
        kappa: the metric of one parameter.
        bounds: smallest and largest element of each of its factors.
    """
    if isinstance(kappa, Outer):
        safe = all(1 / _FACTORS < bound < _FACTORS for pair in bounds for bound in pair)
        return kappa if safe else safe_divisor_(kappa.dense())
    return kappa if bounds[0][0] > 0 else kappa.masked_fill(kappa == 0, float("inf"))


def parameter_names(network: Network, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Names in the network of those parameters that belong to it."""
    by_id = network.names_by_id
    return {p: by_id[id(p)] for p in parameters if id(p) in by_id}
