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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.kernel.safe_type import Values, own_memory
from pathspace.squared.precision import widened
from pathspace.squared.sharding import from_local, local_factor, to_local
from pathspace.squared.squares import Outer
from pathspace.torch_private import foreach_mul, foreach_mul_

FAR = 16
"""Scales from 2^16 on, at which elements of kappa that are 2^-24 of the others come near the end of float32."""
_ROOM = 2.0**100
"""Factors between this and its inverse are kept and multiplied with in the parameters' type."""


class _Powers(NamedTuple):
    """Rows and columns of a gauge to a power, beside a matrix and as vectors."""

    rows: Tensor
    columns: Tensor
    row_vector: Tensor
    column_vector: Tensor


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
    _cache: dict[tuple[int, torch.dtype], _Powers] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ones = tuple(t.numel() == 1 and float(t) == 1 for t in (self.rows, self.columns))
        object.__setattr__(self, "_ones", ones)  # looked at once: reading a number waits for a GPU

    @property
    def is_product(self) -> bool:
        """True if F is the product of one vector for the rows and one for the columns."""
        return self.columns.shape[0] == 1

    def times_(self, values: Tensor, exponent: int = 1) -> Tensor:
        """F^exponent values, written over them."""
        multiply_([values], [self], exponent)
        return values

    def vectors(self, exponent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the vectors of rows and of columns to a power, ``[n]`` or ``[1]``, and ``[m]`` or ``[1]``.

        F must be their product.
        """
        power = self._powers(exponent, dtype)
        return power.row_vector, power.column_vector

    def _powers(self, exponent: int, dtype: torch.dtype) -> _Powers:
        """Rows and columns to a power, computed once."""
        key = exponent, dtype
        if key not in self._cache:
            rows = self.rows.to(dtype).pow(exponent)
            columns = self.columns.to(dtype).pow(exponent)
            self._cache[key] = _Powers(rows, columns, rows.view(-1), columns.view(-1))
        return self._cache[key]

    def into(self, values: Tensor) -> Tensor:
        """Values / F: a step of the parameter (in the near member, if it is far) as it is in the balanced network."""
        flat = values.reshape(_matrix_shape(values))
        return (flat / self.rows.to(values.dtype) / self.columns.to(values.dtype)).reshape(
            values.shape
        )


def multiply_(values: Sequence[Tensor], gauges: Sequence[Gauge], exponent: int) -> None:
    """Multiply values of several parameters by their F^exponent, in two calls for all of them.

    Args:
        values: written over; each lies row after row.
        gauges: one for each.
        exponent: of F.
    """
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    of_rows: list[Tensor] = []
    of_columns: list[Tensor] = []
    for value, gauge in zip(values, gauges, strict=True):
        flat = value.view(_matrix_shape(value))
        power = gauge._powers(exponent, value.dtype)
        rows_are_one, columns_are_one = gauge._ones
        if not rows_are_one:
            rows.append(flat)
            of_rows.append(power.rows)
        if not columns_are_one:
            columns.append(flat)
            of_columns.append(power.columns)
    if rows:
        foreach_mul_(rows, of_rows)
    if columns:
        foreach_mul_(columns, of_columns)


def _matrix_shape(values: Tensor) -> tuple[int, int]:
    """Return the shape of the matrix whose rows are those of some values."""
    return (values.shape[0] if values.dim() else 1), values.shape[1:].numel()


def into_frame(kappa: Values, gauges: Mapping[str, Gauge]) -> Values:
    """Return kappa' = F^2 kappa, in memory of its own.

    Args:
        kappa: by name. An outer product stays one where F is a product; matrices may be
            overwritten.
        gauges: by name.
    """
    vectors: Values = {}
    matrices: dict[str, Tensor] = {}
    for name, value in kappa.items():
        is_factored = isinstance(value, Outer) and gauges[name].is_product
        if is_factored or (isinstance(value, Tensor) and value.dim() < 2):
            vectors[name] = value
        else:
            matrices[name] = value if isinstance(value, Tensor) else value.dense()
    matrices = own_memory(matrices)
    multiply_(list(matrices.values()), [gauges[name] for name in matrices], 2)
    framed = _vectors_in_frame(vectors, gauges) | matrices
    return {name: framed[name] for name in kappa}


def _vectors_in_frame(kappa: Values, gauges: Mapping[str, Gauge]) -> Values:
    """Return F^2 kappa of vectors and of outer products, in one call for all of them.

    They are not overwritten: what leaves a layer is the kappa of its bias and a factor of that of
    its weight.
    """
    values: list[Tensor] = []
    factors: list[Tensor] = []
    for name, value in kappa.items():
        rows, columns = gauges[name].vectors(2, value.dtype)
        if isinstance(value, Outer):
            values += [value.rows, value.columns]
            factors += [rows, columns]
        else:
            values.append(value)
            factors.append(rows if value.dim() else rows.view(()))
    results = iter(foreach_mul(values, factors) if values else ())
    framed: Values = {}
    for name, value in kappa.items():
        first = next(results)
        framed[name] = Outer(first, next(results)) if isinstance(value, Outer) else first
    return framed


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
