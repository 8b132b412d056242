"""The data-dependent kappa as the metric of an optimizer: where its data comes from, and its average over draws.

Letters: kappa = path + alpha data (see ``paths.data_dependent``); a the decay of the average of data.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.network import Network
from pathspace.network.arguments import Arguments, first_examples
from pathspace.network.replay import Replay
from pathspace.optim.moments import in_type
from pathspace.optim.path_optimizer import PathOptimizer
from pathspace.paths.data_dependent import Estimator, kappa_shares
from pathspace.paths.edge_statistics import Sharing
from pathspace.paths.node_measure import Statistic, check_options
from pathspace.paths.safe_type import Measure, Surveyed, survey

_AVERAGED = 0.9  # for random signs, if nothing else is asked for


class LatestBatch:
    """Remembers what a model was last called with, by a forward pre-hook that only looks.

    Only calls with gradients enabled count, so evaluation is not seen. A copy of the model carries a hook that does
    nothing. The batch is kept as it is, without a copy, until the next one.
    """

    only_looks = True

    def __init__(self, model: nn.Module | None) -> None:
        self.inputs: Arguments | None = None
        self._handle = None
        if model is not None:
            self._handle = model.register_forward_pre_hook(_Look(weakref.ref(self)), with_kwargs=True)
            weakref.finalize(self, self._handle.remove)

    @property
    def looks(self) -> bool:
        """Whether it still looks."""
        return self._handle is not None

    def remove(self) -> None:
        """Stop looking, and forget the batch."""
        self.inputs = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Look:
    """The hook itself; it keeps nothing alive."""

    only_looks = True

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = self._target()
        if target is not None and torch.is_grad_enabled():
            target.inputs = Arguments(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Look:
        return _Look(_nothing)

    def __reduce__(self) -> Any:
        return _Look, (_nothing,)


def _nothing() -> None:
    return None


class DataMetric(PathOptimizer):
    """Mixed into an optimizer in kappa's geometry, it puts the data-dependent kappa in the place of kappa."""

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
        examples: int | None,
        watch: bool,
    ) -> None:
        check_options(alpha, statistic)
        if sharing not in ("parameters", "edges"):
            raise ValueError(f"sharing must be 'parameters' or 'edges', got {sharing!r}")
        if estimator not in ("exact", "signs", "auto"):
            raise ValueError(f"estimator must be 'exact', 'signs' or 'auto', got {estimator!r}")
        if averaging is not None and not 0 <= averaging < 1:
            raise ValueError(f"averaging must be None or in [0, 1), got {averaging}")
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be None or at least 1, got {examples}")
        self.examples = examples
        self.alpha, self.statistic, self.sharing = alpha, statistic, sharing
        self.estimator, self.averaging, self.seed = estimator, averaging, seed
        self._latest = LatestBatch(self.network.model if watch and alpha > 0 else None)

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self._latest.inputs = Arguments(args, kwargs)

    def close(self) -> None:
        """Remove the hook by which the optimizer sees batches; from then on they come by :meth:`observe` alone."""
        self._latest.remove()

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name != "_latest":
            return super()._copied(name, value, memo)
        return LatestBatch(copy.deepcopy(self.network, memo).model if value.looks else None)

    def _kappa(self, names: Sequence[str], measure: Measure) -> Surveyed:
        if self.alpha == 0:
            return super()._kappa(names, measure)
        if self._latest.inputs is None:
            raise RuntimeError(
                f"{type(self).__name__} has seen no batch: call the model with gradients enabled before step(), or "
                "give the batch with observe(inputs)"
            )
        states = {name: self.state[self.network.parameters[name]] for name in names}
        draws = max((state.get("draws", 0) for state in states.values()), default=0)
        parameter = next(iter(self.network.parameters.values()))
        # a seed has 32 bits on a CPU; the odd factor takes those of different runs far apart
        seed = (self.seed * 2654435761 + draws) % 2**32
        generator = torch.Generator(parameter.device).manual_seed(seed)
        shares = kappa_shares(
            self.network,
            first_examples(self.network, self._latest.inputs, self.examples),
            alpha=self.alpha,
            statistic=self.statistic,
            sharing=self.sharing,
            estimator=self.estimator,
            generator=generator,
            names=names,
            pairs=self._pairs,
        )
        order = {name: i for i, name in enumerate(self.network.parameters)}  # a state cannot hold strings
        decay = (_AVERAGED if shares.drawn else 0.0) if self.averaging is None else self.averaging
        kappa = {}
        for name, state in states.items():
            state["draws"] = draws + 1
            data, weight = _averaged(state, "data", shares.data[name], decay)
            kappa[name] = torch.add(shares.path[name], data, alpha=self.alpha / weight)
            if name in shares.cross:
                cross, weight = _averaged(state, "cross", shares.cross[name], decay)
                state["bias"], state["cross"] = order[shares.bias_of[name]], cross * (self.alpha / weight)
        found = survey(dict(kappa), measure)
        if not all(math.isfinite(high) for bounds in found.bounds.values() for _, high in bounds):
            raise FloatingPointError(
                "the data-dependent kappa is not finite: weights or inputs are not finite, or too large"
            )
        return found

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
