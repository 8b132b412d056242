"""Path-SGD's step in two compiled calls, one for kappa and one for the parameters.

It does what :class:`PathOptimizer` and :class:`PathSGD` do, on the same state, where nothing is out of the ordinary.
Other steps are left to them: the first one, which measures the gauge, and those where kappa is extreme.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.fused import step as loops
from pathspace.fused.plan import Plan
from pathspace.network.squares import Outer
from pathspace.optim.network_optimizer import Active
from pathspace.optim.path_optimizer import (
    Metric,
    PathOptimizer,
    clip_factor,
    gauge_of,
    keep,
    kept,
)

_TYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(slots=True)
class _Entry:
    """One parameter, with its place in the plan; None outside the network.

    The tables hold addresses, so what they point to is kept here: memory that somebody else let go must not be read.
    """

    p: Tensor
    state: dict[str, Any]
    place: int | None
    velocity: Tensor | None = None
    address: int = 0  # of the velocity
    metric: tuple[Tensor, ...] = ()

    def is_as_it_was(self, states: Any) -> bool:
        """Whether the state is still the one that the tables were made from, with the same velocity."""
        p, kept = self.p, self.velocity
        if states.get(p) is not self.state or not p.is_contiguous():
            return False
        if kept is None:
            return True
        return (
            self.state.get("momentum_buffer") is kept and kept.data_ptr() == self.address and _fits(kept, p)
        )


class FusedDescent:
    """The step of a :class:`PathSGD` whose kappa has a plan.

    Args:
        optimizer: whose options and state these are.
        plan: of its network.
    """

    def __init__(self, optimizer: PathOptimizer, plan: Plan) -> None:
        self._optimizer, self._plan = optimizer, plan
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedDescent:
        # the tables hold addresses
        return FusedDescent(copy.deepcopy(self._optimizer, memo), copy.deepcopy(self._plan, memo))

    def forget(self) -> None:
        """Look at everything anew at the next step: somebody else wrote to the state."""
        self._states: Any = None
        self._places: list[tuple[int, torch.dtype]] = []  # addresses of the parameters, and their types
        self._options: list[Any] = []

    def take(self, active: Active) -> bool:
        """Take the step, or return False with nothing done."""
        states, clip_norm = self._optimizer.state, self._optimizer.clip_norm
        places = [(p.data_ptr(), p.dtype) for p, _ in active]
        known = self._states is states and self._places == places
        if not (known and all(e.is_as_it_was(states) for e in self._entries)) and not self._prepare(
            active, states
        ):
            return False
        gradients = [p.grad for p, _ in active]
        if not all(_fits(g, p) for g, (p, _) in zip(gradients, active, strict=True) if g is not None):
            return False
        if not self._take_options([group for _, group in active]):
            return False
        if not self._measure():
            return False
        self._tensors[:, loops.GRADIENT] = [g.data_ptr() for g in gradients if g is not None]
        factor = 1.0
        if clip_norm is not None:
            square = loops.squared_norm(self._tensors, self._numbers, self._scratch)
            factor = clip_factor(square, clip_norm)
        loops.descend(self._tensors, self._numbers, factor, self._scratch)
        # autograd cannot see this, and would go on with activations of the weights before
        torch.autograd.graph.increment_version([p for p, _ in active])
        return True

    def _prepare(self, active: Active, states: Any) -> bool:
        """Make the tables; False if a tensor is not as the loops need it, or the gauge is not yet known."""
        self.forget()
        entries, gauges, names = [], {}, self._optimizer.network.names_by_id
        dtype = active[0][0].dtype
        for p, _ in active:
            name, state = names.get(id(p)), states[p]
            if p.dtype != dtype or not p.is_contiguous() or p.device.type != "cpu":
                return False
            if name is not None and "gauge_rows" not in state:
                return False
            entries.append(_Entry(p, state, None if name is None else self._plan.place(name)))
            if name is not None:
                gauges[name] = gauge_of(state)
        if dtype not in _TYPES or not gauges:
            return False
        self._plan.weigh(gauges)
        self._entries, self._inside = entries, [e for e in entries if e.place is not None]
        self._rows = [i for i, e in enumerate(entries) if e.place is not None]
        self._tensors = np.zeros((len(entries), 8), np.int64)
        self._numbers = np.zeros((len(entries), 6))
        self._numbers[:, loops.FACTOR] = 1.0
        for i, e in enumerate(entries):
            rows = e.p.shape[0] if e.p.dim() > 1 and e.p.numel() else 1
            self._tensors[i] = [e.p.data_ptr(), 0, 0, rows, e.p.numel() // rows, loops.PLAIN, 0, 0]
        self._scratch = np.zeros(max(1, int(self._tensors[:, loops.COLUMNS].max())), _TYPES[dtype])
        # of a metric that is kept; of the plan's own, from the next time on that it is due
        self._is_plans = False
        metrics = [kept(e.state) for e in self._inside if "kappa" in e.state or "kappa_rows" in e.state]
        if len(metrics) == len(self._inside) and not self._point(metrics):
            return False
        self._states, self._places = states, [(e.p.data_ptr(), e.p.dtype) for e in entries]
        return True

    def _take_options(self, groups: list[dict[str, Any]]) -> bool:
        """The groups' options as they are now; False where there are some that the loops do not know."""
        options = [
            (
                g["path_decay"],
                (
                    float(g["lr"]),
                    g["weight_decay"],
                    g["momentum"],
                    g["nesterov"],
                    -1.0 if g["maximize"] else 1.0,
                ),
            )
            for g in groups
        ]
        if options == self._options:
            return True
        if any(path_decay for path_decay, _ in options):
            return False
        for i, (e, (_, known)) in enumerate(zip(self._entries, options, strict=True)):
            self._numbers[i, loops.LR :] = known
            if self._numbers[i, loops.MOMENTUM] and not self._tensors[i, loops.VELOCITY]:
                if "momentum_buffer" not in e.state:  # momentum 0 + d = d
                    e.state["momentum_buffer"] = torch.zeros_like(e.p)
                velocity = e.state["momentum_buffer"]
                if not _fits(velocity, e.p):
                    return False
                e.velocity, e.address = velocity, velocity.data_ptr()
                self._tensors[i, loops.VELOCITY] = e.address
        self._options = options
        return True

    def _measure(self) -> bool:
        """Kappa and its normalizers, afresh when they are due."""
        every, normalization = self._optimizer.refresh_every, self._optimizer.normalization
        if all(e.state.get("age", 0) % every for e in self._inside):
            for e in self._inside:
                e.state["age"] += 1
            return True
        self._optimizer.network.check_current()
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
        if self._is_plans:
            self._numbers[self._rows, loops.FACTOR] = normalizers
        else:
            metrics = [
                Metric(self._plan.value_at(e.place), c)
                for e, c in zip(self._inside, normalizers, strict=True)
            ]
            self._is_plans = self._point(metrics)
            if every > 1:
                for e, metric in zip(self._inside, metrics, strict=True):
                    keep(e.state, metric)
        return True

    def _point(self, metrics: list[Metric]) -> bool:
        """Let the tables point to metrics; False if the loops cannot read one."""
        for i, e, metric in zip(self._rows, self._inside, metrics, strict=True):
            values = metric.values
            parts = (values.rows, values.columns) if isinstance(values, Outer) else (values,)
            if not all(_fits(t, e.p) for t in parts):
                return False
            e.metric = parts
            self._numbers[i, loops.FACTOR] = metric.normalizer
            self._tensors[i, loops.FORM] = len(parts)
            for column, t in zip((loops.FIRST, loops.SECOND), parts, strict=False):
                self._tensors[i, column] = t.data_ptr()
        return True


def _fits(t: Tensor, p: Tensor) -> bool:
    return t.dtype == p.dtype and t.is_contiguous() and t.device.type == "cpu"
