"""Steps between two computations of kappa, which have little to do but to find what they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from pathspace.optim.base.same_states import SameStates, States
from pathspace.squared.squares import Outer

if TYPE_CHECKING:
    from pathspace.optim.base.metric_state import Metric


class Stale:
    """The metrics that states keep, found once for all steps until the next are due.

    Args:
        every: all states of the optimizer.
        states: those of the parameters of the network.
        metrics: what they keep.
    """

    def __init__(
        self, every: States, states: dict[Tensor, dict[str, Any]], metrics: dict[Tensor, Metric]
    ) -> None:
        self._every, self.states, self.metrics = SameStates(every), states, metrics
        self._pairs = [(state, metrics[p]) for p, state in states.items()]
        self._parameters = [id(p) for p in states]

    def holds(self, every: States, parameters: list[int], refresh_every: int) -> bool:
        """Whether all is as it was, and no metric is due.

        Args:
            every: all states of the optimizer.
            parameters: identities of the parameters of the network that take the step.
            refresh_every: age at which metrics are due.
        """
        return (
            self._every.are(every)
            and parameters == self._parameters
            and all(state.get("age", 0) % refresh_every and _keeps(state, m) for state, m in self._pairs)
        )

    def grow_older(self) -> None:
        """Count a step."""
        for state, _ in self._pairs:
            state["age"] += 1


def _keeps(state: dict[str, Any], metric: Metric) -> bool:
    """Whether a state still keeps a metric."""
    values = metric.values
    if isinstance(values, Outer):
        same = state.get("kappa_rows") is values.rows and state.get("kappa_columns") is values.columns
    else:
        same = state.get("kappa") is values and "kappa_rows" not in state
    return same and state["normalizer"] == metric.normalizer
