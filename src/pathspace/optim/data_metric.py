"""The data-dependent kappa as the metric of an optimizer: where its data comes from, and its average over draws.

Letters: kappa = path + alpha data (see ``paths.data_dependent``); a the decay of the average of data.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.arguments import Arguments, first_examples
from pathspace.network.replay import Replay, replay
from pathspace.network.squares import memory_for
from pathspace.optim.latest_batch import LatestBatch
from pathspace.optim.moments import in_type
from pathspace.optim.path_optimizer import PathOptimizer
from pathspace.paths.data_dependent import Estimator, Request, Shares, kappa_shares
from pathspace.paths.edge_statistics import Sharing
from pathspace.paths.node_measure import Statistic, check_options, spread_of
from pathspace.paths.safe_type import Measure, Surveyed, survey

_AVERAGED = 0.9  # for random signs, if nothing else is asked for


@dataclass(frozen=True)
class Prepared:
    """The terms of kappa found while the model ran, and what they hold for."""

    shares: Shares
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
    ) -> None:
        check_options(alpha, statistic)
        if sharing not in ("parameters", "edges"):
            raise ValueError(f"sharing must be 'parameters' or 'edges', got {sharing!r}")
        if estimator not in ("exact", "signs", "auto"):
            raise ValueError(f"estimator must be 'exact', 'signs' or 'auto', got {estimator!r}")
        if averaging is not None and not 0 <= averaging < 1:
            raise ValueError(f"averaging must be None or in [0, 1), got {averaging}")
        if examples is not None and not (examples > 0 if examples < 1 else examples % 1 == 0):
            raise ValueError(f"examples must be None, a number of them or a share below 1, got {examples}")
        self.examples = examples
        self.alpha, self.statistic, self.sharing = alpha, statistic, sharing
        self.estimator, self.averaging, self.seed = estimator, averaging, seed
        self._latest = self._watched_by(self, self.network, look=watch and alpha > 0)

    def _watched_by(self, owner: DataMetric, network: Network, *, look: bool) -> LatestBatch:
        """What looks at the calls of a model, for this optimizer or for a copy of it."""
        summary = functools.partial(spread_of, statistic=self.statistic)
        return LatestBatch(network, owner._is_due, owner._prepare, summary, look=look)

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self._latest.give(Arguments(args, kwargs))

    def close(self) -> None:
        """Remove the hook by which the optimizer sees batches; from then on they come by :meth:`observe` alone."""
        self._latest.remove()

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name != "_latest":
            return super()._copied(name, value, memo)
        return self._watched_by(memo[id(self)], copy.deepcopy(self.network, memo), look=value.looks)

    def _kappa(self, names: Sequence[str], measure: Measure) -> Surveyed:
        if self.alpha == 0:
            return super()._kappa(names, measure)
        if self._latest.inputs is None:
            raise RuntimeError(
                f"{type(self).__name__} has seen no batch: call the model with gradients enabled before step(), or "
                "give the batch with observe(inputs)"
            )
        states = {name: self.state[self.network.parameters[name]] for name in names}
        draws = self._draws(names)
        prepared, self._latest.prepared = self._latest.prepared, None
        if (
            isinstance(prepared, Prepared)
            and (prepared.draws, prepared.versions) == (draws, self._versions())
            and all(name in prepared.shares.data for name in names)
        ):
            shares = prepared.shares
        else:
            inputs = first_examples(self.network, self._latest.inputs, self.examples)
            shares = self._shares(replay(self.network, inputs), names, draws)
        order = {name: i for i, name in enumerate(self.network.parameters)}  # a state cannot hold strings
        decay = (_AVERAGED if shares.drawn else 0.0) if self.averaging is None else self.averaging
        kappa = {}
        for name, state in states.items():
            state["draws"] = draws + 1
            data, weight = _averaged(state, "data", shares.data[name], decay)
            out = memory_for(data, self._memory, f"{name}, kappa") if data.dim() == 2 else None
            kappa[name] = shares.kappa(name, data, self.alpha / weight, out)
            if name in shares.cross:
                cross, weight = _averaged(state, "cross", shares.cross[name], decay)
                state["bias"], state["cross"] = order[shares.bias_of[name]], cross * (self.alpha / weight)
        found = survey(dict(kappa), measure)
        if not all(math.isfinite(high) for bounds in found.bounds.values() for _, high in bounds):
            for state in states.values():  # averages of what is not finite would stay so
                for key in ("data_average", "data_weight", "cross_average", "cross_weight"):
                    state.pop(key, None)
            raise FloatingPointError(
                "the data-dependent kappa is not finite: weights or inputs are not finite, or too large (if training "
                "diverged: lower the learning rate, raise the damping or clip)"
            )
        for name, ((low, _),) in found.bounds.items():
            if low < 0:  # rounding
                found.bounds[name] = ((0.0, found.largest(name)),)
                kappa[name].clamp_min_(0)
        return found

    def _draws(self, names: Sequence[str]) -> int:
        """How often signs were drawn."""
        states = (self.state.get(self.network.parameters[name], {}) for name in names)
        return max((state.get("draws", 0) for state in states), default=0)

    def _shares(self, found: Replay, names: Sequence[str], draws: int) -> Shares:
        device = next(iter(self.network.parameters.values())).device
        # a seed has 32 bits on a CPU; the odd factor takes those of different runs far apart
        generator = torch.Generator(device).manual_seed((self.seed * 2654435761 + draws) % 2**32)
        request = Request(self.alpha, self.statistic, self.sharing, self.estimator, self._pairs)
        return kappa_shares(self.network, found, request, generator, names, self._memory)

    # -- the model's own call -------------------------------------------------------------------------------------

    def _own_names(self) -> list[str]:
        known = self.network.names_by_id
        given = (p for group in self.param_groups for p in group["params"])
        return [known[id(p)] for p in given if id(p) in known]

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """What changes when a parameter of the network does."""
        return tuple((p._version, p.data_ptr()) for p in self.network.parameters.values())

    def _is_due(self, inputs: Arguments) -> bool:
        """Whether the next step will look at the whole of this batch."""
        states = (self.state.get(p, {}) for group in self.param_groups for p in group["params"])
        if not any(state.get("age", 0) % self.refresh_every == 0 for state in states):
            return False
        return self.examples is None or first_examples(self.network, inputs, self.examples) is inputs

    def _prepare(self, found: Replay) -> Prepared:
        """Compute the metric from the graph of the model's own call."""
        names = self._own_names()
        draws = self._draws(names)
        return Prepared(self._shares(found, names, draws), draws, self._versions())

    _pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    """Finds the parameters whose products with another one are wanted too."""


def _averaged(state: dict[str, Any], key: str, data: Tensor, decay: float) -> tuple[Tensor, float]:
    """The average m = a m + (1 - a) data, and 1 - a^t, which it is to be divided by, as Adam's moments are."""
    if not decay:
        return data, 1.0
    average, weight = f"{key}_average", f"{key}_weight"
    if average not in state:
        state[average], state[weight] = data * (1 - decay), 1 - decay
    else:
        in_type(state, data.dtype, (average,))
        state[average].lerp_(data, 1 - decay)
        state[weight] += (1 - decay) * (1 - state[weight])
    return state[average], state[weight]
