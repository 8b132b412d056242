"""The data-dependent metric with the column of the bias, as an optimizer keeps it (O13: Ollivier 2013/2015).

    M'_ii = (f_i^2 M_ii + damping m) / c,   M'_0i = f_0 f_i M_0i / c       (see ``quasi_diagonal``)

m is the mean of f^2 M over the parameter, and c one number for all parameters, the mean of theirs, because the rule
mixes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.data_dependent import DataDependent
from pathspace.metrics.quasi_diagonal import biases
from pathspace.paths.kernel.safe_type import Surveyed


class DataDependentWithBias(DataDependent):
    """The metric of :class:`pathspace.optim.QuasiDiagonal`; options as for :class:`DataDependent`, alpha > 0."""

    pairs = staticmethod(biases)

    def _refresh(self, names: list[str]) -> None:
        """All of them, be there a gradient or not: M_0i of one time and M_00 of another make no metric."""
        for state in self.state.values():
            state.pop("bias", None)  # without kappa there are no products
        super()._refresh([n for n in self.network.parameters if n in names or n in self.state])

    def _paired(self, name: str, bias: str, cross: Tensor) -> dict[str, Any]:
        if "gauge_rows" not in self.state.get(bias, {}):
            return {}
        balanced = self.gauge(name).times(cross.clone(memory_format=torch.contiguous_format), 1)
        assert isinstance(balanced, Tensor)
        rows = self.gauge(bias).rows.to(cross.dtype)
        flat = balanced.view(balanced.shape[0], -1).mul_(rows)
        # a state cannot hold strings
        return {"bias": list(self.network.parameters).index(bias), "cross": flat.view(cross.shape)}

    def _set_normalizers(self, kappa: Surveyed, new: Sequence[str]) -> None:
        super()._set_normalizers(kappa, new)
        sizes = [self.network.parameters[name].numel() for name in kappa.values]
        states = [self.state[name] for name in kappa.values]
        sums = (0 if s["empty"] else s["normalizer"] * n for s, n in zip(states, sizes, strict=True))
        c = sum(sums) / max(1, sum(sizes))
        for state in states:
            state["normalizer"] = c or 1.0

    def cross(self, name: str) -> tuple[str, Tensor] | None:
        """The bias of the units that a weight enters, and M'_0i of the weight's shape; None without one."""
        state = self.state[name]
        if "bias" not in state:
            return None
        bias = list(self.network.parameters)[state["bias"]]
        return bias, torch.div(state["cross"], state["normalizer"])
