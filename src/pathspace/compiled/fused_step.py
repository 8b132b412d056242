"""A step in two compiled calls, one for kappa and one for the parameters.

It does what the optimizers do, on the same state, where nothing is out of the ordinary. Other steps are left to them:
the first one, which measures the gauge, and those where kappa is extreme.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pathspace.compiled import adam, descent
from pathspace.compiled.data_plan import DataPlan
from pathspace.compiled.plan import Plan
from pathspace.optim.base.metric_state import Metric, gauge_of, keep, kept
from pathspace.optim.base.network_optimizer import Active
from pathspace.optim.base.path_optimizer import PathOptimizer
from pathspace.optim.base.same_states import SameStates
from pathspace.optim.rules.clipping import clip_factor
from pathspace.squared.squares import Outer

_TYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(slots=True)
class _Entry:
    """One parameter, with its place in the plan; None outside the network.

    The tables hold addresses, so what they point to is kept here: memory that somebody else let go must not be read.
    """

    p: Tensor
    state: dict[str, Any]
    place: int | str | None
    address: int
    moments: list[tuple[str, Tensor, int]] = field(default_factory=list)  # key in the state, tensor, address
    metric: tuple[Tensor, ...] = ()

    def takes(self, key: str) -> int | None:
        """The address of a moment in the state, made of zeros if it is new; None if the loops cannot read it."""
        if key not in self.state:
            self.state[key] = torch.zeros_like(self.p)
        moment = self.state[key]
        if not _fits(moment, self.p):
            return None
        self.moments.append((key, moment, moment.data_ptr()))
        return moment.data_ptr()

    def is_as_it_was(self, p: Tensor, dtype: torch.dtype) -> bool:
        """Whether this is the parameter, and its moments are those, that the tables were made from."""
        if p is not self.p or p.data_ptr() != self.address or p.dtype != dtype or not p.is_contiguous():
            return False
        for key, moment, address in self.moments:
            if self.state.get(key) is not moment or moment.data_ptr() != address:
                return False
            if moment.dtype != dtype or not moment.is_contiguous():
                return False
        return True


class FusedStep:
    """The step of an optimizer whose kappa has a plan; a rule is a subclass.

    Args:
        optimizer: whose options and state these are.
        plan: of its network.
    """

    def __init__(self, optimizer: PathOptimizer, plan: Plan | DataPlan) -> None:
        self._optimizer, self._plan = optimizer, cast(Any, plan)
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedStep:
        # the tables hold addresses
        return type(self)(copy.deepcopy(self._optimizer, memo), copy.deepcopy(self._plan, memo))

    def forget(self) -> None:
        """Look at everything anew at the next step: somebody else wrote to the state."""
        self._states = SameStates()
        self._entries: list[_Entry] = []
        self._options: list[Any] = []

    # what a rule says

    @abstractmethod
    def _lay_out(self) -> None:
        """Make tables for the parameters in ``_entries``."""

    @abstractmethod
    def _option(self, group: dict[str, Any]) -> Any:
        """The options of a group; None where there are some that the loops do not know."""

    @abstractmethod
    def _take_options(self, options: list[Any]) -> bool:
        """Write options to the tables; False if the loops cannot read what they need."""

    @abstractmethod
    def _use_kept(self, metrics: list[Metric]) -> bool:
        """Take metrics that the state kept; False if the loops cannot read one."""

    @abstractmethod
    def _use(self, normalizers: list[float]) -> None:
        """Take the plan's new kappa."""

    @abstractmethod
    def _advance(self, gradients: list[int], clip_norm: float | None) -> None:
        """Move the parameters; gradients are given by their addresses."""

    def take(self, active: Active) -> bool:
        """Take the step, or return False with nothing done."""
        states = self._optimizer.state
        if not self._is_as_it_was(active, states) and not self._prepare(active, states):
            return False
        gradients: list[int] = []
        options: list[Any] = []
        last, option = None, None
        for p, group in active:
            g = p.grad
            if g is None or g.dtype != p.dtype or not g.is_contiguous():  # its device is p's
                return False
            gradients.append(g.data_ptr())
            if group is not last:
                option, last = self._option(group), group
            options.append(option)
        if options != self._options:
            if None in options or not self._take_options(options):
                return False
            self._options = options
        if not self._measure():
            return False
        self._advance(gradients, self._optimizer.clip_norm)
        # autograd cannot see this, and would go on with activations of the weights before
        torch.autograd.graph.increment_version([p for p, _ in active])
        return True

    def _is_as_it_was(self, active: Active, states: Any) -> bool:
        """Whether the tables still hold; every step asks."""
        if len(active) != len(self._entries) or not self._states.are(states):
            return False
        return all(e.is_as_it_was(p, self._dtype) for e, (p, _) in zip(self._entries, active, strict=True))

    def _prepare(self, active: Active, states: Any) -> bool:
        """Make the tables; False if a tensor is not as the loops need it, or the gauge is not yet known."""
        self.forget()
        entries, gauges, names = [], {}, self._optimizer.network.names_by_id
        self._dtype = active[0][0].dtype
        for p, _ in active:
            name, state = names.get(id(p)), states[p]
            if p.dtype != self._dtype or not p.is_contiguous() or p.device.type != "cpu":
                return False
            if name is not None:
                if "gauge_rows" not in state or "scales" in state:
                    return False
                gauges[name] = gauge_of(state)
            place = None if name is None else self._plan.place(name)
            entries.append(_Entry(p, state, place, p.data_ptr()))
        if self._dtype not in _TYPES or not gauges:
            return False
        self._plan.weigh(gauges)
        self._entries, self._inside = entries, [e for e in entries if e.place is not None]
        self._rows = [i for i, e in enumerate(entries) if e.place is not None]
        # of tables; a list takes longer
        self._where = slice(None) if len(self._rows) == len(entries) else self._rows
        self._lay_out()
        metrics = [kept(e.state) for e in self._inside if "kappa" in e.state or "kappa_rows" in e.state]
        if len(metrics) == len(self._inside) and not self._use_kept(metrics):
            return False
        self._states = SameStates(states)
        return True

    def _measure(self) -> bool:
        """Kappa and its normalizers, afresh when they are due."""
        every, normalization = self._optimizer.refresh_every, self._optimizer.normalization
        for e in self._inside:
            if not e.state.get("age", 0) % every:
                break
        else:
            for e in self._inside:
                e.state["age"] += 1
            return True
        means = self._plan.means()
        if means is None:
            return False
        normalizers = []
        for e in self._inside:
            state = e.state
            if normalization == "refreshed":
                state["mean"] = means[e.place]
            state["normalizer"] = 1.0 if normalization == "none" else state["mean"]
            normalizers.append(state["normalizer"])
            if every > 1:
                state["age"] = 1
        self._use(normalizers)
        return True

    def _keep(self, metrics: Sequence[Metric]) -> None:
        """Keep metrics in the state until the next are due."""
        if self._optimizer.refresh_every > 1:
            for e, metric in zip(self._inside, metrics, strict=True):
                keep(e.state, metric)


class FusedDescent(FusedStep):
    """The step of Path-SGD."""

    def _lay_out(self) -> None:
        self._tensors = np.zeros((len(self._entries), 8), np.int64)
        self._numbers = np.zeros((len(self._entries), 6))
        self._numbers[:, descent.FACTOR] = 1.0
        for i, e in enumerate(self._entries):
            rows = e.p.shape[0] if e.p.dim() > 1 and e.p.numel() else 1
            self._tensors[i] = [e.p.data_ptr(), 0, 0, rows, e.p.numel() // rows, descent.PLAIN, 0, 0]
        longest = int(self._tensors[:, [descent.ROWS, descent.COLUMNS]].max())
        self._scratch = np.ones((3, max(1, longest)), _TYPES[self._dtype])
        self._has_plans = False  # whether the metrics are in the plan's memory

    def _option(self, group: dict[str, Any]) -> Any:
        if group["path_decay"]:
            return None
        sign = -1.0 if group["maximize"] else 1.0
        return float(group["lr"]), group["weight_decay"], group["momentum"], group["nesterov"], sign

    def _take_options(self, options: list[Any]) -> bool:
        for i, (e, option) in enumerate(zip(self._entries, options, strict=True)):
            self._numbers[i, descent.LR :] = option
            if self._numbers[i, descent.MOMENTUM] and not self._tensors[i, descent.VELOCITY]:
                velocity = e.takes("momentum_buffer")  # new, momentum 0 + d = d
                if velocity is None:
                    return False
                self._tensors[i, descent.VELOCITY] = velocity
        return True

    def _use_kept(self, metrics: list[Metric]) -> bool:
        for i, e, metric in zip(self._rows, self._inside, metrics, strict=True):
            values = metric.values
            parts = (values.rows, values.columns) if isinstance(values, Outer) else (values,)
            if not all(_fits(t, e.p) for t in parts):
                return False
            e.metric = parts
            self._numbers[i, descent.FACTOR] = metric.normalizer
            self._tensors[i, descent.FORM] = len(parts)
            for column, t in zip((descent.FIRST, descent.SECOND), parts, strict=False):
                self._tensors[i, column] = t.data_ptr()
        return True

    def _use(self, normalizers: list[float]) -> None:
        if not self._has_plans:
            ends = zip(self._inside, normalizers, strict=True)
            metrics = [Metric(self._plan.value_at(e.place), c) for e, c in ends]
            self._has_plans = self._use_kept(metrics)
            self._keep(metrics)
        self._numbers[self._where, descent.FACTOR] = normalizers

    def _advance(self, gradients: list[int], clip_norm: float | None) -> None:
        self._tensors[:, descent.GRADIENT] = gradients
        factor = 1.0
        if clip_norm is not None:
            square = descent.squared_norm(self._tensors, self._numbers, self._scratch)
            factor = clip_factor(square, clip_norm)
        descent.descend(self._tensors, self._numbers, factor, self._scratch)


class FusedAdam(FusedStep):
    """The step of Path-Adam; the metric is sqrt(kappa / c)."""

    def _lay_out(self) -> None:
        self._tensors = np.zeros((len(self._entries), 6), np.int64)
        self._numbers = np.zeros((len(self._entries), 7))
        for i, e in enumerate(self._entries):
            self._tensors[i] = [e.p.data_ptr(), 0, 0, 0, e.p.numel(), 0]
        self._like = np.zeros(1, _TYPES[self._dtype])
        self._roots: list[Tensor] = []
        self._inverse: list[tuple[Tensor, ...]] = []  # 1 / w_e of the gauge, by rows and columns
        self._sources = np.zeros((len(self._inside), 7), np.int64)

    def _option(self, group: dict[str, Any]) -> Any:
        if group["amsgrad"]:
            return None
        sign = -1.0 if group["maximize"] else 1.0
        return float(group["lr"]), group["weight_decay"], *group["betas"], group["eps"], sign

    def _take_options(self, options: list[Any]) -> bool:
        for i, (e, option) in enumerate(zip(self._entries, options, strict=True)):
            self._numbers[i, adam.LR : adam.STEP] = option
            if e.moments:
                continue
            if "exp_avg" not in e.state:
                e.state["step"] = 0
                e.state.pop("exp_avg_sq", None)
            mean, square = e.takes("exp_avg"), e.takes("exp_avg_sq")
            if mean is None or square is None:
                return False
            self._tensors[i, adam.MEAN : adam.SIZE] = mean, square
        return True

    def _use_kept(self, metrics: list[Metric]) -> bool:
        for i, e, metric in zip(self._rows, self._inside, metrics, strict=True):
            if isinstance(metric.values, Outer) or not _fits(metric.values, e.p):
                return False
            e.metric = (metric.values,)
            self._tensors[i, adam.ROOT] = metric.values.data_ptr()
        return True

    def _use(self, normalizers: list[float]) -> None:
        if not self._roots:
            self._roots = [torch.empty_like(e.p) for e in self._inside]
            for i, (e, root) in enumerate(zip(self._inside, self._roots, strict=True)):
                rows = e.p.shape[0] if e.p.dim() else 1
                columns = e.p.numel() // rows
                kappa, gauge = self._plan.value_at(e.place), gauge_of(e.state)
                factors = (kappa.rows, kappa.columns) if isinstance(kappa, Outer) else (kappa,)
                inverse = (
                    gauge.rows.reciprocal().expand(rows, 1),
                    gauge.columns.reciprocal().expand(1, columns),
                )
                inverse = tuple(t.to(e.p.dtype).contiguous() for t in inverse)
                self._inverse.append(inverse)
                places = [t.data_ptr() for t in (root, *inverse, *factors)]
                self._sources[i] = [rows, columns, *places, *[0] * (2 - len(factors))]
            metrics = [Metric(root, 1.0) for root in self._roots]
            self._use_kept(metrics)
            self._keep(metrics)
        damping = self._optimizer.damping
        added = [damping * e.state["mean"] if damping else 0.0 for e in self._inside]
        adam.roots(self._sources, np.array([normalizers, added]), self._like)

    def _advance(self, gradients: list[int], clip_norm: float | None) -> None:
        self._tensors[:, adam.GRADIENT] = gradients
        steps = []
        for e in self._entries:
            e.state["step"] += 1
            steps.append(e.state["step"])
        self._numbers[:, adam.STEP] = steps
        factor = 1.0
        if clip_norm is not None:
            factor = clip_factor(adam.squared_norm(self._tensors, self._like), clip_norm)
        adam.advance(self._tensors, self._numbers, factor, self._like)


def _fits(t: Tensor, p: Tensor) -> bool:
    return t.dtype == p.dtype and t.is_contiguous() and t.device.type == "cpu"
