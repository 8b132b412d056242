"""What ``fused.plan.Plan`` is to the path metric, for the data-dependent one: kappa of all parameters at once.

What data shows is found by torch; compiled loops average it, and make kappa and its means of it. What is out of the
ordinary is left to ``DataMetric``.

Letters: kappa = path + alpha data; m the average of data, a its decay; w_e the gauge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pathspace.compiled import data_refresh
from pathspace.compiled.fused_chain import FusedChain, Summaries
from pathspace.compiled.fused_recurrent import FusedRecurrent
from pathspace.optim.base.path_metric import Gauge
from pathspace.paths.data.data_dependent import Shares
from pathspace.paths.kernel.safe_type import MODERATE
from pathspace.squared.squares import Outer, memory_for

if TYPE_CHECKING:
    from pathspace.optim.base.data_metric import DataMetric


class DataPlan:
    """Compiled refreshes of one optimizer, with memory of their own.

    Args:
        optimizer: whose metric it is; the network's parameters must be of one type, float32 or float64, on the CPU.
    """

    def __init__(self, optimizer: DataMetric) -> None:
        self._optimizer = optimizer
        self.chain_shares, self.recurrent_shares = FusedChain().shares, FusedRecurrent().shares
        self._names: list[str] = []
        self._gauges: list[Gauge] = []
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._kappa: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> DataPlan:
        copied = memo.get(id(self._optimizer))
        assert copied is not None  # only its optimizer holds it
        return type(self)(copied)

    summaries = Summaries

    def place(self, name: str) -> str:
        """What stands for a parameter in :meth:`value_at` and :meth:`means`."""
        return name

    def value_at(self, place: str) -> Tensor:
        """Kappa of a parameter, as the last call left it."""
        return self._kappa[place]

    def run(self, gauges: Mapping[str, Gauge]) -> None:
        """Nothing: the general way is asked for what :meth:`means` does not find."""

    def weigh(self, gauges: Mapping[str, Gauge]) -> None:
        """Take the parameters, and the weights of their means, from gauges."""
        own = list(gauges.values())
        same = len(own) == len(self._gauges) and all(a is b for a, b in zip(own, self._gauges, strict=True))
        if same and list(gauges) == self._names:
            return
        self._names, self._gauges, self._weights = list(gauges), own, []
        parameters = [self._optimizer.network.parameters[name] for name in self._names]
        self._like = np.zeros(1, str(parameters[0].dtype).removeprefix("torch."))
        self._tensors = np.zeros((len(own), 10), np.int64)
        self._numbers, self._report = np.zeros((len(own), 2)), np.zeros((len(own), 3))
        for row, name, gauge, p in zip(self._tensors, self._names, own, parameters, strict=True):
            memory_for(p.detach(), self._kappa, name)  # parameters are contiguous
            rows = p.shape[0] if p.dim() > 1 else 1
            columns = p.numel() // rows
            ends = gauge.rows[:, 0], gauge.columns[0]
            if p.dim() <= 1:
                ends = ends[0].new_ones(1), ends[0] * ends[1]
            weights = [
                t.to(p.dtype).expand(n).contiguous() for t, n in zip(ends, (rows, columns), strict=True)
            ]
            self._weights.append((weights[0], weights[1]))
            row[data_refresh.KAPPA] = self._kappa[name].data_ptr()
            row[data_refresh.ROWS], row[data_refresh.COLUMNS] = rows, columns
            row[data_refresh.ROW_WEIGHTS :] = [t.data_ptr() for t in weights]
        self._parameters, self._path = parameters, dict[str, Tensor | Outer]()
        self._readable = all(gauge.columns.shape[0] == 1 for gauge in own)
        limits = np.finfo(self._like.dtype)
        self._least, self._most = float(limits.tiny / limits.eps), float(limits.max)
        self._counts = [p.numel() for p in parameters]

    def means(self) -> dict[str, float] | None:
        """Means of kappa in the gauges, if all of it may be divided by as it is; None leaves the step to others.

        The averages in the states are then those with the new data.
        """
        optimizer, names = self._optimizer, self._names
        found = optimizer.shares_at_hand(names) if self._readable else None
        if found is None:
            return None
        shares, draws = found
        new = self._lay_out(shares, draws)
        if new is None:
            return None
        data_refresh.refresh(self._tensors, self._numbers, self._report, self._like)
        means = {}
        for name, count, (low, high, total) in zip(names, self._counts, self._report.tolist(), strict=True):
            mean = means[name] = total / count
            # far from the ends of its type, and no zero
            if not (low > 0 and self._least <= high <= self._most and 1 / MODERATE <= mean <= MODERATE):
                return None
        for name, own in new.items():
            optimizer.keep_average(name, own)
        return means

    def _lay_out(self, shares: Shares, draws: int) -> dict[str, dict[str, Any]] | None:
        """Fill the tables with what was found; what states are to keep then; None if the loops cannot read it."""
        optimizer, dtype = self._optimizer, self._parameters[0].dtype
        if shares.path is not self._path and not self._read(shares.path):
            return None
        decay, alpha = optimizer.decay_of(shares), optimizer.alpha
        new = dict[str, dict[str, Any]]()
        places, numbers = list[tuple[int, int]](), list[tuple[float, float]]()
        self._held = held = list[Tensor]()  # what the tables point to
        for name, p in zip(self._names, self._parameters, strict=True):
            state, data = optimizer.state[p], shares.data[name].contiguous()
            average = state.get("data_average") if decay else None
            own = new[name] = {"draws": draws + 1}
            held.append(data)
            share, address = alpha, 0
            if average is not None:
                if average.dtype != dtype or not average.is_contiguous():
                    return None
                held.append(average)
                address = average.data_ptr()
            if decay:
                weight = 0.0 if average is None else state["data_weight"]
                weight += (1 - decay) * (1 - weight)
                own["data_average"], own["data_weight"] = data, weight
                share /= weight
            if data.dtype != dtype:
                return None
            places.append((data.data_ptr(), address))
            numbers.append((decay, share))
        self._tensors[:, : data_refresh.KAPPA] = places
        self._numbers[:] = numbers
        return new

    def _read(self, path: dict[str, Tensor | Outer]) -> bool:
        """Take the paths' terms, which may lie at the same place at the next time; False if the loops cannot."""
        self._path, self._ends = {}, list[list[Tensor]]()
        for row, name, p in zip(self._tensors, self._names, self._parameters, strict=True):
            row[data_refresh.FORM], parts = _form(path.get(name))
            if any(t.dtype != p.dtype for t in parts):
                return False
            for column, t in zip((data_refresh.FIRST, data_refresh.SECOND), parts, strict=False):
                row[column] = t.data_ptr()
            self._ends.append(parts)
        self._path = path
        return True


def _form(path: Tensor | Outer | None) -> tuple[int, list[Tensor]]:
    """The form of a path, and its tensors in order."""
    if path is None:
        return data_refresh.NOTHING, []
    if isinstance(path, Tensor):
        return data_refresh.DENSE, [path.contiguous()]
    rows, columns = path.rows.contiguous(), path.columns
    if columns.stride(0) == 0:
        return data_refresh.ONE_COLUMN, [rows, columns[:1]]
    return data_refresh.OUTER, [rows, columns.contiguous()]
