"""The base of optimizers with a metric: which parameters a step updates, and the scale of each gradient.

Letters: p parameter, g = dL/dp, D the metric (see ``metrics.metric``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed

from pathspace.metrics import Metric
from pathspace.metrics.checks import check_bounds
from pathspace.metrics.metric import Form
from pathspace.network import Network
from pathspace.optim.base.diagnostics import (
    clipped_squares,
    shares_of_layers,
    spread_of_metric,
    steps_since_refresh,
)
from pathspace.optim.base.network_optimizer import Active, NetworkOptimizer, Parameters
from pathspace.optim.base.steepest import ParamStep
from pathspace.rescaling.optimizer_states import State, times_
from pathspace.squared.sharding import to_local


class MetricOptimizer(NetworkOptimizer):
    """Base of the optimizers that divide by a metric; a rule is the method ``_advance``.

    Args:
        params: parameters or param groups.
        network: the traced network.
        defaults: options that groups may have of their own.
        metric: the metric.
        clip_norm: largest norm of g / sqrt(D) over all parameters; None does not clip.
        maximize: ascend instead; None where that is no option of the groups, or set by the rule.
    """

    form: Form = "inverse"
    """What the rule asks the metric for."""
    # entries of a state that have the unit of a power of a weight
    _velocities: Mapping[str, int] = MappingProxyType({})
    _velocities_near = (
        True  # whether they are those of the member near balance (see ``metrics.gauge``)
    )

    def __init__(
        self,
        params: Parameters,
        network: Network,
        defaults: dict[str, Any],
        metric: Metric,
        clip_norm: float | None = None,
        maximize: bool | None = None,
    ) -> None:
        check_bounds(clip_norm=clip_norm)
        self.metric = metric
        self.clip_norm = clip_norm
        super().__init__(
            params, network, defaults if maximize is None else {**defaults, "maximize": maximize}
        )

    def _bind(self, parameters: Sequence[Tensor]) -> None:
        super()._bind(parameters)
        self.metric.bind(self.network, list(self._in_network(parameters)), self.form)

    def _own_names(self) -> set[str]:
        """Return the names of all parameters of the network that the optimizer has, with a gradient or without."""
        return set(self._in_network(self._all_parameters()))

    @property
    def takes_parts(self) -> bool:
        """True if FSDP may shard the parameters."""
        return self.metric.takes_parts

    @abstractmethod
    def _advance(self, steps: list[ParamStep]) -> None:
        """Move the parameters."""

    def _take(self, active: Active) -> None:
        self._advance(self._steps(active))

    def _steps(self, active: Active) -> list[ParamStep]:
        """Return the parameters that have a gradient, and what the metric gives for those of the network."""
        names = self.network.names_by_id
        steps = [
            ParamStep(p, p, group, self.state[p], names.get(id(p)), g) for p, group, g in active
        ]
        if self._is_sharded:
            for step in steps:
                step.p = to_local(step.p)
                step.g = to_local(step.g)
        inside = {step.name: step.state for step in steps if step.name is not None}
        if inside:
            self.metric.advance(inside, self._own_names)
        for step in steps:
            step.factor = step.state.get("factor")
        return steps

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the metric of the present weights now, whatever its age.

        A step computes the metric where that is due. A CUDA graph that holds ``step()`` cannot: a
        replay works with the metric of the last ``refresh()``, whose memory stays where it is. So
        take steps as usual until the metric has been computed ``refresh_every`` times, capture one,
        and call this between replays::

            if i % 10 == 0:
                optimizer.refresh()
            graph.replay()

        Raises:
            RuntimeError: before the first step, or if the rule keeps points, which steps alone
                move.
            FloatingPointError: kappa is not finite; nothing is changed then.
        """
        self._check_current()
        inside = self._in_network(self.state)
        begun = [name for name, p in inside.items() if "factor" in self.state[p]]
        if not begun:
            raise RuntimeError("refresh needs a metric to compute anew: take a step first")
        self.metric.refresh(begun)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Any]:
        """Return what a step sees, of the gradients that the parameters hold and the metric of the last step.

        Call it after ``step()`` and before ``zero_grad()``. It changes nothing, and costs a few
        passes over the parameters; a step keeps nothing for it.

        Returns:
            ``norm``: the norm of g / sqrt(D) over all parameters, which ``clip_norm`` bounds.
            ``shares``: module -> its share of the square of that norm. ``age``: how many steps ago
            the metric was computed; 0 for the last one. ``metric``: values of D in the balanced
            frame that 5, 50 and 95 % of the network's elements are below (damping, normalization
            and power included; 1 is the step of the plain rule there). None of them depends on the
            scales of the weights.

        Raises:
            RuntimeError: before the first step, or if no parameter has a gradient.
            NotImplementedError: the metric is not diagonal, as that of :class:`QuasiDiagonal`.
        """
        if self.form == "balanced":
            raise NotImplementedError(
                f"the metric of {type(self).__name__} is not diagonal: it has no diagnostics"
            )
        steps = self._steps_as_they_are(self._active())
        states = {step.name: step.state for step in steps if step.name is not None}
        if not states:
            raise RuntimeError(
                "diagnostics need a step and its gradients: call them after step() and before zero_grad()"
            )
        is_root = self.form == "root"
        squares = clipped_squares(steps, is_root=is_root)
        parameters = [step.parameter for step in steps]
        names_by_id = {id(p): name for name, p in self.network.model.named_parameters()}
        names = [step.name or names_by_id.get(id(step.parameter), "") for step in steps]
        norm, shares = shares_of_layers(squares, parameters, names)
        metric = self.metric
        once = metric.power == 0 or metric.frozen
        ages = [
            steps_since_refresh(s["age"], metric.refresh_every, once=once) for s in states.values()
        ]
        spread = spread_of_metric(states, metric, is_root=is_root)
        return {"norm": norm, "shares": shares, "age": min(ages), "metric": tuple(spread)}

    def _steps_as_they_are(self, active: Active) -> list[ParamStep]:
        """Return what the last step had of the parameters with a gradient, without those that it did not see."""
        names = self.network.names_by_id
        steps = []
        for p, group, g in active:
            state = self.state.get(p, {})
            name = names.get(id(p))
            if name is None or "factor" in state:
                g = to_local(g) if self._is_sharded else g
                own = to_local(p) if self._is_sharded else p
                steps.append(ParamStep(p, own, group, state, name, g, state.get("factor")))
        self._orient(steps)
        return steps

    def _orient(self, steps: list[ParamStep]) -> None:
        """Let g be what clipping measures: here the gradients themselves."""

    def expect_movable(self, network: Network, names: Iterable[str]) -> None:
        """Refuse to let states follow a rescaling; see :class:`NetworkOptimizer`.

        Raises:
            ValueError: another optimizer has the same metric and does not follow.
        """
        super().expect_movable(network, names)
        left = sorted(self.metric.served - set(names))
        if left:
            raise ValueError(
                f"the metric of this {type(self).__name__} serves another optimizer, too, which has '{left[0]}': give "
                "both, optimizer=[first, second]"
            )

    def follow_rescaling(self, network: Network, factors: Tensor) -> None:
        """Let states follow the rescaling of the network by factors s, shape ``[num_classes]``."""
        super().follow_rescaling(network, factors)
        for name, p in self._in_network(self._all_parameters()).items():
            ahead = self.metric.state.get(name)
            # computed for a step to come, in a copy of what this optimizer keeps
            if ahead and ahead is not self.state.get(p):
                self._follow(name, ahead, factors)
        self.metric.note_rescaling()

    def _follow(self, name: str, state: State, factors: Tensor) -> None:
        near = self.metric.follow(name, state, factors)
        scale = self.network.edge_factors(name, near if self._velocities_near else factors)
        for key, power in self._velocities.items():
            if isinstance(state.get(key), Tensor):
                times_(state[key], scale, power)

    def _agreed(self, refused: bool) -> bool:
        if distributed.is_available() and distributed.is_initialized():
            refused = self.metric.agreed(refused)
        return super()._agreed(refused)

    def _rehearse(self, active: Active) -> None:
        self.metric.rehearses = True
        try:
            super()._rehearse(active)
        finally:
            self.metric.rehearses = False
        # other optimizers may share the metric, and weights may be rescaled before the first step
        self.metric.release(self._own_names())

    def _load(self, state_dict: dict[str, Any]) -> None:
        super()._load(state_dict)
        self._share_states()

    def _share_states(self) -> None:
        """Let the metric look at the states that were loaded."""
        states = {name: self.state[p] for name, p in self._in_network(self.state).items()}
        self.metric.reset(states, self._own_names())

    def _check_state(self, name: str, index: int, state: State) -> None:
        if "gauge_rows" not in state or "age" not in state:
            raise ValueError(
                f"this is not the state of {type(self).__name__}: that of '{name}' has no gauge, so its moments belong "
                "to other coordinates"
            )
        if "kappa" in state or "kappa_rows" in state:
            raise ValueError(
                f"this state was saved before metrics were objects of their own: the {type(self).__name__} of that "
                "version kept other quantities; load its weights into the model and start a new optimizer"
            )
        super()._check_state(name, index, state)
