"""The data-dependent measure of nodes (D16 Section 2: Neyshabur, Tomioka, Salakhutdinov, Srebro 2016).

    gamma_v^2 = w_v^T R_v w_v = alpha stat_i[z_v^i] + (1 - alpha) sum_{u->v} w_uv^2 gamma_u^2
    stat      = mean square over the examples (R = M) or variance (R = C);  alpha = 0 is R = D, the path norm
    gamma^2   = 1 at inputs and at the bias node;  gamma_net^2 = sum over the outputs

Letters: v node, z_v its value before its activation, i example, n examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import in_full_precision
from pathspace.replay.observed import Key
from pathspace.replay.replay import Replay, replay
from pathspace.squared.precision import all_widened, widened
from pathspace.squared.tape import Tap

Statistic = Literal["second_moment", "covariance"]


@dataclass(frozen=True)
class Measure:
    """The node measure as a function of the squared parameters, the statistics held.

    Attributes:
        net: gamma_net^2, 0-dim.
        nodes: gamma_v^2 of every node, for one example.
        recurrent: names of the recurrent parameters, cell by cell, in the order of the tape.
    """

    net: Tensor
    nodes: dict[Key, Tensor]
    recurrent: list[str]


def check_options(alpha: float, statistic: str) -> None:
    """Refuse a mix or a statistic that does not exist.

    Raises:
        TypeError: alpha is no number.
        ValueError: alpha is outside [0, 1], or the statistic is unknown.
    """
    if not isinstance(alpha, (Real, Tensor)):
        raise TypeError(f"alpha must be a number, got {alpha!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if statistic not in ("second_moment", "covariance"):
        raise ValueError(f"statistic must be 'second_moment' or 'covariance', got {statistic!r}")


def spread_of(z: Tensor, batch: int, statistic: Statistic) -> Tensor:
    """Compute stat_i[z^i] over the dimension of the examples, and keep that dimension."""
    if statistic == "covariance":
        z = z - z.mean(batch, keepdim=True)
    return z.square().mean(batch, keepdim=True)


def measure(
    network: Network,
    squared: Mapping[str, Tensor],
    replayed: Replay,
    alpha: float,
    statistic: Statistic,
) -> Measure:
    """Compute gamma^2 of all nodes, differentiable in the squared parameters and in the values on data."""
    nodes: dict[Key, Tensor] = {}
    missing: list[Key] = []  # later steps of recurrent layers whose first one ran

    def mix(key: Key, path: Tensor) -> Tensor:
        node = replayed.nodes.get(key)
        if node is None:
            missing.extend([key] if len(key) == 3 and (*key[:2], 0) in replayed.nodes else [])
            return path
        if len(key) == 1 and node.shape_of_one != path.shape:
            raise ValueError(
                f"the inputs give a node the shape {tuple(node.shape_of_one)} for one example; it was traced with "
                f"{tuple(path.shape)}: use inputs of the traced shape (but for the number of examples), or trace again"
            )
        # gamma_v^2 = alpha stat + (1 - alpha) sum_{u->v} w_uv^2 gamma_u^2
        stat = spread_of(node.value, 0, statistic)
        nodes[key] = alpha * stat.to(path.dtype).reshape(path.shape) + (1 - alpha) * path
        return nodes[key]

    taps: list[Tap] = []
    net = network.tape.run(squared, network.live, taps=taps, mix=mix)[0]
    if missing or len(nodes) != len(replayed.nodes):
        raise ValueError(
            "the inputs have another number of steps than the traced ones: use inputs of the traced shape (but for the "
            "number of examples), or trace again"
        )
    return Measure(net, nodes, [tap.recurrent for tap in taps])


@in_full_precision
def data_dependent_norm(
    network: Network, inputs: Any, *, alpha: float = 0.5, statistic: Statistic = "second_moment"
) -> Tensor:
    r"""Compute D16's squared data-dependent path norm gamma_net^2, between paths (alpha = 0) and data (1).

    .. code-block:: text

        gamma_v^2 = alpha stat_i[z_v^i] + (1 - alpha) sum_{u->v} w_uv^2 gamma_u^2
        gamma^2 = 1 at inputs and at the bias node, gamma_net^2 = sum over the outputs

    It does not change under node-wise rescaling. The model's steps run once, in its evaluation
    form: neither it nor its buffers or the random state change.

    Args:
        network: a traced network.
        inputs: a batch as the model is called with it: a tensor, a tuple or list of positional
            arguments, or a dict of keyword arguments; of the traced shape, but for the number of
            examples.
        alpha: share of the data, in [0, 1]; 0 is :func:`squared_path_norm`.
        statistic: ``"second_moment"``: the mean square over the examples (R = M); ``"covariance"``:
            the variance (R = C).

    Returns:
        A 0-dim tensor, differentiable in the model's parameters: a regularizer.

    Raises:
        ValueError: alpha is outside [0, 1], the statistic unknown, or the inputs are not of the
            traced shape.
        UnmatchedForwardError: the forward pass on these inputs is not the traced one.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> ps.paths.data_dependent_norm(network, x, alpha=0.5).item()  # (36 / 2 + 18) / 2
        18.0
    """
    check_options(alpha, statistic)
    replayed = replay(network, inputs, differentiable=True)
    squared = {
        n: p.square() for n, p in all_widened(network.parameters, network.parameters).items()
    }
    return measure(network, squared, replayed, alpha, statistic).net


@dataclass(frozen=True)
class UnitMeasure:
    """gamma^2 of every unit class, the mean over its nodes (positions, time steps).

    A unit that is rescaled by s has s^2 gamma^2; only gamma_net^2 does not change.

    Attributes:
        names: where each class was made.
        squared: gamma^2, shape ``[num_classes]``.
        net: gamma_net^2.
    """

    names: tuple[str, ...]
    squared: Tensor
    net: float
    layers: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Format a table with one row a layer: how many units, and the least, the median and the largest gamma."""
        width = max([5, *(len(name) for name in self.layers)])
        lines = [f"{'layer':<{width}}  units     least    median   largest"]
        for name, members in self.layers.items():
            gamma = self.squared[members].sqrt()
            row = "".join(f"{v:10.3g}" for v in (gamma.min(), gamma.median(), gamma.max()))
            lines.append(f"{name:<{width}}{len(members):7d}{row}")
        return "\n".join(lines)


@in_full_precision
def unit_measure(
    network: Network, inputs: Any, *, alpha: float = 0.5, statistic: Statistic = "second_moment"
) -> UnitMeasure:
    """Compute the node measure gamma of every unit class, as a table to look at.

    Args:
        network: a traced network.
        inputs: a batch, as for :func:`data_dependent_norm`.
        alpha: share of the data.
        statistic: ``"second_moment"`` or ``"covariance"``.

    Returns:
        gamma^2 by unit class; printed, it is a table of layers.

    Raises:
        ValueError: alpha is outside [0, 1], the statistic unknown, or the inputs are not of the
            traced shape.
        UnmatchedForwardError: the forward pass on these inputs is not the traced one.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> ps.paths.unit_measure(network, torch.randn(8, 2)).squared.shape
        torch.Size([3])
    """
    check_options(alpha, statistic)
    with torch.no_grad():
        squared, net = class_measure(network, replay(network, inputs), alpha, statistic)
    return UnitMeasure(network.class_names, squared, net, layers_of(network.class_names))


def class_measure(
    network: Network, replayed: Replay, alpha: float, statistic: Statistic
) -> tuple[Tensor, float]:
    """Compute gamma^2 of every unit class, the mean over its nodes, and gamma_net^2.

    Nodes that have the inverse scale of their class, as keys have that of queries, do not count.

    Returns:
        float64 ``[num_classes]``, 0 for a class without nodes; and gamma_net^2.
    """
    squared = {}
    for name, p in network.parameters.items():
        squared[name] = widened(p.detach()).double().square()
    result = measure(network, squared, replayed, alpha, statistic)
    total = torch.zeros(network.num_classes + 1, dtype=torch.float64, device=result.net.device)
    count = torch.zeros_like(total)
    cells = sorted({key[:2] for key in result.nodes if len(key) == 3})
    recurrent: dict[Key, str] = dict(zip(cells, result.recurrent, strict=True))
    for key, value in result.nodes.items():
        labels = _labels_of(network, key, recurrent.get(key[:2]))
        flat = labels.expand(value.shape).reshape(-1)
        flat = flat.to(total.device)
        # negative: the inverse scale; beyond the classes: a product of scales
        is_other = (flat < 0) | (flat > network.num_classes)
        flat = torch.where(is_other, 0, flat)
        values = value.reshape(-1).double()
        total.index_add_(0, flat, values)
        count.index_add_(0, flat, torch.ones_like(values))
    mean = total / count.clamp_min(1)
    return mean[1:], float(result.net)


def _labels_of(network: Network, key: Key, recurrent: str | None) -> Tensor:
    """Return the labels of the units of a node; those inside a recurrent layer are the rows of its weight."""
    if recurrent is not None:
        return network.edges[recurrent].target.reshape(-1)
    # a cell that is called step by step stands in the tape alone
    labels = network.program.nodes.get(key[0])
    return network.nodes[key[0]] if labels is None else labels


def layers_of(class_names: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the unit classes of each layer, by the name of the place where they were made."""
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(class_names):
        layers.setdefault(name.rsplit("[", 1)[0], []).append(i)
    return layers
