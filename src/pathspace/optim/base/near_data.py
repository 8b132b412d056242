"""The data-dependent metric of networks that are far from balance, in the member in which they step.

The batch runs through a copy of the model with the weights of that member (see ``near_member``), where it meets the
same numbers, but for powers of two, as in any member that the type holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pathspace.optim.base.data_metric import DataMetric
from pathspace.optim.base.data_shares import Prepared
from pathspace.paths.data.chain_shares import ChainShares
from pathspace.paths.data.data_dependent import Shares, in_float64
from pathspace.replay.chain import ChainPass
from pathspace.replay.replay import Replay, replay


class NearbyDataMetric(DataMetric):
    """Mixed into an optimizer in kappa's geometry as :class:`DataMetric` is; far networks step near balance."""

    steps_nearby = True

    @property
    def _values(self) -> Mapping[str, Tensor] | None:
        """The weights of the member in which this step is taken; None for the model's own."""
        return None if self._near is None else self._near.parameters

    def _is_due(self) -> bool:
        # what a far network's own call shows belongs to another member than the step
        states = (self.state.get(p, {}) for group in self.param_groups for p in group["params"])
        return super()._is_due() and not any("scales" in state for state in states)

    def _replayed(self) -> Replay:
        self._latest.prepared = None  # of the model's own weights
        return replay(self.network, self._batch(), parameters=self._values)

    def _prepared_chain(self) -> Prepared | None:
        if self._near is None:
            return super()._prepared_chain()
        if (
            self._layers is None
            or not self._is_for_chains()
            or self._latest.inputs is None
            or self._is_wide()
        ):
            return None
        seen = ChainPass.of(self._replayed(), self._layers, self._summary_of())
        prepared = None if seen is None else self._prepare(seen)
        return prepared if prepared is not None and isinstance(prepared.shares, ChainShares) else None

    def _shares_found(self, names: Sequence[str], draws: int) -> Shares:
        if self._near is None:
            return super()._shares_found(names, draws)
        return self._shares(self._replayed(), names, draws)

    def _shares_in_float64(self, names: Sequence[str], draws: int) -> Shares:
        return self._shares(in_float64(self.network, self._batch(), self._values), names, draws, {})
