"""A refresh of the data-dependent metric of a chain, all layers at once, where nothing is out of the ordinary.

What it finds is what ``DataMetric`` finds parameter by parameter, to rounding. It leaves to that what is rare: states
that differ, a kappa with zeros or near the ends of its type, several processes.

Letters: kappa = path + alpha data; m the average of data, a its decay; w_e the gauge; D units side by side, l layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.optim.base.path_metric import Gauge
from pathspace.paths.data.chain_shares import ChainShares
from pathspace.paths.kernel.safe_type import Surveyed, survey
from pathspace.squared.squares import memory_for

_States = Mapping[str, dict[str, Any]]


@dataclass
class _Weights:
    """What the means of kappa_e w_e are made with, for all layers."""

    gauges: list[Gauge]
    columns: list[Tensor]  # w of the columns of W_l, [in]
    rows: Tensor  # [2 l, 2 D]: of the rows of W_l, and then of b_l, over the numbers of their elements
    names: list[str]  # of the weights, then of the biases; "" for none


class ChainRefresh:
    """The refreshes of one optimizer; it keeps what does not change between them."""

    def __init__(self) -> None:
        self._weights: _Weights | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ChainRefresh:
        return type(self)()

    def refreshed(
        self,
        shares: ChainShares,
        states: _States,
        gauges: Mapping[str, Gauge],
        alpha: float,
        decay: float,
        memory: dict[str, Tensor],
    ) -> tuple[Surveyed, dict[str, float], dict[str, dict[str, Any]], bool] | None:
        """Kappa of all parameters, its means in the gauge, what states are to keep, and whether kappa surely fits.

        Args:
            shares: the two terms; unless None is returned, their data is overwritten.
            states: of all parameters of the chain, by name.
            gauges: likewise.
            alpha: the share of the data.
            decay: of its average.
            memory: for kappa, kept by the caller.

        Returns:
            None if these states have to be looked at one by one. Of a kappa that surely fits its type the bounds need
            not be the closest.
        """
        weights = self._weights_of(shares, gauges)
        if shares.leaving is None or weights is None or not _alike(shares, weights.names, states):
            return None
        data, new = _averaged(shares, weights.names, states, decay)
        factor = alpha / next(iter(new.values())).get("data_weight", 1.0)
        count = len(shares.leaving)
        sums = shares.leaving.new_empty(2 * count)  # of the rows of all W_l, then all b_l themselves
        biases = torch.add(shares.leaving, data[-1], alpha=factor, out=sums[count:])
        values: dict[str, Tensor] = {}
        by_row, leaving = sums[:count].split(shares.sizes), shares.leaving.split(shares.sizes)
        for i, (layer, entering) in enumerate(zip(shares.layers, shares.entering, strict=True)):
            out = memory_for(data[i], memory, f"{layer.weight}, kappa")
            kappa = torch.addr(data[i], leaving[i], entering, beta=factor, out=out)
            values[layer.weight] = kappa
            torch.mv(kappa, weights.columns[i], out=by_row[i])
        for layer, kappa in zip(shares.layers, biases.split(shares.sizes), strict=True):
            if layer.bias is not None:
                values[layer.bias] = kappa
        ends = torch.stack([*shares.leaving.aminmax(), *torch.cat(shares.entering).aminmax()])
        numbers = torch.cat([torch.mv(weights.rows, sums), ends]).tolist()
        means = {name: mean for name, mean in zip(weights.names, numbers, strict=False) if name}
        found, sure = _looked_at(values, means, numbers[-4:])
        return found, means, new, sure

    def _weights_of(self, shares: ChainShares, gauges: Mapping[str, Gauge]) -> _Weights | None:
        """The weights of the means, made anew when a gauge is another."""
        names = [layer.weight for layer in shares.layers] + [layer.bias or "" for layer in shares.layers]
        if not all(name in gauges for name in names if name):
            return None
        own = [gauges[name] for name in names if name]
        known = self._weights
        if known is None or known.rows.dtype != shares.biases.dtype or _differ(own, known.gauges):
            self._weights = _weights(shares, names, gauges, own)
        return self._weights


def _differ(gauges: list[Gauge], others: list[Gauge]) -> bool:
    return any(a is not b for a, b in zip(gauges, others, strict=True))


def _weights(
    shares: ChainShares, names: list[str], gauges: Mapping[str, Gauge], own: list[Gauge]
) -> _Weights | None:
    if any(gauge.columns.shape[0] != 1 for gauge in own):
        return None
    like, count, layers = shares.biases, sum(shares.sizes), len(shares.layers)
    rows = like.new_zeros(2 * layers, 2 * count)
    columns: list[Tensor] = []
    for i, (name, size) in enumerate(zip(names, 2 * shares.sizes, strict=True)):
        first = sum(shares.sizes[: i % layers]) + (count if i >= layers else 0)
        if not name:
            continue
        gauge = gauges[name]
        weights = gauge.rows[:, 0].to(like.dtype).expand(size)
        if i < layers:
            wide = shares.weights[i].shape[1]
            columns.append(gauge.columns[0].to(like.dtype).expand(wide).contiguous())
            rows[i, first : first + size] = weights / (size * wide)
        else:
            rows[i, first : first + size] = weights * gauge.columns[0, 0] / size
    return _Weights(own, columns, rows, names)


def _alike(shares: ChainShares, names: list[str], states: _States) -> bool:
    """Whether the states of all parameters, and no others, have been averaged alike, in the type of the data."""
    own = [states[name] for name in names if name in states]
    if len(own) != len(states) or len(own) != sum(1 for name in names if name):
        return False
    weight, dtype = own[0].get("data_weight"), shares.biases.dtype
    for state in own:
        average = state.get("data_average")
        if state.get("data_weight") != weight or (average is not None and average.dtype != dtype):
            return False
    return True


def _averaged(
    shares: ChainShares, names: list[str], states: _States, decay: float
) -> tuple[list[Tensor], dict[str, dict[str, Any]]]:
    """The averages m = a m + (1 - a) data of all W_l and of all b_l together, written over the data."""
    data = [*shares.weights, *shares.biases.split(shares.sizes)]
    kept = [(name, t) for name, t in zip(names, data, strict=True) if name]
    new: dict[str, dict[str, Any]] = {}
    before = states[kept[0][0]]
    draws, weight = before.get("draws", 0) + 1, 1 - decay
    if decay:
        if "data_average" in before:
            averages = [states[name]["data_average"] for name, _ in kept]
            # data + a (m - data)
            torch._foreach_lerp_([t for _, t in kept], averages, decay)  # pyright: ignore[reportPrivateImportUsage]
            weight = before["data_weight"] + (1 - decay) * (1 - before["data_weight"])
        else:
            torch._foreach_mul_([t for _, t in kept], 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
    for name, t in kept:
        new[name] = {"draws": draws}
        if decay:
            new[name] |= {"data_average": t, "data_weight": weight}
    return [*shares.weights, shares.biases], new


def _looked_at(
    values: dict[str, Tensor], means: dict[str, float], ends: list[float]
) -> tuple[Surveyed, bool]:
    """Kappa with bounds: it lies above the share of the paths, and is finite where its means are."""
    least_leaving, most_leaving, least_entering, most_entering = ends
    limits = torch.finfo(next(iter(values.values())).dtype)
    least, most = min(1.0, least_entering) * least_leaving, max(1.0, most_entering) * most_leaving
    numbers = list(means.values())
    if limits.tiny / limits.eps <= least and most <= limits.max and all(map(math.isfinite, numbers)):
        return Surveyed(dict(values), dict.fromkeys(values, ((least, limits.max),)), numbers), True
    found = survey(dict(values))
    found.measured = numbers
    return found, False
