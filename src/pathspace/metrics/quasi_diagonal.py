"""The diagonal of the data-dependent metric and, for every unit, its column of the bias.

    M_ij  = 1/2 d^2 gamma_net^2 / dw_i dw_j   over the weights i, j into one unit, 0 its bias
    M_ii  = kappa_i                           (see ``paths.data_dependent``)
    M_0i  = alpha sum over nodes o of psi_o stat_n[dz_o/dw_i, dz_o/dw_0]      stat: mean product, or covariance

Paths alone make no off-diagonal term. With alpha = 1 and the second moment this is the
quasi-diagonal natural gradient of Ollivier (O13, 2013/2015) for a Gaussian output. An optimizer
keeps it as

    M'_ii = (f_i^2 M_ii + damping m) / c,   M'_0i = f_0 f_i M_0i / c

m is the mean of f^2 M over all parameters, because the rule mixes them: in proportion to the mean
of one, damping would not bound the steps of those whose M is small beside others. c is m, or 1 for
``normalization="none"``.

Letters: o node, n example, J_i = d(seeded values)/dw_i, f gauge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.data_dependent import DataDependent
from pathspace.network import Network
from pathspace.network.network import in_full_precision
from pathspace.paths.data.data_dependent import Estimator, Request, check_estimation, in_safe_type
from pathspace.paths.data.node_measure import Statistic, check_options
from pathspace.paths.kernel.safe_type import RangeReport
from pathspace.replay.replay import Replay
from pathspace.rescaling.optimizer_states import State, times_

_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")


@dataclass(frozen=True)
class QuasiDiagonalMetric:
    """A metric by parameter name.

    Attributes:
        diagonal: M_ii, of the parameter's shape.
        cross: M_0i with the bias of the unit that the weight enters; for weights of units with a
            bias.
        bias_of: weight -> bias.

    Example:
        >>> import torch, pathspace as ps
        >>> network = ps.trace(torch.nn.Linear(1, 1), torch.zeros(1, 1))
        >>> ps.metrics.quasi_diagonal_metric(network, torch.ones(2, 1)).bias_of
        {'weight': 'bias'}
    """

    diagonal: Mapping[str, Tensor]
    cross: Mapping[str, Tensor]
    bias_of: Mapping[str, str]


@in_full_precision
def quasi_diagonal_metric(
    network: Network,
    inputs: Any,
    *,
    alpha: float = 1.0,
    statistic: Statistic = "second_moment",
    estimator: Estimator = "exact",
    generator: torch.Generator | None = None,
) -> QuasiDiagonalMetric:
    """Compute the quasi-diagonal metric of linear, convolutional and recurrent layers; of others, its diagonal.

    Args:
        network: a traced network.
        inputs: a batch, as for :func:`pathspace.paths.data_dependent_norm`.
        alpha: share of the data, in (0, 1].
        statistic: ``"second_moment"`` or ``"covariance"``.
        estimator: see :func:`pathspace.paths.data_dependent_kappa`.
        generator: draws the signs.

    Returns:
        The metric.

    Raises:
        ValueError: an option is unknown or out of its range, or the inputs have another shape than
            the traced ones.
        UnmatchedForwardError: the forward pass on these inputs is not the traced one.
        FloatingPointError: a value is not finite even in float64.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(1, 1)
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> metric = ps.metrics.quasi_diagonal_metric(network, torch.tensor([[1.0], [3.0]]))
        >>> metric.diagonal["weight"].item(), metric.cross["weight"].item(), metric.diagonal["bias"].item()
        (5.0, 2.0, 1.0)
    """
    check_options(alpha, statistic)
    check_estimation("parameters", estimator)
    if alpha == 0:
        raise ValueError(
            "alpha must be positive, got 0: the quasi-diagonal metric is measured on data"
        )
    request = Request(alpha, statistic, "parameters", estimator, biases)
    diagonal, shares = in_safe_type(network, inputs, request, generator)
    cross = {
        name: value.mul_(alpha).to(diagonal[name].dtype) for name, value in shares.cross.items()
    }
    return QuasiDiagonalMetric(diagonal, cross, shares.bias_of)


def biases(network: Network, seen: Replay) -> dict[str, str]:
    """Weight -> the bias of the units that it enters: that of its layer, or else one that enters the same classes."""
    name_of = {id(leaf): name for name, leaf in seen.leaves.items()}
    layers: list[str] = []
    bias_of: dict[str, str] = {}
    for weight, bias in _layers(seen, name_of):
        layers.append(weight)
        if bias is not None:
            bias_of.setdefault(weight, bias)
    for weight in layers:
        if weight in bias_of:
            continue
        match = next((b for b in bias_of.values() if _enter_the_same(network, weight, b)), None)
        if match is not None:
            bias_of[weight] = match
    for second, first in _second_biases(seen, name_of):
        bias_of.setdefault(second, first)
    return bias_of


def _layers(seen: Replay, name_of: Mapping[int, str]) -> Iterator[tuple[str, str | None]]:
    """Yield the weight and the bias of every call of a layer; None for no bias."""
    for use in seen.uses:
        names = [name_of.get(id(w)) for w in use.args[1:3] if isinstance(w, Tensor)]
        if use.name in _LAYERS and names and names[0] is not None:
            yield names[0], names[1] if len(names) == 2 else None


def _second_biases(seen: Replay, name_of: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield a unit's further biases, each with its first: they are weights on a constant input."""
    for use in seen.uses:
        if use.name != "linear":
            continue
        names = [name_of.get(id(w)) for w in use.weights if w is not use.args[0]]
        biases = names[1:]
        if not biases or biases[0] is None:
            continue
        for name in biases[1:]:
            if name is not None:
                yield name, biases[0]


def _enter_the_same(network: Network, weight: str, bias: str) -> bool:
    units, others = (network.edges[name].target.reshape(-1) for name in (weight, bias))
    return units.shape == others.shape and bool((units == others).all() and (units != 0).all())


class DataDependentWithBias(DataDependent):
    """The metric of :class:`pathspace.optim.QuasiDiagonal`; options as for :class:`DataDependent`, alpha > 0."""

    pairs = staticmethod(biases)

    def _refresh(self, names: list[str]) -> None:
        """Compute the metric of all parameters, with a gradient or not: M_0i and M_00 must be of one batch."""
        # a parameter without kappa has no products with its bias either
        for state in self.state.values():
            state.pop("bias", None)
        super()._refresh([n for n in self.network.parameters if n in names or n in self.state])

    def _paired(self, name: str, bias: str, cross: Tensor) -> dict[str, Any]:
        if "gauge_rows" not in self.state.get(bias, {}):
            return {}
        balanced = self.gauge(name).times_(cross.clone(memory_format=torch.contiguous_format))
        rows = self.gauge(bias).rows.to(cross.dtype)
        flat = balanced.view(balanced.shape[0], -1).mul_(rows)
        # a state cannot hold strings
        return {"bias": list(self.network.parameters).index(bias), "cross": flat.view(cross.shape)}

    def _follow_data(self, name: str, state: State, near: Tensor) -> None:
        super()._follow_data(name, state, near)
        if "cross_average" not in state or "bias" not in state:
            return
        bias = list(self.network.parameters)[state["bias"]]
        parameter = self.network.parameters[name]
        rows = self.network.edge_factors(bias, near).reshape(-1)
        rows = rows.view(-1, *[1] * (parameter.dim() - 1))
        # M_0i has the unit of two gradients
        times_(state["cross_average"], self.network.edge_factors(name, near), -1)
        times_(state["cross_average"], rows, -1)

    def _blocks(self, name: str) -> tuple[int, ...]:
        """One normalizer serves all parameters."""
        del name
        return ()

    def _set_normalizers(self, kappa: RangeReport, new: Sequence[str]) -> None:
        states = {name: self.state[name] for name in kappa.values}
        # the mean that all parameters have shared since the first step
        first_mean = None
        if self.normalization in ("frozen", "none"):
            known = [state["mean"] for name, state in states.items() if name not in new]
            first_mean = known[0] if known else None
        super()._set_normalizers(kappa, new)
        mean = self._mean_of(states) if first_mean is None else first_mean
        normalizer = 1.0 if self.normalization == "none" else mean
        for state in states.values():
            state.update(mean=mean, normalizer=normalizer)

    def _mean_of(self, states: Mapping[str, Mapping[str, Any]]) -> float:
        """Return the mean of kappa' over all parameters, or 1 where it is 0."""
        total = 0.0
        count = 0
        for name, state in states.items():
            size = self.network.parameters[name].numel()
            count += size
            if not state["empty"]:
                total += size * state["mean"]
        return total / max(1, count) or 1.0

    def cross(self, name: str) -> tuple[str, Tensor] | None:
        """Return the bias of the units that a weight enters, and M'_0i of the weight's shape; None without one."""
        state = self.state[name]
        if "bias" not in state:
            return None
        bias = list(self.network.parameters)[state["bias"]]
        return bias, torch.div(state["cross"], state["normalizer"])
