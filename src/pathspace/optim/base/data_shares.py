"""The terms of the data-dependent kappa for an optimizer, and where its data comes from.

They are found at the end of the model's own call, or by running the model once more on the batch that it saw.

Letters: kappa = path + alpha data (see ``paths.data_dependent``).
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
from pathspace.optim.base.data_average import AVERAGED
from pathspace.optim.base.path_optimizer import PathOptimizer
from pathspace.optim.base.replicas import rank_and_size
from pathspace.paths.data.chain_shares import ChainShares, chain_shares
from pathspace.paths.data.data_dependent import (
    EXACT_UNITS,
    Estimator,
    Request,
    Shares,
    check_estimation,
    in_float64,
    kappa_shares,
)
from pathspace.paths.data.edge_statistics import Sharing
from pathspace.paths.data.node_measure import Statistic, check_options, spread_of
from pathspace.paths.data.recurrent_shares import recurrent_shares
from pathspace.replay.arguments import Arguments, first_examples, how_many
from pathspace.replay.chain import ChainPass, ChainWitness, Layer, layers_of
from pathspace.replay.follower import Summary
from pathspace.replay.latest_batch import Found, LatestBatch, Short
from pathspace.replay.recurrent_chain import Cell, RecurrentPass, RecurrentWitness, recurrent_chain_of
from pathspace.replay.replay import Replay

_ENOUGH = 10  # draws in the average, before a part of a batch is enough for the next


@dataclass(frozen=True)
class Prepared:
    """The terms of kappa found while the model ran, and what they hold for."""

    shares: Shares | ChainShares
    draws: int
    versions: tuple[tuple[int, int], ...]


class DataShares(PathOptimizer):
    """Base of :class:`DataMetric`: the batch, and what it adds to kappa."""

    network: Network
    alpha: float
    statistic: Statistic
    sharing: Sharing
    estimator: Estimator

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
        self._layers = layers_of(self.network)
        self._source: torch.Generator | None = None
        self._recurrent = recurrent_chain_of(self.network) if self._layers is None else None
        self._latest = self._watched_by(self, self.network, look=watch and alpha > 0)

    def _watched_by(self, owner: DataShares, network: Network, *, look: bool) -> LatestBatch:
        """What looks at the calls of a model, for this optimizer or for a copy of it."""
        short: Short | None = None
        if self._layers is not None and self._is_for_chains():
            own = self._summary_of()
            short = functools.partial(ChainWitness, network, self._layers, own)
        elif self._recurrent is not None and self._is_for_recurrent_chains():
            short = functools.partial(RecurrentWitness, network, self._recurrent)
        hooks = owner._is_due, owner._how_many, owner._prepare
        return LatestBatch(network, *hooks, self._summary_of(), short, look=look)

    def _summary_of(self) -> Summary:
        """What is wanted of the values of a node."""
        return functools.partial(spread_of, statistic=self.statistic)

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

    # -- the two terms ---------------------------------------------------------------------------------------

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
        decay = AVERAGED if self.averaging is None else self.averaging
        part = draws >= _ENOUGH and decay >= AVERAGED
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

    def _is_current(self, prepared: Prepared, draws: int) -> bool:
        return prepared.draws == draws and prepared.versions == self._versions()

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
            shares = chain_shares(found, self._request(draws), self._generator(draws), self._memory)
        elif isinstance(found, RecurrentPass):
            if not self._is_for_recurrent_chains():
                return None
            request, names = self._request(draws), self._own_names()
            shares = recurrent_shares(found, request, self._generator(draws), names, self._memory)
        else:
            shares = self._shares(found, self._own_names(), draws)
        return Prepared(shares, draws, self._versions())

    _pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    """Finds the parameters whose products with another one are wanted too."""
