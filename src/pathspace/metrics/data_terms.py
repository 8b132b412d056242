"""Where the two terms of the data-dependent kappa come from: one more pass over the batch that the model has seen.

Letters: kappa = path + alpha data (see ``paths.data.data_dependent``).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from pathspace.metrics.checks import check_names, check_numbers
from pathspace.metrics.path import Form, MetricOptions, Path
from pathspace.metrics.replicas import rank_and_size
from pathspace.network import Network
from pathspace.paths.data.chain_terms import chain_terms
from pathspace.paths.data.data_dependent import (
    EXACT_UNITS,
    Estimator,
    KappaTerms,
    Request,
    check_estimation,
    in_float64,
    kappa_terms,
)
from pathspace.paths.data.edge_statistics import Sharing
from pathspace.paths.data.node_measure import Statistic, check_options, spread_of
from pathspace.replay.arguments import Arguments, first_examples
from pathspace.replay.chain import Cell, Chain, chain_of, chain_pass
from pathspace.replay.latest_batch import LatestBatch
from pathspace.replay.replay import Replay, replay

AVERAGED = 0.9
"""The decay of the average over refreshes for random signs, if nothing else is asked for."""
_ENOUGH = 10  # draws in the average, before a part of a batch is enough for the next


class DataOptions(MetricOptions, total=False):
    """The options of :class:`pathspace.metrics.DataDependent`, as the named optimizers take them."""

    statistic: Statistic
    sharing: Sharing
    estimator: Estimator
    averaging: float | None
    seed: int
    examples: float | None
    watch: bool
    process_group: Any


class DataTerms(Path):
    """Base of :class:`pathspace.metrics.DataDependent`: the batch, and what it adds to kappa."""

    pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    """Finds the parameters whose products with another one are wanted too."""

    def __init__(
        self,
        alpha: float = 0.5,
        statistic: Statistic = "second_moment",
        *,
        sharing: Sharing = "parameters",
        estimator: Estimator = "auto",
        averaging: float | None = None,
        seed: int = 0,
        examples: float | None = None,
        watch: bool = True,
        process_group: Any = "default",
        **options: Unpack[MetricOptions],
    ) -> None:
        check_names(self, options, MetricOptions.__annotations__)
        super().__init__(**options)
        check_options(alpha, statistic)
        check_estimation(sharing, estimator, averaging, examples)
        check_numbers(seed=seed)
        self.alpha, self.averaging, self.seed = alpha, averaging, int(seed)
        self.statistic: Statistic = statistic
        self.sharing: Sharing = sharing
        self.estimator: Estimator = estimator
        self.examples, self.process_group, self._watch = examples, process_group, watch
        self._source: torch.Generator | None = None
        self._latest: LatestBatch | None = None

    def bind(self, network: Network, names: Sequence[str], form: Form) -> None:
        """Let an optimizer ask for the metric of some parameters; see :meth:`Path.bind`."""
        super().bind(network, names, form)
        if self._latest is None:
            self._chain = chain_of(network)
            self._latest = LatestBatch(network, look=self._watch and self.alpha > 0)

    @property
    def takes_parts(self) -> bool:
        """Whether parameters may be split over processes: the pass over data needs a model that is whole."""
        return False

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self._batches.give(args, kwargs)

    def close(self) -> None:
        """Remove the hook by which the metric sees batches; from then on they come by :meth:`observe` alone."""
        self._batches.remove()

    @property
    def _batches(self) -> LatestBatch:
        if self._latest is None:
            raise RuntimeError(f"{type(self).__name__} belongs to no network yet: give it to an optimizer")
        return self._latest

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name == "process_group":
            return value
        if name == "_source":
            return None
        if name == "_latest" and value is not None:
            network = copy.deepcopy(self.network, memo)
            # of a model that has the optimizer as an attribute, and is copied up to here
            for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                vars(network.model)[hooks] = copy.deepcopy(vars(self.network.model)[hooks], memo)
            return LatestBatch(network, look=value.looks)
        return super()._copied(name, value, memo)

    def _short_chain(self) -> Chain | None:
        """The chain that the network is, if ``chain_terms`` finds what is wanted: random signs, no other products."""
        chain = self._chain
        if chain is None:
            return None
        units = self._units(chain.readout) * (chain.steps if chain.every else 1)
        if self.alpha < 1:
            units += chain.steps * sum(map(self._units, chain.cells))
        signs = self.estimator == "signs" or (self.estimator == "auto" and units > EXACT_UNITS)
        return chain if signs and self.pairs is None else None

    def _units(self, cell: Cell) -> int:
        return len(self.network.parameters[cell.weight])

    # -- the terms --------------------------------------------------------------------------------------------

    def _batch(self) -> Arguments:
        if self._batches.inputs is None:
            raise RuntimeError(
                "the optimizer's metric has seen no batch: call the model with gradients enabled before step(), or "
                "give the batch with observe(inputs), as is needed where torch.compile had compiled the model's code "
                "before the optimizer was made"
            )
        return first_examples(self.network, self._batches.inputs, self.examples)

    def _terms(self, names: Sequence[str], draws: int) -> KappaTerms:
        """The terms of kappa; they may be overwritten."""
        batch, near, chain = self._batch(), self.near_parameters(), self._short_chain()
        if chain is not None:
            summary = functools.partial(spread_of, statistic=self.statistic)
            seen = chain_pass(self.network, chain, batch, summary, near)
            if seen is not None:
                return chain_terms(seen, self._request(draws), self._generator(draws), names, self._memory)
        return self._from_replay(replay(self.network, batch, parameters=near), names, draws)

    def _in_float64(self, names: Sequence[str], draws: int) -> KappaTerms:
        return self._from_replay(
            in_float64(self.network, self._batch(), self.near_parameters()), names, draws, {}
        )

    def _from_replay(
        self, seen: Replay, names: Sequence[str], draws: int, memory: dict[str, Tensor] | None = None
    ) -> KappaTerms:
        memory = self._memory if memory is None else memory
        return kappa_terms(self.network, seen, self._request(draws), self._generator(draws), names, memory)

    def _request(self, draws: int) -> Request:
        # an example that is left out may be the only one that uses a weight: the average has to know it
        decay = AVERAGED if self.averaging is None else self.averaging
        part = draws >= _ENOUGH and decay >= AVERAGED
        place = rank_and_size(self.process_group)
        return Request(self.alpha, self.statistic, self.sharing, self.estimator, self.pairs, part, place)

    def _draws(self, names: Iterable[str] | Mapping[str, Any]) -> int:
        """How often signs were drawn."""
        return max((self.state[name].get("draws", 0) for name in names if name in self.state), default=0)

    def _is_wide(self) -> bool:
        """Whether kappa once needed a wider type than the parameters have; it is computed in float64 from then on."""
        averages = (state.get("data_average") for state in self.state.values())
        wide = any(average is not None and average.dtype == torch.float64 for average in averages)
        return wide and all(p.dtype != torch.float64 for p in self.network.parameters.values())

    def _generator(self, draws: int) -> torch.Generator:
        """What draws the signs of a refresh."""
        device = next(iter(self.network.parameters.values())).device
        # a seed has 32 bits on a CPU; an odd factor takes those of different runs far apart
        far = self.seed * 2654435761
        if self._source is None or self._source.device != device:
            self._source = torch.Generator(device)
        return self._source.manual_seed((far + draws) % 2**32)
