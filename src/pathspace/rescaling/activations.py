"""Ranges of the values of every unit class on data, which a quantised network has to represent.

Counted is what enters a weight, after its activation, where the operation says which units those
are: linear layers and convolutions, recurrent layers step by step. A class of which no such
operation reads anything (queries and keys, or operations like einsum) has the values of its units
before their activation.

Letters: c unit class, C how many, h_c its values over examples, positions and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.replay.observed import Use
from pathspace.replay.replay import Replay, replay
from pathspace.rescaling.criteria import Scales, note_largest_

Statistic = Literal["largest", "mean"]
STATISTICS: tuple[str, ...] = get_args(Statistic)

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_GROUPS = 6  # the place of this argument of a convolution


def log_ranges(
    network: Network, scales: Scales, calibration: Any, statistic: Statistic, factors: Tensor
) -> Tensor:
    """log max |h_c|, or of the largest mean |h| of the units of c.

    The model runs once, in float64 and in its evaluation form, on a copy.

    Args:
        network: a traced network.
        scales: of it.
        calibration: what the model is called with; of the traced shapes, but for the number of
            examples.
        statistic: ``"largest"`` or ``"mean"``.
        factors: of a rescaling, float64 ``[C]``: the ranges are those after it, though it is not
            done.

    Returns:
        A table by label (see :class:`Scales`), float64; -inf where there are no units, or all
        values are zero.

    Raises:
        UnmatchedForwardError: the forward pass on these data is not the traced one.
        ValueError: a value is not finite.
    """
    with torch.no_grad():
        replayed = replay(network, calibration, wide=True)
        entering_weights = _entering_weights(
            network, replayed, statistic, scales.table(factors, 0.0)
        )
        before_activation = _before_activation(
            network, replayed, statistic, scales.table(factors, 0.0)
        )
    # classes that no known operation reads have the values before their activation
    sides = scales.by_sign(entering_weights)
    unread = torch.nn.functional.pad((sides[0] == 0) & (sides[1] == 0), (1, len(scales.monomials)))
    sizes = torch.where(unread[scales.labels.abs()], before_activation, entering_weights)
    if bool((sizes.isnan() | sizes.isposinf()).any()):
        raise ValueError(
            "on the calibration data a unit has values that are not finite: leave such examples out"
        )
    return (sizes * network.scale_of(factors, scales.labels)).log()


def _entering_weights(
    network: Network, replayed: Replay, statistic: Statistic, table: Tensor
) -> Tensor:
    """Fill a table by label with the statistic of the values that enter weights."""
    names = {id(leaf): name for name, leaf in replayed.leaves.items()}
    for use in replayed.uses:
        arguments = list(use.args)
        name = names.get(id(arguments[1])) if len(arguments) > 1 else None
        if name is None or use.kwargs:
            continue
        sizes = entering(use, arguments[0], _STATISTICS[statistic])
        if sizes is not None:
            labels = network.edges[name].source.to(table.device)
            note_largest_(table, sizes, labels)
    return table


def entering(use: Use, x: Any, statistic: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return, for each element of a weight, a statistic of the values that it multiplies.

    Args:
        use: of the weight, in a linear layer, a product of matrices or a convolution.
        x: the values that enter the weight, or a tensor of that shape, such as their gradient.
        statistic: from values ``[n, channels]`` to a number for each channel.

    Returns:
        A tensor that broadcasts to the weight; None for any other operation. A channel that several
        groups of rows read has a number for each group.
    """
    weight = use.args[1]
    if not isinstance(x, Tensor):
        return None
    if use.name == "linear":
        return statistic(_rows(x, -1)).unsqueeze(0)
    if use.name == "matmul" and weight.dim() == 2:
        return statistic(_rows(x, -1)).unsqueeze(1)
    if use.name not in (*_CONVOLUTIONS, *_TRANSPOSED):
        return None
    sizes = statistic(_rows(x, 1 - weight.dim()))
    taps = (1,) * (weight.dim() - 2)
    if use.name in _TRANSPOSED:
        return sizes.reshape(-1, 1, *taps)
    groups = use.args[_GROUPS] if len(use.args) > _GROUPS else 1
    repeated = sizes.reshape(groups, -1).repeat_interleave(len(weight) // groups, 0)
    return repeated.reshape(*weight.shape[:2], *taps)


def _before_activation(
    network: Network, replayed: Replay, statistic: Statistic, table: Tensor
) -> Tensor:
    """Fill a table by label with the statistic of the values of units before their activation."""
    for key, node in replayed.nodes.items():
        # inside a recurrent layer its weights say more; outputs have no class
        if len(key) == 1 and key[0] in network.program.nodes:
            labels = network.program.nodes[key[0]].to(table.device)
            sizes = node.value.abs()
            sizes = sizes.mean(0) if statistic == "mean" else sizes.amax(0)
            note_largest_(table, sizes, labels)
    return table


def _rows(x: Tensor, channels: int) -> Tensor:
    """Return the values of each channel over all other dimensions, ``[n, channels]``."""
    return x.detach().movedim(channels, -1).unsqueeze(0).flatten(0, -2)


def largest(rows: Tensor) -> Tensor:
    """Return the largest size of the values of each channel."""
    return rows.abs().amax(0)


def _mean(rows: Tensor) -> Tensor:
    return rows.abs().mean(0)


_STATISTICS: dict[Statistic, Callable[[Tensor], Tensor]] = {"largest": largest, "mean": _mean}
