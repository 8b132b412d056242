"""The data-dependent kappa as the metric of an optimizer: where its data comes from, and its average over draws.

Letters: kappa = path + alpha data (see ``paths.data_dependent``); a the decay of the average of data.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.arguments import Arguments, first_examples, how_many
from pathspace.network.chain import ChainPass, ChainWitness, Layer, layers_of
from pathspace.network.follower import Summary
from pathspace.network.recurrent_chain import Cell, RecurrentPass, RecurrentWitness, recurrent_chain_of
from pathspace.network.replay import Replay, replay
from pathspace.network.squares import dense, memory_for
from pathspace.optim.chain_refresh import ChainRefresh
from pathspace.optim.compiled import data_plan_of
from pathspace.optim.data_average import averaged
from pathspace.optim.latest_batch import Found, LatestBatch, Short
from pathspace.optim.path_optimizer import PathOptimizer
from pathspace.optim.replicas import mean_over_replicas, rank_and_size
from pathspace.paths.chain_shares import ChainShares, chain_shares
from pathspace.paths.data_dependent import (
    EXACT_UNITS,
    Estimator,
    Request,
    Shares,
    check_estimation,
    check_finite,
    fits,
    in_float64,
    kappa_shares,
)
from pathspace.paths.edge_statistics import Sharing
from pathspace.paths.node_measure import Statistic, check_options, spread_of
from pathspace.paths.recurrent_shares import recurrent_shares
from pathspace.paths.safe_type import Measure, Surveyed, survey

_AVERAGED = 0.9  # for random signs, if nothing else is asked for
_ENOUGH = 10  # draws in the average, before a part of a batch is enough for the next


@dataclass(frozen=True)
class Prepared:
    """The terms of kappa found while the model ran, and what they hold for."""

    shares: Shares | ChainShares
    draws: int
    versions: tuple[tuple[int, int], ...]


class DataMetric(PathOptimizer):
    """Mixed into an optimizer in kappa's geometry, it puts the data-dependent kappa in the place of kappa."""

    network: Network
    alpha: float
    statistic: Statistic
    sharing: Sharing
    estimator: Estimator
    steps_nearby = False  # its data runs through the model as it is

    def _start(
        self,
        *,
        alpha: float,
        statistic: Statistic,
        sharing: Sharing,
        estimator: Estimator,
        averaging: float | None,
        seed: int,
        examples: float | None,
        watch: bool,
        process_group: Any,
    ) -> None:
        check_options(alpha, statistic)
        check_estimation(sharing, estimator, averaging, examples)
        self.examples, self.process_group = examples, process_group
        self.alpha, self.statistic, self.sharing = alpha, statistic, sharing
        self.estimator, self.averaging, self.seed = estimator, averaging, seed
        self._layers, self._chain_refresh = layers_of(self.network), ChainRefresh()
        self._source: torch.Generator | None = None
        self._recurrent = recurrent_chain_of(self.network) if self._layers is None else None
        self._latest = self._watched_by(self, self.network, look=watch and alpha > 0)

    def _watched_by(self, owner: DataMetric, network: Network, *, look: bool) -> LatestBatch:
        """What looks at the calls of a model, for this optimizer or for a copy of it."""
        short: Short | None = None
        if self._layers is not None and self._is_for_chains():
            own = self._summary_of(len(self._layers))  # the memory of one call
            short = functools.partial(ChainWitness, network, self._layers, own)
        elif self._recurrent is not None and self._is_for_recurrent_chains():
            short = functools.partial(RecurrentWitness, network, self._recurrent)
        hooks = owner._is_due, owner._how_many, owner._prepare
        return LatestBatch(network, *hooks, self._summary_of(), short, look=look)

    def _summary_of(self, count: int | None = None) -> Summary:
        """What is wanted of the values of a node; of so many the results are kept, None: of all."""
        compiled = getattr(self._plan, "summaries", None)
        if compiled is None:
            return functools.partial(spread_of, statistic=self.statistic)
        return compiled(self.statistic, count)

    def _is_for_chains(self) -> bool:
        """Whether ``chain_shares`` finds what is wanted: random signs, no products of parameters."""
        layers = self._layers
        if layers is None or self.sharing != "parameters":
            return False
        return self._draws_signs(sum(map(self._units, layers[-1:] if self.alpha == 1 else layers)))

    def _is_for_recurrent_chains(self) -> bool:
        """Whether ``recurrent_shares`` finds it."""
        chain = self._recurrent
        if chain is None:
            return False
        units = self._units(chain.readout) * (chain.steps if chain.every else 1)
        if self.alpha < 1:
            units += chain.steps * sum(map(self._units, chain.cells))
        return self._draws_signs(units)

    def _units(self, layer: Layer | Cell) -> int:
        return len(self.network.parameters[layer.weight])

    def _draws_signs(self, units: int) -> bool:
        signs = self.estimator == "signs" or (self.estimator == "auto" and units > EXACT_UNITS)
        return signs and self._pairs is None

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self._latest.give(args, kwargs)

    def close(self) -> None:
        """Remove the hook by which the optimizer sees batches; from then on they come by :meth:`observe` alone."""
        self._latest.remove()

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name == "process_group":
            return value
        if name == "_source":
            return None
        if name != "_latest":
            return super()._copied(name, value, memo)
        return self._watched_by(memo[id(self)], copy.deepcopy(self.network, memo), look=value.looks)

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
        decay = _AVERAGED if self.averaging is None else self.averaging
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

    def _is_current(self, prepared: Prepared, draws: int) -> bool:
        return prepared.draws == draws and prepared.versions == self._versions()

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

    # -- for compiled loops ---------------------------------------------------------------------------------------

    def _compiled_kappa(self) -> tuple[Any, str]:
        return data_plan_of(self) if self.alpha > 0 else super()._compiled_kappa()

    def shares_at_hand(self, names: Sequence[str]) -> tuple[Shares, int] | None:
        """The terms of kappa, to be overwritten, and how often signs were drawn; None where others must look."""
        one = rank_and_size(self.process_group)[1] == 1
        if self.alpha == 0 or self._latest.inputs is None or self._is_wide() or not one:
            return None
        draws = self._draws(names)
        return self._shares_found(names, draws), draws

    def decay_of(self, shares: Shares) -> float:
        """The decay of the average of data."""
        return (_AVERAGED if shares.drawn else 0.0) if self.averaging is None else self.averaging

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

    def _is_wide(self) -> bool:
        """Whether kappa once needed a wider type than the parameters have; it is computed in float64 from then on."""
        states = self.state
        for p in self.network.parameters.values():
            state = states.get(p)
            average = None if state is None else state.get("data_average")
            if average is not None and average.dtype == torch.float64:
                return all(q.dtype != torch.float64 for q in self.network.parameters.values())
        return False

    def _batch(self) -> Arguments:
        assert self._latest.inputs is not None
        return first_examples(self.network, self._latest.inputs, self.examples)

    def _draws(self, names: Iterable[str]) -> int:
        """How often signs were drawn."""
        states, parameters, most = self.state, self.network.parameters, 0
        for name in names:
            state = states.get(parameters[name])
            most = most if state is None else max(most, state.get("draws", 0))
        return most

    def _shares_in_float64(self, names: Sequence[str], draws: int) -> Shares:
        return self._shares(in_float64(self.network, self._batch()), names, draws, {})

    def _request(self, draws: int) -> Request:
        # an example that is left out may be the only one that uses a weight: the average has to know it
        decay = _AVERAGED if self.averaging is None else self.averaging
        part = draws >= _ENOUGH and decay >= _AVERAGED
        return Request(self.alpha, self.statistic, self.sharing, self.estimator, self._pairs, part)

    def _shares(
        self, found: Replay, names: Sequence[str], draws: int, memory: dict[str, Tensor] | None = None
    ) -> Shares:
        generator, memory = self._generator(draws), self._memory if memory is None else memory
        return kappa_shares(self.network, found, self._request(draws), generator, names, memory)

    def _generator(self, draws: int) -> torch.Generator:
        """What draws the signs of a refresh."""
        device = next(iter(self.network.parameters.values())).device
        # a seed has 32 bits on a CPU; odd factors take those of different runs, and of replicas, far apart
        far = self.seed * 2654435761 + rank_and_size(self.process_group)[0] * 2246822519
        if self._source is None or self._source.device != device:
            self._source = torch.Generator(device)
        return self._source.manual_seed((far + draws) % 2**32)

    # -- the model's own call -------------------------------------------------------------------------------------

    def _own_names(self) -> list[str]:
        known = self.network.names_by_id
        given = (p for group in self.param_groups for p in group["params"])
        return [known[id(p)] for p in given if id(p) in known]

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """What changes when a parameter of the network does."""
        return tuple((p._version, p.data_ptr()) for p in self.network.parameters.values())

    def _is_between(self) -> bool:
        """Whether the next step is known to need no new metric."""
        return False

    def _is_due(self) -> bool:
        """Whether the next step will need a new metric."""
        if self._is_between():
            return False
        every, states = self.refresh_every, self.state
        for group in self.param_groups:
            for p in group["params"]:
                state = states.get(p)
                if state is None or state.get("age", 0) % every == 0:
                    return not self._is_wide()
        return False

    def _how_many(self, count: int) -> int:
        """How many of so many examples the metric looks at."""
        return how_many(count, self.examples)

    def _prepare(self, found: Found) -> Prepared | None:
        """Compute the metric from what the model's own call showed."""
        draws = self._draws(self.network.parameters)
        shares: Shares | ChainShares
        if isinstance(found, ChainPass):
            if not self._is_for_chains():
                return None  # an option was changed
            compute = getattr(self._plan, "chain_shares", chain_shares)
            shares = compute(found, self._request(draws), self._generator(draws), self._memory)
        elif isinstance(found, RecurrentPass):
            if not self._is_for_recurrent_chains():
                return None
            compute = getattr(self._plan, "recurrent_shares", recurrent_shares)
            request, names = self._request(draws), self._own_names()
            shares = compute(found, request, self._generator(draws), names, self._memory)
        else:
            shares = self._shares(found, self._own_names(), draws)
        return Prepared(shares, draws, self._versions())

    _pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    """Finds the parameters whose products with another one are wanted too."""
