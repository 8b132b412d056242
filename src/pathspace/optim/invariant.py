"""Invariant: any optimizer, made blind to how the weights of a network are scaled.

With a metric D that transforms like kappa, as (s_u / s_v)^2 for an edge u -> v, the coordinates

    u = sqrt(D) w        dL/du = g / sqrt(D)

transform as a weight times an inverse weight: rescaling does not change them. Any rule of training,
however it mixes the entries of a matrix, is therefore invariant if it is handed u and dL/du and its
step du is mapped back, dw = du / sqrt(D).

Letters: w parameter, g = dL/dw, D metric, r = 1 / sqrt(D), u coordinates, h = dL/du.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from pathspace.metrics import Metric, Path
from pathspace.metrics.path import PathOptions
from pathspace.network import Network
from pathspace.optim.base.coordinates import (
    CoordinateView,
    as_shadow,
    chunks_of,
    decoupled_decay_only,
    map_back,
    put_coordinates,
    read_gradients,
    restricted_to,
    rollback_on_error,
    split_by_momentum,
    step_gathered,
    step_shards,
    type_of_shadow,
    views_of,
)
from pathspace.optim.base.metric_optimizer import MetricOptimizer
from pathspace.optim.base.network_optimizer import (
    Active,
    NetworkOptimizer,
    Parameters,
    evaluated,
    global_state,
)
from pathspace.optim.base.options import chosen_metric
from pathspace.optim.base.plain_states import (
    expect_plain,
    follow_rescaling_,
    into_coordinates_,
    out_of_coordinates,
)
from pathspace.optim.base.points import expect_unread, frozen_because, move_points_, points_of
from pathspace.optim.base.saved_states import is_locked, locked, lost
from pathspace.optim.base.steepest import ParamStep
from pathspace.optim.rules.clipping import clip_factor
from pathspace.optim.rules.division import divides, group_of, undivided
from pathspace.optim.rules.traits import RULES, traits_of
from pathspace.rescaling.optimizer_states import Group, State, held_by
from pathspace.squared.precision import full_precision
from pathspace.squared.sharding import shard_rows, to_local, totals
from pathspace.torch_private import disable_dynamo


class Invariant(MetricOptimizer):
    r"""An optimizer in coordinates that node-wise rescaling of the network does not change.

    .. code-block:: text

        u = sqrt(D) w;   h = g / sqrt(D);   du = step of the rule on (u, h);   w = w + du / sqrt(D)

    D is the metric, by default :class:`pathspace.metrics.Path`. Train two networks that differ by a
    node-wise rescaling: after every step they still differ by the same rescaling. This holds
    bitwise if the factors are powers of two.

    Only the step is mapped back to the weights. Where the rule does not move u, as with lr = 0, no
    bit of a weight changes. ``param_groups`` belong to the rule, so learning rate schedulers act on
    it. Its state is ``optimizer.rule.state``, in the coordinates u. When D is refreshed, state that
    the rule computed from gradients is left as it is. State that holds points (the mean of ASGD, z
    of schedule-free rules, the start of Prodigy) is converted to the new coordinates.

    Rules that evaluate a closure several times (LBFGS, SAM) receive a closure that writes the
    weights first; D does not change during the step. Schedule-free rules have ``train()`` and
    ``eval()``.

    Parameters that do not belong to the network take the plain rule.

    Args:
        params: parameters or param groups.
        network: the traced network of the model whose parameters are in ``params``.
        rule: the class of an optimizer, such as ``torch.optim.AdamW``, or a function that makes one
            from param groups.
        metric: the metric D; None: ``pathspace.metrics.Path()``. Several optimizers of one network
            may share a metric, which is then computed once.
        clip_norm: largest norm of h over all parameters; longer gradients are scaled down to it.
            Unlike the norm of ``torch.nn.utils.clip_grad_norm_``, it does not depend on how the
            weights are scaled. Not for LBFGS.
        points: names of state entries of the rule that are points, not gradients, for rules that
            the library does not know. Without them the metric of the first step is used until the
            end.
        options: options of the rule.

    Raises:
        TypeError: the rule is not callable, or copies parameters when it is made (Lookahead), or an
            option belongs to the metric.
        ValueError: an option is out of its range, or no parameter belongs to the network.
        RuntimeError: at a step, for sparse gradients.
        FloatingPointError: at a step, if kappa is not finite. The step then changes no parameter.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> type(optimizer.rule).__name__, optimizer.param_groups[0]["weight_decay"]
        ('AdamW', 0.1)
    """

    form = "root"
    matrices = False
    """Whether the rule sees a parameter of more than two dimensions as the matrix of its rows."""

    def __init__(
        self,
        params: Parameters,
        network: Network,
        rule: Callable[..., Optimizer],
        *,
        metric: Metric | None = None,
        clip_norm: float | None = None,
        points: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if not callable(rule) or "network" in signature(rule).parameters:
            kind = getattr(rule, "__name__", f"an object of the type {type(rule).__name__}")
            raise TypeError(
                f"rule must be a class of plain optimizers, like torch.optim.AdamW, not {kind}"
            )
        if of_metric := options.keys() & PathOptions.__annotations__.keys() - set(
            signature(rule).parameters
        ):
            given = ", ".join(f"{name}={options[name]!r}" for name in sorted(of_metric))
            raise TypeError(
                f"{given}: an option of the metric; write metric=pathspace.metrics.Path({given})"
            )
        self.rule: Optimizer | None = None
        self._shadows: dict[Tensor, nn.Parameter] = {}
        # with memory that is kept from step to step
        self._kept_views: dict[Tensor, CoordinateView] = {}
        # whether the views share memory that the rule steps one after the other
        self._steps_one_by_one = False
        self._has_stepped = False  # with the groups and the state that it has
        # parameters whose loaded state is the plain rule's, until their next step
        self._plain: set[Tensor] = set()
        self._plain_at = 0  # rescalings of the network when that was loaded
        super().__init__(params, network, {}, chosen_metric(metric, Path, {}), clip_norm)
        groups = [
            {**group, "params": self._shadows_of(group["params"])} for group in self.param_groups
        ]
        self.rule = _in_few_passes(rule, groups, options)
        if clip_norm is not None and isinstance(self.rule, LBFGS):
            raise ValueError(
                "LBFGS takes no clip_norm, as it reads curvature off gradients: leave it out"
            )
        expect_unread(self.rule)
        self._points = points_of(self.rule, points)
        if self._points is None:
            self.metric.frozen = True
            frozen_because(self.rule)
        self.defaults = self.rule.defaults
        self._of_groups = frozenset(self.rule.defaults)
        for group in self.param_groups:
            self._check_group(group)
        self._adopt_groups()
        self._expect_whole(self._shadows)

    @property
    def takes_parts(self) -> bool:
        """True if FSDP may shard the parameters: the rule then treats each of them by itself."""
        return super().takes_parts and (self.rule is None or traits_of(type(self.rule)).takes_parts)

    @property
    def _gathers(self) -> bool:
        """True if parameters are gathered for the rule; its states stay sharded as DTensors."""
        return self._is_sharded and self.rule is not None and traits_of(type(self.rule)).needs_whole

    # -- the rule and its groups -------------------------------------------------------------------

    def _shadows_of(self, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return the tensors that the rule trains for some parameters; their values are set at every step."""
        for p in parameters:
            if p not in self._shadows:
                self._shadows[p] = as_shadow(p, matrix=self.matrices)
        return [self._shadows[p] for p in parameters]

    def _adopt_groups(self) -> None:
        """Let the groups be the rule's own dicts, with the parameters of the model in them."""
        assert self.rule is not None
        of_shadow = {shadow: p for p, shadow in self._shadows.items()}
        for group in self.rule.param_groups:
            group["params"] = [of_shadow[shadow] for shadow in group["params"]]
        self.param_groups = self.rule.param_groups

    @contextmanager
    def _rule_at_work(self) -> Iterator[Optimizer]:
        """Let the groups hold the rule's coordinates."""
        assert self.rule is not None
        # whoever gave the optimizer other groups means the rule
        self.rule.param_groups = self.param_groups
        for group in self.param_groups:
            group["params"] = self._shadows_of(group["params"])
        try:
            yield self.rule
        finally:
            self._adopt_groups()

    @contextmanager
    def _rule_at_rest(self) -> Iterator[None]:
        """Let the groups hold the user's parameters, while the rule is at work."""
        assert self.rule is not None
        self._adopt_groups()
        try:
            yield
        finally:
            for group in self.rule.param_groups:
                group["params"] = self._shadows_of(group["params"])

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; see ``torch.optim.Optimizer.add_param_group``."""
        if self.rule is None:  # while this is made
            super().add_param_group(param_group)
            return
        self._check_group(param_group)
        self._forget_rehearsal()
        # names and iterables, as torch reads them
        group = Optimizer([{**param_group}], {}).param_groups[0]
        if not set(self._all_parameters()).isdisjoint(group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        self._bind(group["params"])
        with self._rule_at_work() as rule:
            rule.add_param_group({**group, "params": self._shadows_of(group["params"])})
        self._has_stepped = False

    @classmethod
    def _options(cls) -> set[str]:
        return super()._options() | PathOptions.__annotations__.keys()

    def _check_group(self, param_group: Group) -> None:
        if self.rule is not None:  # which knows what options there are
            super()._check_group(param_group)

    # -- steps -------------------------------------------------------------------------------------

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See ``torch.optim.Optimizer.step``."""
        assert self.rule is not None
        if closure is None or not traits_of(type(self.rule)).evaluates:
            return super().step(closure)
        self._check_current()
        if not self._active():
            evaluated(closure)  # SAM begins with gradients
            self._active()  # which may be sparse
        self._forget_rehearsal()
        self._gradients.look_for_others(self._all_parameters)
        steps = self._steps(self._may_be_used())
        views = self._views([(step.parameter, step.factor) for step in steps])
        if not views:
            return None
        with full_precision(views[0].p), self._rule_at_work() as rule:
            loss = self._step_by_evaluations(rule, views, closure)
            for view in views:
                view.map_back(None)
        return loss

    def _may_be_used(self) -> Active:
        """Return the parameters that some evaluation of a closure may use: a later one may use more than the first."""
        # without gradients yet, the parameters stand in their places
        return [
            (p, group, p)
            for group, p in self._with_groups()
            if p.requires_grad or p.grad is not None
        ]

    def _with_groups(self) -> Iterator[tuple[Group, Tensor]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p

    def _step_by_evaluations(
        self, rule: Optimizer, views: Sequence[CoordinateView], closure: Callable[[], Any]
    ) -> Any:
        """Let the rule step the coordinates, with a closure that it evaluates; returns the loss."""
        for view in views:
            view.put()
        self._read(views)  # SAM begins with what was computed before
        with _states_kept(rule):
            loss = rule.step(self._through(views, closure))
            # a line search may come by points that are not finite, but must not end there
            if not all(view.is_finite for view in views):
                raise FloatingPointError(
                    f"the step of {type(rule).__name__} is not finite: the loss or gradients are not, because "
                    "training diverged (lower the learning rate) or a batch held NaN; parameters and the "
                    "optimizer's state are not changed"
                )
        return loss

    def _through(
        self, views: Sequence[CoordinateView], closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return a closure for the rule, which evaluates the user's where the rule has put the coordinates."""
        start = [e.p.clone() for e in views]

        def evaluate() -> Any:
            for view, w in zip(views, start, strict=True):
                view.move_to(w)
                if view.shadow.grad is None:  # as SAM has cleared it
                    view.parameter.grad = None
            try:
                # the closure clears the gradients of the model's parameters
                with self._rule_at_rest():
                    loss = evaluated(closure)
            finally:
                for view, w in zip(views, start, strict=True):
                    view.p.copy_(w)  # the step is mapped back from here
            self._read(views)
            return loss

        return torch.no_grad()(evaluate)

    def _read(self, views: Sequence[CoordinateView]) -> None:
        """Let all h be what an evaluation of the loss found."""
        factor = self._clipping(views, masked=False)
        for view in views:
            view.read_gradient(masked=False, factor=factor)

    def _clipping(self, views: Sequence[CoordinateView], *, masked: bool) -> float | Tensor:
        """Return the factor of all h. They are read for it, as each chunk takes the memory of the one before."""
        if self.clip_norm is None:
            return 1.0
        squares = []
        for view in views:
            view.read_gradient(masked=masked)
            squares.append(view.squared_norm().to(views[0].p.device))
        norm = totals(torch.stack(squares), [view.parameter for view in views])
        return clip_factor(norm.sum(), self.clip_norm)

    def _steps(self, active: Active) -> list[ParamStep]:
        if self._plain and self.network.rescalings["done"] != self._plain_at:
            raise RuntimeError(
                f"the network was rescaled after a state of plain {type(self.rule).__name__} was loaded, whose moments "
                "belong to the weights before: rescale or balance it first, and load the state of those weights"
            )
        steps = self._steps_of_metric(active)
        for step in steps:
            if step.factor is not None and step.parameter in self._plain:
                assert self.rule is not None
                into_coordinates_(self.rule, self._shadows[step.parameter], step.factor)
                self._plain.discard(step.parameter)
        return steps

    def _steps_of_metric(self, active: Active) -> list[ParamStep]:
        if not self._points:
            return super()._steps(active)
        before = {p: self.state[p].get("factor") for p in self._shadows}
        try:
            steps = super()._steps(active)
        except BaseException:
            for p, r in before.items():  # where the points still are
                self.state[p] |= {} if r is None else {"factor": r}
            raise
        assert self.rule is not None
        for step in steps:
            p = step.parameter
            move_points_(self.rule, self._points, self._shadows[p], step.p, before[p], step.factor)
        return steps

    def refresh(self) -> None:
        """Compute the metric of the present weights now; see :meth:`PathSGD.refresh`."""
        if self._points:
            raise RuntimeError(
                f"{type(self.rule).__name__} keeps points, which move with the metric: its steps alone compute it"
            )
        super().refresh()

    def _advance(self, steps: list[ParamStep]) -> None:
        views = self._views([(step.parameter, step.factor) for step in steps])
        with (
            full_precision(views[0].p),
            self._rule_at_work() as rule,
            decoupled_decay_only(rule) as decay,
        ):
            masked = traits_of(type(rule)).by_sign
            chunks = chunks_of(views, one_by_one=self._steps_one_by_one)
            factor = self._clipping(views, masked=masked)
            with rollback_on_error(rule, chunks[:-1], keep=not self._has_stepped):
                self._has_stepped = False
                for chunk in chunks:
                    read_gradients(chunk, masked=masked, factor=factor)
                    put_coordinates(chunk, decay)
                    if self._gathers and traits_of(type(rule)).takes_rows:
                        step_shards(rule, chunk)
                    elif self._gathers:
                        step_gathered(rule, chunk, sees=decay is None)
                    else:
                        _step_chunk(rule, chunk)
                    map_back(chunk, decay)
                self._has_stepped = True

    def _views(self, factors: Sequence[tuple[Tensor, Tensor | None]]) -> list[CoordinateView]:
        """Return the parameters that take part, with their r; the rule finds no gradient of the others."""
        kept = self._kept_views
        if len(kept) < len(self._shadows) or not all(view.is_current for view in kept.values()):
            kept = self._kept_views = self._new_views()
        views = [kept[p] for p, _ in factors]
        for view, (p, r) in zip(views, factors, strict=True):
            if self._is_sharded:
                view.p = to_local(p)  # FSDP may have put it elsewhere
            view.r = r
            view.has_zeros = r is not None and self.state[p].get("zeros", False)
        if len(views) < len(self._shadows):
            moved = {id(view.shadow) for view in views}
            for shadow in self._shadows.values():
                if id(shadow) not in moved:
                    shadow.grad = None
        return views

    def follow_rescaling(self, network: Network, factors: Tensor) -> None:
        """Let states follow the rescaling of the network by factors s, shape ``[num_classes]``.

        The rule's own state is in coordinates, which do not change.
        """
        super().follow_rescaling(network, factors)
        assert self.rule is not None
        for p in self._plain:
            name = self.network.names_by_id[id(p)]
            follow_rescaling_(self.rule, self._shadows[p], self.network.edge_factors(name, factors))
        self._plain_at = self.network.rescalings["done"]

    # -- a first step that moves nothing -----------------------------------------------------------

    def _before_rehearsal(self) -> dict[str, Any]:
        assert self.rule is not None
        return {"rule": _copied_states(self.rule)}

    def _rehearse(self, active: Active) -> None:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        options = copy.deepcopy(options)  # some rules count steps there
        assert self.rule is not None
        # tools may ask one process alone for what a state holds
        with undivided(self.rule):
            super()._rehearse(active)
        # those of a rule that divides its work may lie elsewhere
        self._kept_views = {}
        for group, kept in zip(self.param_groups, options, strict=True):
            group.update(kept)

    def _restore(self, before: dict[str, Any]) -> None:
        super()._restore(before)
        assert self.rule is not None
        self.rule.state.clear()
        self.rule.state.update(before["rule"])
        self._has_stepped = False

    def _new_views(self) -> dict[Tensor, CoordinateView]:
        """Coordinates of all parameters in their present types, and what the rule keeps of them."""
        assert self.rule is not None
        for p, shadow in self._shadows.items():
            dtype = type_of_shadow(p)
            if shadow.dtype != dtype:
                state = self.rule.state.get(shadow, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and value.dtype == shadow.dtype:
                        state[key] = value.to(dtype)
                shadow.grad = None
                shadow.data = shadow.data.to(dtype)
        traits = traits_of(type(self.rule))
        # a rule that divides its work over processes must see all of it
        divided = (self._is_sharded and traits.takes_rows) or divides(group_of(self.rule))
        self._steps_one_by_one = traits.one_by_one and not divided
        return views_of(self._shadows, one_by_one=self._steps_one_by_one)

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name == "rule":
            group = group_of(value)
            memo[id(group)] = group  # which cannot be copied
        copied = {} if name == "_kept_views" else super()._copied(name, value, memo)
        if name == "rule":  # torch copies groups and state of an optimizer, and nothing else
            rest = {k: v for k, v in vars(value).items() if k not in vars(copied)}
            vars(copied).update(super()._copied(name, rest, memo))
        return copied

    # -- schedule-free rules -----------------------------------------------------------------------

    def train(self) -> None:
        """Let a schedule-free rule put the weights where gradients are taken; nothing for other rules."""
        self._switch("train")

    def eval(self) -> None:
        """Let a schedule-free rule put the weights where the model is to be used; nothing for other rules."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, method: str) -> None:
        if not callable(getattr(self.rule, method, None)):
            return
        self._forget_rehearsal()
        factors = [(p, self.state[p].get("factor")) for p in self._shadows]
        names = self.network.names_by_id
        views = self._views([(p, r) for p, r in factors if r is not None or id(p) not in names])
        for view in views:
            view.put()
        with self._rule_at_work() as rule:
            getattr(rule, method)()
        for view in views:
            view.map_back(None)

    # -- states ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state and the metric's, by parameter; see ``torch.optim.Optimizer.state_dict``."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._rule_at_work() as rule:
            packed = rule.state_dict()
        more = global_state(packed)
        state = {key: dict(kept) for key, kept in packed["state"].items() if key not in more} | more
        for index, p in enumerate(self._all_parameters()):
            if index in state and p not in self._plain:
                state[index] = locked(state[index], list(state[index]), moments=True)
            metric = {f"{_OURS}{key}": value for key, value in self.state.get(p, {}).items()}
            if metric:
                state.setdefault(index, {}).update(metric)
        packed = self._packed({**packed, "state": state})
        for hook in self._optimizer_state_dict_post_hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state as the plain rule would have it, to go on with ``torch.optim`` at the present weights.

        Moments of gradients in coordinates become those of gradients of the weights, by the metric
        of the last step.

        Returns:
            What ``load_state_dict`` of the plain rule takes.

        Raises:
            TypeError: what the rule keeps has no known transformation, as with SOAP, Adafactor and
                LBFGS.
            ValueError: parameters are split over processes.
        """
        if self._is_sharded:
            raise ValueError(
                "parameters are split over processes: save state_dict(), and load it where they are whole"
            )
        with self._rule_at_work() as rule:
            packed = rule.state_dict()
        for index, p in enumerate(self._all_parameters()):
            if index in packed["state"]:
                r = None if p in self._plain else self.state.get(p, {}).get("factor")
                packed["state"][index] = out_of_coordinates(rule, packed["state"][index], r)
        return packed

    def _load(self, state_dict: dict[str, Any]) -> None:
        more = global_state(state_dict)
        states = state_dict["state"]
        # saved by an optimizer of ours, not by the plain rule
        own = {index for index in states.keys() - more.keys() if is_locked(states[index])}
        state_dict = self._unpacked(state_dict)
        of_metric, of_rule = _split_states(state_dict["state"])
        saved, parameters = self._check_loaded(state_dict, of_metric)
        without_metric = own - of_metric.keys()
        self._check_arrived(zip(saved, parameters, strict=False), without_metric, of_rule)
        # a rule's own state without a metric's is that of the plain rule; torch tells if they are
        # not as many
        plain = {
            p
            for index, p in zip(saved, parameters, strict=False)
            if index not in of_metric and self._is_plain(p, index, of_rule.get(index, {}))
        }
        self._has_stepped = False
        with self._rule_at_work() as rule:
            rule.load_state_dict({**state_dict, "state": of_rule | more})
            for index, shadow in zip(saved, held_by(rule.param_groups), strict=True):
                _restore_counts_(rule.state.get(shadow, {}), of_rule.get(index, {}))
        self.state.clear()
        for index, p in zip(saved, parameters, strict=True):
            if index in of_metric:
                self.state[p] = _on_device(of_metric[index], p.device)
        self._plain = plain
        self._plain_at = self.network.rescalings["done"]
        self._share_states()

    def _check_arrived(
        self,
        parameters: Iterable[tuple[int, Tensor]],
        without_metric: Set[int],
        of_rule: Mapping[int, State],
    ) -> None:
        """Refuse a state that this optimizer saved after steps, if only the rule's entries were loaded.

        Checkpoint tools load what the new optimizer has room for. Before its first step Adagrad has
        entries of its own already, and none of the metric.

        Args:
            parameters: index in the state -> parameter, in pairs.
            without_metric: indices of states of ours that have no entry of the metric.
            of_rule: index -> the rule's entries.

        Raises:
            ValueError: entries of the metric are missing.
        """
        for index, p in parameters:
            steps = of_rule.get(index, {}).get("step", 0)
            needs_metric = id(p) in self.network.names_by_id
            if needs_metric and index in without_metric and steps:
                raise lost(type(self).__name__, "the part of its metric did not arrive")

    def _is_plain(self, p: Tensor, index: int, state: State) -> bool:
        """Return whether a saved state without a metric's is to be taken into coordinates.

        Raises:
            ValueError: it is, and cannot be.
        """
        name = self.network.names_by_id.get(id(p))
        if name is None or not state or state.get("step") == 0:
            return False
        assert self.rule is not None
        expect_plain(self.rule, state, type(self).__name__, name)
        NetworkOptimizer._check_state(self, name, index, state)
        return True

    def _own_part(self, key: str, value: Any, p: Any) -> Any:
        of_rule = self._gathers and not key.startswith(_OURS)
        return shard_rows(value, p) if of_rule else super()._own_part(key, value, p)


_OURS = "metric_"


def _split_states(
    states: Mapping[int, State],
) -> tuple[dict[int, State], dict[int, State]]:
    """Split saved states into the metric's and the rule's, and leave out the empty ones."""
    of_metric: dict[int, State] = {}
    of_rule: dict[int, State] = {}
    for index, state in states.items():
        for key, value in state.items():
            if key.startswith(_OURS):
                of_metric.setdefault(index, {})[key.removeprefix(_OURS)] = value
            else:
                of_rule.setdefault(index, {})[key] = value
    return of_metric, of_rule


def _restore_counts_(state: State, saved: Mapping[str, Any]) -> None:
    """Put counts back as they were saved: torch rounds or widens them to the parameter's type."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and not value.dim():
            state[key] = value.to(state[key].device, copy=True)


def _on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _step_chunk(rule: Optimizer, chunk: list[CoordinateView]) -> None:
    """Let the rule step the coordinates of a chunk."""
    for some in split_by_momentum(rule, chunk):
        with restricted_to(rule, {id(view.shadow): view.shadow for view in some}):
            rule.step()


def _copied_states(rule: Optimizer) -> dict[Any, Any]:
    """Return what a rule keeps, its tensors in memory of their own."""
    return {
        key: _copied_state(kept) if isinstance(kept, dict) else kept
        for key, kept in rule.state.items()
    }


def _copied_state(kept: dict[Any, Any]) -> dict[Any, Any]:
    copied = dict(kept)
    for name, value in kept.items():
        if isinstance(value, Tensor):
            copied[name] = value.clone()
        elif isinstance(value, list):
            copied[name] = list(value)
    return copied


@contextmanager
def _states_kept(rule: Optimizer) -> Iterator[None]:
    """Put a rule's state back if a step raises."""
    before = _copied_states(rule)
    try:
        yield
    except BaseException:
        rule.state.clear()
        rule.state.update(before)
        raise


def _in_few_passes(
    rule: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], options: dict[str, Any]
) -> Optimizer:
    """Return the rule, with kernels for whole steps where torch has them and no others were asked for."""
    if options.keys() & {"fused", "foreach", "capturable", "differentiable"}:
        return rule(groups, **options)
    traits = RULES.get(rule) if isinstance(rule, type) else None
    if traits is None:
        return rule(groups, **options)
    if traits.replacement is not None:
        return traits.replacement(groups, **options)
    on_cpu = all(p.device.type == "cpu" for p in held_by(groups))
    if traits.kernel and (on_cpu or traits.kernel_on == "any"):
        return rule(groups, **options, **{traits.kernel: True})
    return rule(groups, **options)
