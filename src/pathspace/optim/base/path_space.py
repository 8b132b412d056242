"""The base of optimizers in path space: the skeleton, the frame of every step, and the classes that it updates.

A rule of its own is one subclass that turns the gradient of a path (or of a parameter outside the
network) into a direction (`_direction`).

Letters: p parameter, g = dL/dp, x path coordinates, R ratios (see ``paths.space.frame``), eta lr.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from pathspace.metrics.checks import check_bounds, check_numbers
from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import all_finite, expect_finite, expect_paths
from pathspace.optim.base.conditioning import diagnose, gauge_of_nodes
from pathspace.optim.base.network_optimizer import Active, NetworkOptimizer, Parameters
from pathspace.optim.rules.clipping import changes, clip_factor
from pathspace.optim.rules.moments import MOMENTS, step_decayed_
from pathspace.paths.space.chart import Measure, chart
from pathspace.paths.space.frame import Frame
from pathspace.paths.space.reduction import expect_own, reduction_graph, used_edges
from pathspace.paths.space.skeleton import RULES, Rule, Skeleton
from pathspace.paths.space.skeleton import skeleton as choose
from pathspace.rescaling.optimizer_states import Group, State
from pathspace.squared.precision import widened

Units = Literal["balanced", "none"]
# name of a parameter of the network -> parameter, group
Inside = dict[str, tuple[Tensor, Group]]

_FRAMES = 16  # sets of parameters with a gradient whose frames are kept
_LOOK = 10  # steps between two looks at all weights, after as many steps that look
_ROOM = 60  # binary digits of a factor, up to which float32 holds its square


@dataclass
class _Moved:
    """Parameters that a step moves.

    Attributes:
        inside: parameters of the network, by name.
        weights: their values, in the type of the step.
        gradients: their gradients, in the type of the step.
        outside: parameters outside the network, with group and gradient.
    """

    inside: Inside = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outside: list[tuple[Tensor, Group, Tensor]] = field(default_factory=list)


class PathSpaceOptions(TypedDict, total=False):
    """The options that optimizers in path space share; see :class:`pathspace.optim.GSGD`."""

    clip_norm: float | None
    clamp: float | None
    units: Units
    skeleton_rate: float
    skeleton: Skeleton | Rule | None
    seed: int
    maximize: bool


class PathSpaceOptimizer(NetworkOptimizer):
    """Base of the optimizers in path space.

    Args:
        params: parameters or param groups.
        network: the traced network.
        defaults: options that groups may have of their own, ``lr`` and ``weight_decay`` among them.
        clip_norm, clamp, units, skeleton_rate, skeleton, seed, maximize: see
            :class:`pathspace.optim.GSGD`.
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        defaults: dict[str, Any],
        *,
        clip_norm: float | None = None,
        clamp: float | None = 2.0,
        units: Units = "balanced",
        skeleton_rate: float = 0.03,
        skeleton: Skeleton | Rule | None = None,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        check_bounds(clip_norm=clip_norm, clamp=clamp)
        check_numbers(skeleton_rate=skeleton_rate, seed=seed)
        if clamp is not None and not clamp > 1:
            raise ValueError(f"clamp must be greater than 1 or None, got {clamp}")
        if units not in ("balanced", "none"):
            raise ValueError(f"units must be 'balanced' or 'none', got {units!r}")
        if not skeleton_rate > 0:
            raise ValueError(f"skeleton_rate must be positive, got {skeleton_rate}")
        self.clip_norm = clip_norm
        self.clamp = clamp
        self.units = units
        self.skeleton_rate = skeleton_rate
        self._wanted: Skeleton | Rule = "largest" if skeleton is None else skeleton
        self._seed = int(seed)
        self._steps = 0
        self._start: dict[str, Tensor] = {}  # products and gauge at the first step, and counts
        self._frames: dict[tuple[str, ...], Frame] = {}
        self._far: bool | None = None  # not known yet
        self._rescalings = 0  # of the network when the skeleton was chosen
        self.skeleton: Skeleton | None = None
        super().__init__(params, network, {**defaults, "maximize": maximize})
        expect_paths(network)
        if isinstance(self._wanted, Skeleton):
            expect_own(self._wanted.graph, network, "skeleton was chosen")
        elif self._wanted not in RULES:
            raise ValueError(
                f"skeleton must be a Skeleton, 'largest', 'cyclic', 'random' or None, got {skeleton!r}"
            )

    _misread = ("momentum_buffer", *MOMENTS)

    @abstractmethod
    def _direction(self, g: Tensor, group: Group, state: State) -> Tensor:
        """Return what to subtract for lr = 1: a new tensor, or ``g``, which may be overwritten."""

    def expect_movable(self, network: Network, names: Iterable[str]) -> None:
        """Refuse to let states follow a rescaling; see :class:`NetworkOptimizer`.

        Raises:
            ValueError: some units have no basis paths, and the weights there step as in the network
                at the first step.
        """
        super().expect_movable(network, names)
        if self.skeleton is not None and self.skeleton.incomplete:
            raise ValueError(
                f"this {type(self).__name__} has units without basis paths, whose weights step as in the network that "
                "was balanced at the first step: rescale before the first step, or call choose_skeleton() after it"
            )

    @abstractmethod
    def _make_room(self, g: Tensor, group: Group, state: State) -> None:
        """Let a state have all that it will have after a step."""

    # --- the skeleton -----------------------------------------------------------------------------

    @tables_on_the_cpu()
    @torch.no_grad()
    def choose_skeleton(
        self, skeleton: Skeleton | Rule = "largest", generator: torch.Generator | None = None
    ) -> Skeleton:
        """Choose the skeleton anew, at the present weights.

        No weight changes. What is kept per path (momentum, Adam's moments) belongs to paths of the
        old skeleton and starts anew, as do units and counts.

        Args:
            skeleton: a skeleton, or the rule to choose one by.
            generator: see :func:`pathspace.paths.skeleton`.

        Returns:
            The skeleton.
        """
        self._forget_rehearsal()
        chosen = (
            skeleton
            if isinstance(skeleton, Skeleton)
            else choose(self.network, skeleton, generator)
        )
        self._begin(chosen)
        for p in self.network.parameters.values():
            self.state.pop(p, None)
        return chosen

    def _begin(self, chosen: Skeleton) -> None:
        network = self.network
        expect_own(chosen.graph, network, "skeleton was chosen")
        gauge = gauge_of_nodes(network)
        complete = torch.cat([torch.zeros(1, dtype=torch.bool), chosen.complete.repeat(2)]).to(
            gauge.device
        )
        products = chosen.products(network.parameters)
        # classes without a skeleton edge stand at the scale that they have in the balanced network
        fixed = torch.where(complete, products, gauge)
        # f is the gauge then: the first step of a weight is that of the balanced network
        units = (fixed / gauge).abs() if self.units == "balanced" else torch.ones_like(fixed)
        pace = torch.ones_like(fixed)
        self._adopt(chosen)
        if self.units == "balanced":
            # weights on no path may end at classes that no path gives a scale
            used = chosen.graph.unflatten(used_edges(network, chosen.graph))
            weights = {n: p.double() * used[n].to(p.device) for n, p in network.parameters.items()}
            whole = chart(network, chosen, weights, gauge.device)
            lengths = (
                Frame(whole, Measure(fixed, units, pace), weights)
                .look(weights)
                .lengths(weights, gauge)
            )
            whole.classes.put_(pace, math.sqrt(self.skeleton_rate) / lengths)
        none = torch.zeros((), dtype=torch.long, device=gauge.device)
        self._start = {
            "fixed": fixed,
            "units": units,
            "pace": pace,
            "clamped": none,
            "flipped": none.clone(),
        }

    def _adopt(self, chosen: Skeleton) -> None:
        self.skeleton = chosen
        self._frames = {}
        self._far = None
        self._rescalings = self.network.rescalings["done"]

    def _before_rehearsal(self) -> dict[str, Any]:
        return {
            "skeleton": self.skeleton,
            "start": self._start,
            "steps": self._steps,
            "at": self._rescalings,
        }

    def _restore(self, before: dict[str, Any]) -> None:
        super()._restore(before)
        self.skeleton = before["skeleton"]
        self._start = before["start"]
        self._steps = before["steps"]
        self._rescalings = before["at"]
        self._frames = {}
        self._far = None

    @property
    def _has_begun(self) -> bool:
        return self._rehearsal is None or self._rehearsal["skeleton"] is not None

    def _is_far(self) -> bool:
        """Return whether float32 has no room for the factors between gradients of weights and of paths, at first."""
        if self._far is None and self._start:
            factors = (self._start["units"] / self._start["fixed"]).abs().log2()
            self._far = bool((factors.nan_to_num(0.0, 0.0, 0.0).abs() > _ROOM).any())
        return bool(self._far)

    def _frame(self, weights: dict[str, Tensor]) -> Frame:
        """Path space at the present weights, with those parameters held that are not among ``weights``."""
        key = tuple(weights)
        frame = self._frames.get(key)
        if frame is None or frame.dtypes != [w.dtype for w in weights.values()]:
            assert self.skeleton is not None
            start = self._start
            measure = Measure(start["fixed"], start["units"], start["pace"])
            if len(self._frames) == _FRAMES:
                self._frames.clear()
            with tables_on_the_cpu():
                coordinates = chart(self.network, self.skeleton, weights, measure.fixed.device)
                frame = self._frames[key] = Frame(coordinates, measure, weights)
        return frame.look(weights)

    # --- steps ------------------------------------------------------------------------------------

    def _take(self, active: Active) -> None:
        self._expect_same_scales()
        names = self.network.names_by_id
        if self.skeleton is None and any(id(p) in names for p, _, _ in active):
            self._choose_wanted()
        moved = self._moved(active)
        if self._steps < _LOOK or self._steps % _LOOK == 0:
            expect_finite(moved.weights.values())
        self._steps += 1
        factor = self._step_inside(moved)
        for name, (p, _) in moved.inside.items():
            if moved.weights[name] is not p:
                p.copy_(moved.weights[name])
        for p, group, g in moved.outside:
            clipped = g * factor if changes(factor) else g
            step_decayed_(p, self._direction(clipped, group, self.state[p]), group)

    def _choose_wanted(self) -> None:
        """Begin with the skeleton that the constructor was asked for."""
        with tables_on_the_cpu():
            chosen = self._wanted
            if not isinstance(chosen, Skeleton):
                # of its own, so that the user's random state is not touched
                generator = torch.Generator().manual_seed(self._seed)
                chosen = choose(self.network, chosen, generator)
            self._begin(chosen)

    def _moved(self, active: Active) -> _Moved:
        """Sort the parameters that a step moves, in the type that it is computed in."""
        names = self.network.names_by_id
        wide = torch.Tensor.double if self._is_far() else widened
        moved = _Moved()
        for p, group, g in active:
            name = names.get(id(p))
            if name is None:
                g = widened(g)
                moved.outside.append((p, group, -g if group["maximize"] else g))
                continue
            g = wide(g)
            if group["lr"] == 0:
                # a weight stays as it is, as it does without a gradient, but tools that load a
                # state ask a first such step what it will hold
                self._make_room(g, group, self.state[p])
                continue
            moved.weights[name] = wide(p)
            moved.gradients[name] = -g if group["maximize"] else g
            moved.inside[name] = (p, group)
        return moved

    def _expect_same_scales(self) -> None:
        """Raise RuntimeError if units without basis paths were rescaled after the first step."""
        if self.skeleton is None or self.network.rescalings["done"] == self._rescalings:
            return
        if self.skeleton.incomplete:
            raise RuntimeError(
                "the network was rescaled after the first step of the optimizer, and has units without basis paths, "
                "whose weights step as in the balanced one: call choose_skeleton(), or rescale before the first step"
            )

    def _step_inside(self, moved: _Moved) -> float | Tensor:
        """Step the parameters of the network, ``moved.weights``, in path space.

        Returns:
            The factor that clips the gradients outside the network to ``clip_norm``.
        """
        inside = moved.inside
        weights = moved.weights
        outside = [g for _, _, g in moved.outside]
        if not inside:
            return self._clipping(outside)
        frame = self._frame(weights)
        if self.clip_norm is None and all(self._descends(group) for _, group in inside.values()):
            self._descend(frame, inside, weights, moved.gradients)
            return 1.0
        gradients = frame.gradients(weights, moved.gradients)
        # before anything is made of them that is kept
        self._expect_finite(frame.moments)
        factor = self._clipping([*gradients.values(), *outside])
        self._move(frame, inside, weights, gradients, factor)
        return factor

    def _clipping(self, gradients: Iterable[Tensor]) -> float | Tensor:
        """Return what scales all gradients down to ``clip_norm`` together."""
        flat = [g.reshape(-1) for g in gradients]
        # all rates may be 0
        if self.clip_norm is None or not flat:
            return 1.0
        squares = [torch.dot(g, g).double().to(flat[0].device) for g in flat]
        return clip_factor(torch.stack(squares).sum(), self.clip_norm)

    def _descends(self, group: Group) -> bool:
        """Return whether a group's direction is the gradient itself."""
        del group
        return False

    def _descend(
        self, frame: Frame, inside: Inside, weights: dict[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        """Step along the gradient."""
        lrs = _rates(inside)
        shrinking = _shrinking(inside)
        ratios = self._clamped(frame.gradient_ratios(weights, gradients, lrs, shrinking))
        frame.move_(weights, gradients, lrs, ratios, shrinking, of_weights=True)

    def _move(
        self,
        frame: Frame,
        inside: Inside,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        factor: float | Tensor,
    ) -> None:
        """Step along the rule's direction; ``gradients`` are those of the paths."""
        directions = {}
        for name, (p, group) in inside.items():
            g = gradients[name].mul_(factor) if changes(factor) else gradients[name]
            directions[name] = self._direction(g, group, self.state[p])
        lrs = _rates(inside)
        shrinking = _shrinking(inside)
        ratios = self._clamped(frame.ratios(directions, lrs, shrinking))
        frame.move_(weights, directions, lrs, ratios, shrinking)

    @staticmethod
    def _expect_finite(values: Tensor) -> None:
        # a step would wait for a GPU
        if not values.is_cuda and not all_finite(values):
            raise FloatingPointError(
                "a step in path space is not finite: weights or gradients are not, because training diverged (lower "
                "the learning rate or clip) or a batch held NaN; parameters are not changed"
            )

    def _clamped(self, ratios: Tensor) -> Tensor:
        self._expect_finite(ratios)
        if self.clamp is None:
            self._start["flipped"] += (ratios < 0).sum()
            return ratios
        kept = ratios.clamp(1 / self.clamp, self.clamp)
        if kept.is_cuda or not torch.equal(kept, ratios):  # the GPU need not be waited for
            self._start["clamped"] += (kept != ratios).count_nonzero()
        return kept

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        return {} if name == "_frames" else super()._copied(name, value, memo)

    # --- the state --------------------------------------------------------------------------------

    @tables_on_the_cpu()
    @torch.no_grad()
    def diagnostics(self) -> dict[str, Any]:
        """Return how well conditioned path space is at the present weights, and what became of the skeleton.

        Returns:
            ``classes``: how many unit classes move. ``incomplete``: names of those that no skeleton
            edge enters or leaves, whose weights step as in the balanced network. ``multipliers``:
            smallest, median and largest of 1 / (A_u B_v)^2, by which a rule without units
            multiplies the gradients of the balanced network. ``smallest_ratio``, ``largest_ratio``:
            of A_c to its value when the skeleton was chosen. ``clamped``: how often a ratio R was
            clamped, ``flipped``: how often a skeleton weight changed its sign, since then.

        Raises:
            RuntimeError: before the first step, unless a skeleton was chosen.
        """
        if self.skeleton is None:
            raise RuntimeError(
                "the skeleton is chosen at the first step: take one, or call choose_skeleton, before"
            )
        return diagnose(self.network, self.skeleton, self._start)

    def _packed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Store skeleton and units with a parameter, for tools that take states parameter by parameter."""
        kept: State = {key: value.clone() for key, value in self._start.items()}
        if self.skeleton is not None:
            kept |= self.skeleton.as_state()
        first = next(
            i for i, p in enumerate(self._all_parameters()) if id(p) in self.network.names_by_id
        )
        state = {**packed["state"], first: {**packed["state"].get(first, {}), "path_space": kept}}
        return super()._packed({**packed, "state": state})

    def _load(self, state_dict: dict[str, Any]) -> None:
        states = {index: dict(state) for index, state in state_dict["state"].items()}
        packed = [state.pop("path_space") for state in states.values() if "path_space" in state]
        if not packed:
            raise KeyError(
                "this is not the state of an optimizer in path space: it has no entry 'path_space'"
            )
        kept = copy.deepcopy(packed[0])
        restored = None
        if "edges" in kept:
            restored = Skeleton.restored(reduction_graph(self.network), kept)
        states = {index: state for index, state in states.items() if state}
        super()._load({**state_dict, "state": states})
        if restored is not None:
            device = next(iter(self.network.parameters.values())).device
            self._start = {key: value.to(device) for key, value in kept.items()}
            self._adopt(restored)
        else:
            self.skeleton = None
            self._start = {}
            self._frames = {}


def _rates(inside: Inside) -> dict[str, float]:
    """Learning rates by name."""
    return {name: float(group["lr"]) for name, (_, group) in inside.items()}


def _shrinking(inside: Inside) -> dict[str, float] | None:
    """Return what decay multiplies path values by, by name; None without decay."""
    if not any(group["weight_decay"] for _, group in inside.values()):
        return None
    return {
        name: 1 - float(group["lr"]) * group["weight_decay"] for name, (_, group) in inside.items()
    }
