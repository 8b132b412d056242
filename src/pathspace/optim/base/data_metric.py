"""The data-dependent kappa as the metric of an optimizer: its average over draws, its type and its bounds.

Letters: kappa = path + alpha data (see ``paths.data_dependent``); a the decay of the average of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.optim.base.chain_refresh import ChainRefresh
from pathspace.optim.base.data_average import AVERAGED, averaged
from pathspace.optim.base.data_shares import DataShares, Prepared
from pathspace.optim.base.replicas import mean_over_replicas, rank_and_size
from pathspace.paths.data.chain_shares import ChainShares
from pathspace.paths.data.data_dependent import Shares, check_finite, fits
from pathspace.paths.kernel.safe_type import Measure, Surveyed, survey
from pathspace.replay.chain import ChainPass
from pathspace.replay.replay import replay
from pathspace.squared.squares import dense, memory_for


class DataMetric(DataShares):
    """Mixed into an optimizer in kappa's geometry, it puts the data-dependent kappa in the place of kappa."""

    steps_nearby = False  # its data runs through the model as it is

    def _start(self, **options: Any) -> None:
        super()._start(**options)
        self._chain_refresh = ChainRefresh()

    def _warn_of_unreached(self, names: Iterable[str]) -> None:
        if self.alpha == 0:  # data leave zeros of their own
            super()._warn_of_unreached(names)

    def _surveyed(self, names: dict[Tensor, str]) -> tuple[Surveyed, list[float]]:
        prepared = self._prepared_chain() if self.alpha > 0 else None
        found = None if prepared is None else self._surveyed_chain(prepared, names)
        return super()._surveyed(names) if found is None else found

    def _prepared_chain(self) -> Prepared | None:
        """What was found of a chain while the model ran, or is found by running it once more."""
        prepared, draws = self._latest.prepared, self._draws(self.network.parameters)
        if prepared is None or not self._is_current(prepared, draws):
            prepared, layers = None, self._layers
            if layers is None or self._latest.inputs is None or self._is_wide():
                return None
            if self._is_for_chains():
                seen = ChainPass.of(replay(self.network, self._batch()), layers, self._summary_of())
                prepared = self._latest.prepared = None if seen is None else self._prepare(seen)
        return prepared if prepared is not None and isinstance(prepared.shares, ChainShares) else None

    def _surveyed_chain(
        self, prepared: Prepared, names: dict[Tensor, str]
    ) -> tuple[Surveyed, list[float]] | None:
        """All parameters of a chain at once, if that is all there is to it."""
        assert isinstance(prepared.shares, ChainShares)
        own = list(names.values())
        if rank_and_size(self.process_group)[1] > 1:
            return None
        states = {name: self.state[p] for p, name in names.items()}
        gauges = {name: self._gauges[p] for p, name in names.items()}
        decay = AVERAGED if self.averaging is None else self.averaging
        made = self._chain_refresh.refreshed(prepared.shares, states, gauges, self.alpha, decay, self._memory)
        if made is None:
            return None
        self._latest.prepared = None  # its data is no more
        found, means, kept, sure = made
        types = {name: value.dtype for name, value in found.values.items()}
        if not (self._moderate(found) and (sure or fits(found, types, self._request(prepared.draws)))):
            return None
        for name, new in kept.items():
            self.keep_average(name, new)
        return found, [means[name] for name in own]

    def _kappa(self, names: Sequence[str], measure: Measure) -> Surveyed:
        if self.alpha == 0:
            return super()._kappa(names, measure)
        if self._latest.inputs is None:
            raise RuntimeError(
                f"{type(self).__name__} has seen no batch: call the model with gradients enabled before step(), or "
                "give the batch with observe(inputs), as is needed where torch.compile had compiled the model's code "
                "before the optimizer was made"
            )
        draws = self._draws(names)
        if self._is_wide():
            self._latest.prepared = None
            found, kept = self._refreshed(names, draws, self._shares_in_float64(names, draws), measure)
        else:
            shares = self._shares_found(names, draws)
            found, kept = self._refreshed(names, draws, shares, measure)
            types = {name: found.values[name].dtype for name in names}
            if not (self._moderate(found) and fits(found, types, self._request(draws))):
                wide = self._shares_in_float64(names, draws)
                found, kept = self._refreshed(names, draws, wide, measure)
                check_finite(found)
                if self._moderate(found) and fits(found, types, self._request(draws)):
                    found = survey(
                        {name: dense(k).to(types[name]) for name, k in found.values.items()}, measure
                    )
        check_finite(found)
        for name, new in kept.items():
            self.keep_average(name, new)
        for name, ((low, _),) in found.bounds.items():
            if low < 0:  # rounding
                found.bounds[name] = ((0.0, found.largest(name)),)
                dense(found.values[name]).clamp_min_(0)
        return found

    def _shares_found(self, names: Sequence[str], draws: int) -> Shares:
        """The terms of kappa, from the model's own call if that showed them; they may be overwritten."""
        prepared = self._latest.prepared
        self._latest.prepared = None
        if isinstance(prepared, Prepared) and self._is_current(prepared, draws):
            shares = prepared.shares
            shares = shares.by_name() if isinstance(shares, ChainShares) else shares
            if all(name in shares.data for name in names):
                return shares
        return self._shares(replay(self.network, self._batch()), names, draws)

    def _refreshed(
        self, names: Sequence[str], draws: int, shares: Shares, measure: Measure
    ) -> tuple[Surveyed, dict[str, dict[str, Any]]]:
        """Kappa with the data's averages, and what the states are to keep if it is good."""
        shares = mean_over_replicas(shares, self.process_group)
        order = {name: i for i, name in enumerate(self.network.parameters)}  # a state cannot hold strings
        decay = self.decay_of(shares)
        kappa, kept = {}, {}
        for name in names:
            state = self.state[self.network.parameters[name]]
            new = kept[name] = {"draws": draws + 1}
            data, weight = averaged(state, new, "data", shares.data[name], decay)
            out = memory_for(data, self._memory, f"{name}, kappa") if data.dim() == 2 else None
            kappa[name] = shares.kappa(name, data, self.alpha / weight, out)
            if name in shares.cross:
                cross, weight = averaged(state, new, "cross", shares.cross[name], decay)
                new |= {"bias": order[shares.bias_of[name]], "cross": cross * (self.alpha / weight)}
        return survey(dict(kappa), measure), kept

    def decay_of(self, shares: Shares) -> float:
        """The decay of the average of data."""
        return (AVERAGED if shares.drawn else 0.0) if self.averaging is None else self.averaging

    def keep_average(self, name: str, new: dict[str, Any]) -> None:
        """Put new averages in a state; the memory of the old one is that of the next statistic."""
        state, place = self.state[self.network.parameters[name]], f"{name}, data"
        average, memory = new.get("data_average"), self._memory.get(place)
        if average is not None and memory is not None and memory.data_ptr() == average.data_ptr():
            before = state.get("data_average")
            if before is None:
                del self._memory[place]
            else:
                self._memory[place] = before
        state.update(new)

    def _moderate(self, found: Surveyed) -> bool:
        """Whether the means of kappa, which rescaling does not change, are far from the ends of float32."""
        return found.moderate or all(value.dtype == torch.float64 for value in found.values.values())
