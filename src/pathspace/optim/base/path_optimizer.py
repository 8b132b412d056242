"""What all optimizers in kappa's geometry share: when kappa is computed, its normalizer, and who takes part.

A rule of its own is one subclass that says what a metric is to it (`_metric`) and what it does with gradients and
metrics (`_advance`).

Letters: p parameter, g = dL/dp, kappa the path metric, c its normalizer, D = kappa / c the metric of a step.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.errors import expect_values
from pathspace.optim.base.metric_state import Metric, check_places, drop, forget_start, gauge_of, keep, kept
from pathspace.optim.base.near_member import Nearby, far_scales
from pathspace.optim.base.network_optimizer import (
    Active,
    NetworkOptimizer,
    Parameters,
    check_bounds,
    check_counts,
    check_not_negative,
    evaluated,
)
from pathspace.optim.base.path_metric import Gauge, divisor, gauges, parameter_names
from pathspace.optim.base.stale import Stale
from pathspace.paths.kernel.kappa import own_memory, surveyed_kappa
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.paths.kernel.safe_type import Measure, Surveyed
from pathspace.squared.precision import full_precision
from pathspace.squared.squares import Outer

Normalization = Literal["refreshed", "frozen", "none"]


class PathOptimizer(NetworkOptimizer):
    """Base of the optimizers in kappa's geometry; see :class:`PathSGD` for the options.

    Args:
        params: parameters or param groups.
        network: the traced network.
        defaults: options that groups may have of their own.
        clip_norm: largest norm of the gradient in the metric; None does not clip.
        refresh_every: steps between two computations of kappa.
        second_term: use kappa1 + kappa2 instead of kappa1 alone.
        normalization: which c.
        damping: fraction of kappa's mean that is added to kappa in the balanced member of the rescaling class.
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        defaults: dict[str, Any],
        *,
        clip_norm: float | None,
        refresh_every: int,
        second_term: bool,
        normalization: Normalization,
        damping: float,
    ) -> None:
        check_not_negative(damping=damping)
        check_bounds(clip_norm=clip_norm)
        check_counts(refresh_every=refresh_every)
        if normalization not in ("refreshed", "frozen", "none"):
            raise ValueError(f"normalization must be 'refreshed', 'frozen' or 'none', got {normalization!r}")
        self.clip_norm, self.refresh_every, self.second_term = clip_norm, refresh_every, second_term
        self.normalization, self.damping = normalization, damping
        self._memory: dict[str, Tensor] = {}  # what computing kappa needs, kept between steps
        self._gauges: dict[Tensor, Gauge] = {}
        self._stale: Stale | None = None  # between two computations of kappa
        self._near: Nearby | None = None  # during the step of a network that is far from balance
        self._b: Tensor | None = (
            None  # scales of all classes, from when they are first looked at to when they are used
        )
        super().__init__(params, network, defaults)
        self._rescalings = network.rescalings["done"]

    steps_nearby = True
    """Whether a far network's step is taken in another member: the rule is invariant, its metric needs no data."""

    factored = False
    """Whether the metric is kappa / c as it is, and ``_advance`` takes outer products as their factors."""

    @abstractmethod
    def _metric(self, kappa: Tensor, state: dict[str, Any]) -> Metric:
        """The metric from (damped) kappa, which may be overwritten; ``state`` has ``normalizer`` and the gauge."""

    @abstractmethod
    def _advance(self, active: Active, metrics: dict[Tensor, Metric]) -> None:
        """Move the parameters; those without a metric are outside the network."""

    def _taken_between(self) -> bool:
        """Whether the step was one between two refreshes, and was taken by what was remembered."""
        return False

    def _remember(self, active: Active) -> None:
        """Remember what the steps until the next refresh need."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = evaluated(closure)
        self.network.check_current()
        if self.network.rescalings["done"] != self._rescalings:
            self._check_rescaled()
        if self._taken_between():
            return loss
        active = self._active()
        if active:
            expect_values(active[0][0])
            with full_precision(active[0][0]):
                stale = self._stale
                if stale is not None and stale.holds(self.state, self._inside(active), self.refresh_every):
                    check_places(stale.states)
                    stale.grow_older()
                    self._advance(active, stale.metrics)
                    return loss
                names = parameter_names(self.network, (p for p, _ in active))
                scales = self._scales(names)
                if scales is None:
                    self._advance(active, self._metrics(names))
                else:
                    self._advance_nearby(active, names, scales)
            self._remember(active)
        return loss

    def _check_rescaled(self) -> None:
        """Refuse to go on with a state that belongs to other weights.

        Raises:
            RuntimeError: the network was rescaled after the first step.
        """
        if any("normalizer" in state for state in self.state.values()):
            raise RuntimeError(
                f"the network was rescaled after the first step of {type(self).__name__}, whose gauge and velocities "
                "belong to the weights before: make a new optimizer, or rescale before the first step"
            )
        self._rescalings = self.network.rescalings["done"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state; see ``torch.optim.Optimizer.load_state_dict``.

        It is taken to belong to the weights that the model has at the next step, however they were rescaled before.

        Raises:
            ValueError: it is the state of another rule, or of parameters of other shapes.
        """
        super().load_state_dict(state_dict)
        self._rescalings = self.network.rescalings["done"]

    def _inside(self, active: Active) -> list[int]:
        """Identities of the parameters of the network."""
        by_id = self.network.names_by_id
        return [i for p, _ in active if (i := id(p)) in by_id]

    def _scales(self, names: Iterable[Tensor]) -> Tensor | None:
        """The scales of a network that was far from balance at the first step (see ``near_member``)."""
        known = next((state for p in names if "gauge_rows" in (state := self.state[p])), None)
        if known is not None or not self.steps_nearby:
            return None if known is None else known.get("scales")
        self._b = node_mass(self.network).gauge()
        return far_scales(self.network, self._b)

    def _advance_nearby(self, active: Active, names: dict[Tensor, str], scales: Tensor) -> None:
        """Take the step in a member of the rescaling class that is near balance."""
        near = self._near = Nearby(self.network, scales)
        own = {p: near.stand_in(names[p], p) if p in names else p for p, _ in active}
        try:
            metrics = self._metrics(names, scales)
            self.state.update({own[p]: self.state[p] for p in names})
            self._advance([(own[p], group) for p, group in active], {own[p]: m for p, m in metrics.items()})
            for p, name in names.items():
                near.bring_back(name, p)
        finally:
            self._near = None
            for p in names:
                self.state.pop(own[p], None)

    def _names(self, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
        """Names in the network of those parameters, or stand-ins for them, that belong to it."""
        if self._near is None:
            return parameter_names(self.network, parameters)
        return {p: self._near.names[id(p)] for p in parameters if id(p) in self._near.names}

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        return None if name == "_stale" else super()._copied(name, value, memo)

    def _check_state(self, name: str, index: int, state: dict[str, Any]) -> None:
        if "normalizer" not in state:
            raise ValueError(
                f"this is not the state of {type(self).__name__}: that of '{name}' has no 'normalizer', so its moments "
                "belong to other coordinates"
            )
        super()._check_state(name, index, state)

    def _metrics(self, names: dict[Tensor, str], scales: Tensor | None = None) -> dict[Tensor, Metric]:
        """The metric of every parameter of the network, computed afresh when it is due; of the near member, if any."""
        states = {p: self.state[p] for p in names}
        check_places(states)
        if not any(state.get("age", 0) % self.refresh_every == 0 for state in states.values()):
            for state in states.values():
                state["age"] += 1
            metrics = {p: kept(state) for p, state in states.items()}
            if self._near is None:
                self._stale = Stale(self.state, states, metrics)
            return metrics
        self._stale = None  # it holds what is dropped here
        due = self._means_due(names, states, scales)
        for state in states.values():
            drop(state)
        try:
            result, means = self._surveyed(names)
        except BaseException:
            for state in states.values():
                forget_start(state)
            raise
        for (p, state), mean in zip(states.items(), means, strict=True):
            if due is states or p in due:
                state["mean"] = mean if mean > 0 else 1.0
        self._warn_of_unreached(name for name, mean in zip(names.values(), means, strict=True) if mean == 0)
        self._normalize(states)
        kappa = result.values
        factored = self.factored and not self.damping
        own = {} if factored else own_memory(kappa)
        metrics = {}
        for (p, name), state in zip(names.items(), states.values(), strict=True):
            if factored:
                made = Metric(divisor(kappa[name], result.bounds[name]), state["normalizer"])
            else:
                made = self._metric(self._damped(p, own[name], state), state)
            metrics[p] = made
            if self.refresh_every > 1:
                keep(state, made)
                if isinstance(made.values, Tensor):
                    # kappa takes the place of the square, which is not needed until the next one
                    self._memory.pop(name, None)
        return metrics

    def _warn_of_unreached(self, names: Iterable[str]) -> None:
        """Tell of parameters whose kappa is zero but not their gradient: the loss is no function of the traced outputs.

        kappa_i = 0 implies dL/dp_i = 0, so a step of 0 loses nothing, if the model runs as it did when it was traced.
        """
        for name in names if not self.damping else ():
            g = self.network.parameters[name].grad
            if g is not None and bool(g.count_nonzero()):
                kind = type(self).__name__
                warnings.warn(
                    f"{kind} does not move '{name}': gradients reach it, but no path of the network as it was traced "
                    "does. If the example was shorter than the data (one time step, a small image), or the model in "
                    f"another form, trace it as it is trained and make a new {kind}; otherwise give damping=0.01",
                    stacklevel=2,
                )

    def _surveyed(self, names: dict[Tensor, str]) -> tuple[Surveyed, list[float]]:
        """Kappa, and the mean of each parameter's in the gauge."""
        factors: list[float] = []
        counts: list[int] = []

        def measure(kappa: Mapping[str, Tensor | Outer]) -> list[Tensor]:
            factors.clear()
            counts.clear()
            found: list[Tensor] = []
            for p, name in names.items():
                parts, factor = self._gauges[p].mean(kappa[name])
                found += parts
                factors.append(factor)
                counts.append(len(parts))
            return found

        result = self._kappa(list(names.values()), measure)
        read = iter(result.measured)
        return result, [
            factor * math.prod(next(read) for _ in range(count))
            for factor, count in zip(factors, counts, strict=True)
        ]

    def _kappa(self, names: Sequence[str], measure: Measure) -> Surveyed:
        """Kappa of some parameters, and what ``measure`` finds in it."""
        return surveyed_kappa(
            self.network,
            names,
            second_term=self.second_term,
            parameters=None if self._near is None else self._near.parameters,
            memory=self._memory,
            measure=measure,
        )

    def _normalize(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Set the numbers c (see ``path_metric``)."""
        for state in states.values():
            state["normalizer"] = 1.0 if self.normalization == "none" else state["mean"]

    def _means_due(
        self, names: dict[Tensor, str], states: dict[Tensor, dict[str, Any]], scales: Tensor | None
    ) -> Iterable[Tensor]:
        """The parameters whose mean of kappa enters c (see ``path_metric``); gauges at the first step."""
        ends = zip(names.items(), states.values(), strict=True)
        new = {p: name for (p, name), state in ends if "gauge_rows" not in state}
        if new:
            b, self._b = node_mass(self.network).gauge() if self._b is None else self._b, None
            found = gauges(self.network, new.values(), b if scales is None else b / scales)
            for p, name in new.items():
                states[p]["gauge_rows"], states[p]["gauge_columns"] = found[name].rows, found[name].columns
                if scales is not None:
                    states[p]["scales"] = scales
        for p, state in states.items():
            known = self._gauges.get(p)
            if known is None or known.rows is not state["gauge_rows"]:
                self._gauges[p] = gauge_of(state)
        return states if self.normalization == "refreshed" else new

    def _damped(self, p: Tensor, kappa: Tensor, state: dict[str, Any]) -> Tensor:
        if self.damping:
            # the damping stands for the same number in every member of the rescaling class
            inverse = gauge_of(state).damping(p.shape, kappa.dtype)
            kappa.add_(inverse, alpha=self.damping * state["mean"])
        return kappa
