"""The balanced frame, in which a parameter looks the same in every member of a rescaling class.

Node-wise rescaling with scales s multiplies a weight w_e of an edge e = (u -> v) by s_v / s_u, its
gradient by s_u / s_v and kappa_e by (s_u / s_v)^2. The gauge b of a network, measured once when
training starts (see ``paths.kernel.node_mass``), follows: b_c becomes s_c b_c. Hence with f_e = b_v
/ b_u

    w' = w / f      g' = f g      kappa' = f^2 kappa

are the same numbers in every member, those of the balanced network. Whatever is done to them is
invariant, and a step found there is one of the weights, dw = f dw'.

Two roundings meet here. f is a real number: rounded to powers of two it would leave up to sqrt 2
per class that damping and powers could see. But where weights are scaled so far that kappa's
elements leave float32, kappa is first computed in the member that lies the nearest powers of two
away, which rounds nothing: f = m F with powers of two m. Other networks have m = 1 and pay for none
of it.

Letters: e an edge u -> v; b_c the gauge of unit class c, m_c the power of two next to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.norm import widened
from pathspace.squared.sharding import from_local, local_factor, to_local
from pathspace.squared.squares import Outer

FAR = 16
"""Scales from 2^16 on, at which elements of kappa that are 2^-24 of the others come near the end of float32."""
_ROOM = 2.0**100
"""Factors between this and its inverse are kept and multiplied with in the parameters' type."""


@dataclass(frozen=True, eq=False)
class Gauge:
    """The factors f_e = m_e F_e of one parameter of shape ``[n, ...]``.

    Attributes:
        rows: ``[n, 1]``, or ``[1, 1]`` where all rows are alike.
        columns: ``[1, m]`` with m elements a row, ``[1, 1]``, or ``[n, m]`` where F is no product
            (grouped convolutions). F is the product of both.
        far: m_e, powers of two, broadcastable to the parameter's shape; None for m_e = 1.
    """

    rows: Tensor
    columns: Tensor
    far: Tensor | None = None
    _ones: tuple[bool, bool] = field(init=False, default=(False, False))
    _cache: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        ones = tuple(t.numel() == 1 and float(t) == 1 for t in (self.rows, self.columns))
        object.__setattr__(self, "_ones", ones)  # looked at once: reading a number waits for a GPU

    def times(self, kappa: Tensor | Outer, exponent: int) -> Tensor | Outer:
        """F^exponent kappa; a tensor is overwritten, an outer product stays one where F is a product."""
        if isinstance(kappa, Outer):
            if self.columns.shape[0] == 1:
                rows, columns = self._powers(exponent, kappa.dtype)
                return Outer(kappa.rows * rows[:, 0], kappa.columns * columns[0])
            kappa = kappa.dense()
        return self.times_(kappa, exponent)

    def times_(self, values: Tensor, exponent: int = 1) -> Tensor:
        """F^exponent values, written over them."""
        flat = values.view(values.shape[0] if values.dim() else 1, values.shape[1:].numel())
        for factor, is_one in zip(self._powers(exponent, values.dtype), self._ones, strict=True):
            if not is_one:
                flat.mul_(factor)
        return values

    def _powers(self, exponent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows and columns to a power, computed once."""
        key = exponent, dtype
        if key not in self._cache:
            self._cache[key] = (
                self.rows.to(dtype).pow(exponent),
                self.columns.to(dtype).pow(exponent),
            )
        return self._cache[key]

    def into(self, values: Tensor) -> Tensor:
        """Values / F: a step of the parameter (in the near member, if it is far) as it is in the balanced network."""
        flat = values.reshape(values.shape[0] if values.dim() else 1, values.shape[1:].numel())
        return (flat / self.rows.to(values.dtype) / self.columns.to(values.dtype)).reshape(
            values.shape
        )


def far_scales(network: Network, gauge: Tensor) -> Tensor | None:
    """Return the scales m_c of a network that is far from balance.

    Args:
        network: a traced network.
        gauge: b_c, float64 ``[num_classes]``.

    Returns:
        Powers of two, float64 ``[num_classes]``; None if no class is far, or the parameters' types
        have room.
    """
    types = {p.dtype for p in network.parameters.values()}
    if not gauge.numel() or not types <= {torch.float32, torch.bfloat16}:
        return None
    exponents = gauge.log2().round()
    return exponents.exp2() if float(exponents.abs().amax()) >= FAR else None


def gauges(
    network: Network, names: Iterable[str], scales: Tensor, far: Tensor | None = None
) -> dict[str, Gauge]:
    """Gauges of parameters.

    Args:
        network: a traced network.
        names: parameters of it.
        scales: b_c of every unit class, float64 ``[num_classes]``.
        far: m_c, see :func:`far_scales`.

    Returns:
        Parameter name -> gauge, in the parameter's type (float32 for half precision), or float64
        where that has no room.
    """
    result = {}
    near = scales if far is None else scales / far
    for name in names:
        parameter = network.parameters[name]
        labels = network.edges[name]
        rows = near.new_ones(1, 1)
        columns = near.new_ones(1, 1)
        targets = network.scale_of(near, labels.target)
        sources = network.scale_of(near, labels.source)
        # F_e = b_v / b_u
        for factor in (targets, sources.reciprocal()):
            missing = parameter.dim() - factor.dim()
            shape = (1,) * missing + tuple(factor.shape)
            varies_by_row_only = all(n == 1 for n in shape[1:])
            if varies_by_row_only:
                rows = rows * factor.reshape(-1, 1)
            else:
                wide = factor.reshape(shape).expand(shape[0], *parameter.shape[1:])
                columns = columns * wide.reshape(shape[0], -1)
        if columns.shape[0] > 1 and bool((columns == columns[:1]).all()):
            columns = columns[:1].clone()
        dtype = widened(parameter).dtype
        if not (_has_room(rows) and _has_room(columns)):
            dtype = torch.float64
        place = parameter.device
        result[name] = Gauge(
            rows.to(place, dtype),
            columns.to(place, dtype),
            None if far is None else powers(network, name, far),
        )
    return result


def powers(network: Network, name: str, far: Tensor) -> Tensor:
    """m_e of a parameter's edges in this process, in its type where that has room, else in float64."""
    parameter = network.parameters[name]
    factors = network.edge_factors(name, far)
    dtype = parameter.dtype if _has_room(factors) else torch.float64
    return local_factor(factors, parameter).to(parameter.device, dtype)


def recentred(network: Network, far: Tensor) -> dict[str, Tensor]:
    """Return the parameters w / m_e of the member near balance, copied; for m_c see :func:`far_scales`."""
    every = network.parameters.items()
    return {
        n: from_local((to_local(p.detach()) / powers(network, n, far)).to(p.dtype), p)
        for n, p in every
    }


def _has_room(factors: Tensor) -> bool:
    return not factors.numel() or bool(((factors < _ROOM) & (factors > 1 / _ROOM)).all())
