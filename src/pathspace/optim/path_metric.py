"""kappa as the metric of an optimizer: normalized, damped and safe to divide by.

Raw kappa has no natural unit: its mean for a recurrent matrix runs from 1e-6 to 7 over common starts, so a learning
rate for g / kappa means something else for every network. Each parameter's kappa is therefore divided by one number
c that node-wise rescaling does not change: the mean of kappa over the parameter's elements, seen in the balanced
member of the rescaling class. With it a learning rate has about the size it has for SGD on the balanced network.

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
from pathspace.network.squares import Outer, dense
from pathspace.paths.node_mass import node_mass
from pathspace.paths.norm import widened


@dataclass(slots=True)
class Gauge:
    """The weights w_e of one parameter of shape ``[n, ...]``, in its type (float32 for half precision).

    Attributes:
        rows: ``[n, 1]``, or ``[1, 1]`` where all rows are alike.
        columns: ``[1, m]`` with m elements a row, or ``[n, m]`` where w is no product (grouped convolutions).
    """

    rows: Tensor
    columns: Tensor

    def mean(self, kappa: Tensor | Outer) -> Tensor:
        """The mean of kappa_e w_e, a number that rescaling does not change, as a 0-dim tensor. One pass over kappa."""
        rows, columns = self.rows, self.columns
        if rows.dtype != kappa.dtype:
            rows, columns = rows.to(kappa.dtype), columns.to(kappa.dtype)
        count = max(1, kappa.shape.numel())
        if isinstance(kappa, Outer) and columns.shape[0] == 1:
            return _sum(kappa.rows, rows[:, 0]) * _sum(kappa.columns, columns[0]) / count
        kappa = dense(kappa)
        if kappa.dim() == 1 and columns.numel() == 1:
            total = _sum(kappa, rows[:, 0])
            return total * (columns[0, 0] / count)
        flat = kappa if kappa.dim() == 2 else kappa.reshape(kappa.shape[0] if kappa.dim() else 1, -1)
        if columns.shape[0] == 1:
            by_row = torch.mv(flat, columns[0] if columns.shape[1] > 1 else columns[0].expand(flat.shape[1]))
        else:
            by_row = torch.linalg.vecdot(flat, columns)
        return _sum(by_row, rows[:, 0]) / count

    def damping(self, shape: Sequence[int]) -> Tensor:
        """1 / w_e, which transforms like kappa; broadcastable to ``shape``."""
        inverse = self.rows.reciprocal() * self.columns.reciprocal()
        full = inverse.expand(shape[0] if shape else 1, inverse.shape[1])
        size = torch.Size(shape).numel() // max(1, full.shape[0])
        return full.expand(full.shape[0], size).reshape(shape)


def _sum(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of a vector; one weight may stand for all, and one value too."""
    if weights.shape[0] == 1:
        return values.sum() * weights[0]
    if values.stride(0) == 0:
        return weights.sum() * values[0]
    return torch.dot(values, weights)


def gauges(network: Network, names: Iterable[str]) -> dict[str, Gauge]:
    """Gauges of parameters, at the network's present weights.

    Args:
        network: a traced network.
        names: parameters of it.

    Returns:
        Parameter name -> gauge.

    Raises:
        FloatingPointError: the path mass of a unit class is not finite.
    """
    scales = node_mass(network).gauge()
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
        dtype = widened(parameter).dtype  # a factor of 1024, squared, is too large for float16
        result[name] = Gauge(rows.to(dtype), columns.to(dtype))
    return result


def safe_divisor_(metric: Tensor) -> Tensor:
    """Let zeros of a metric divide to zero: kappa_i = 0 implies dL/dp_i = 0, and 0/0 is defined as 0."""
    if not float(metric.amin()) > 0:
        metric.masked_fill_(metric == 0, float("inf"))
    return metric


def parameter_names(network: Network, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Names in the network of those parameters that belong to it."""
    by_id = network.names_by_id
    return {p: by_id[id(p)] for p in parameters if id(p) in by_id}
