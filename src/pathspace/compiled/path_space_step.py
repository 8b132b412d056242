"""A step in path space by two compiled calls: one for the coordinates, one for the parameters.

It does what the optimizers in path space do, on the same state. The first step, which chooses the skeleton, is left to
them, and so are steps where a tensor is not as the loops need it.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.compiled import path_space as loops
from pathspace.network.devices import cpu_by_default
from pathspace.optim.base.network_optimizer import Active
from pathspace.optim.base.path_space import PathSpaceOptimizer
from pathspace.optim.rules.clipping import clip_factor
from pathspace.paths.space.chart import Chart, Ends, Measure, chart
from pathspace.paths.space.slots import Index

_TYPES = {torch.float32: "float32", torch.float64: "float64"}
_KEPT = 16  # sets of parameters with a gradient whose tables are kept
_NONE = (-1, -1, 0)  # nodes by row, by column, and how far the columns of two rows are apart
_Key = list[tuple[int, int]]  # identities and sizes of the parameters that move


class PathSpaceStep:
    """The step of an optimizer in path space.

    Args:
        optimizer: whose options and state these are.
        adaptive: whether its rule is Adam's; SGD's otherwise.
    """

    def __init__(self, optimizer: PathSpaceOptimizer, *, adaptive: bool) -> None:
        self._optimizer, self._adaptive = optimizer, adaptive
        self._start: dict[str, Tensor] | None = None  # that of the optimizer when the tables were made
        self._tables: list[_Tables] = []  # the last used comes last

    def __deepcopy__(self, memo: dict[int, Any]) -> PathSpaceStep:
        # the tables hold addresses
        return type(self)(copy.deepcopy(self._optimizer, memo), adaptive=self._adaptive)

    def take(self, active: Active, start: dict[str, Tensor]) -> int | None:
        """Take the step.

        Args:
            active: parameters with a gradient, each with its group.
            start: products, units and pace, from when the skeleton was chosen.

        Returns:
            How many R were clamped (or are negative, without a clamp); None if nothing was done, but that new moments
            may be in the state, all zero.
        """
        optimizer = self._optimizer
        moving: list[tuple[Tensor, dict[str, Any]]] = []
        key: _Key = []
        places: list[tuple[int, int, int, int]] = []
        options: list[tuple[float, ...]] = []
        dtype, states = active[0][0].dtype, optimizer.state
        last, option = None, None
        for p, group in active:
            if group is not last:
                last, option = group, self._option(group)
            g = p.grad
            if option is None or g is None or p.dtype != dtype or g.dtype != dtype or not p.is_cpu:
                return None
            if option[loops.LR] == 0:  # a weight stays as it is, as it does without a gradient
                continue
            if not (p.is_contiguous() and g.is_contiguous()):
                return None
            kept: dict[str, Any] = {}
            mean, square = 0, 0
            if self._adaptive:
                kept = states[p]
                mean, square = _moment(kept, "exp_avg", p), _moment(kept, "exp_avg_sq", p)
            elif option[loops.MOMENTUM]:
                mean = _moment(states[p], "momentum_buffer", p)
            if mean is None or square is None:
                return None
            moving.append((p, kept))
            key.append((id(p), p.numel()))
            places.append((p.data_ptr(), g.data_ptr(), mean, square))
            options.append(option)
        tables = self._tables_of(key, moving, dtype, start)
        if tables is None:
            return None
        steps = None
        if self._adaptive:
            for _, kept in moving:
                kept["step"] += 1
            steps = [kept["step"] for _, kept in moving]
        tables.write(places, options, steps)
        count = self._advance(tables)
        # autograd cannot see this, and would go on with activations of the weights before
        torch.autograd.graph.increment_version([p for p, _ in moving])
        return count

    def _advance(self, tables: _Tables) -> int:
        optimizer, factor = self._optimizer, 1.0
        square = loops.survey(*tables.surveyed, optimizer.clip_norm is not None)
        if optimizer.clip_norm is not None:
            factor = clip_factor(square, optimizer.clip_norm)
        clamp = 0.0 if optimizer.clamp is None else float(optimizer.clamp)
        return loops.advance(*tables.advanced, factor, clamp, self._adaptive)

    def _option(self, group: dict[str, Any]) -> tuple[float, ...] | None:
        """The options of a group, in the order of the table of numbers; None if the loops do not know one."""
        lr = float(group["lr"])
        numbers = lr, 1 - lr * group["weight_decay"], -1.0 if group["maximize"] else 1.0
        if self._adaptive:
            return None if group["amsgrad"] else (*numbers, *group["betas"], group["eps"])
        return *numbers, group["momentum"], float(group["nesterov"])

    def _tables_of(
        self,
        key: _Key,
        moving: list[tuple[Tensor, dict[str, Any]]],
        dtype: torch.dtype,
        start: dict[str, Tensor],
    ) -> _Tables | None:
        """The tables of these parameters; None if the loops cannot read them, or none belongs to the network."""
        if self._start is not start:  # another skeleton
            self._start, self._tables = start, []
        for i in reversed(range(len(self._tables))):
            if self._tables[i].key == key and self._tables[i].dtype == dtype:
                self._tables.append(self._tables.pop(i))
                return self._tables[-1]
        names = self._optimizer.network.names_by_id
        if dtype not in _TYPES or not any(id(p) in names for p, _ in moving):
            return None
        with cpu_by_default():
            made = _Tables(self._optimizer, start, key, [p for p, _ in moving], dtype)
        self._tables = [*self._tables[1 - _KEPT :], made]
        return made


def _moment(state: dict[str, Any], name: str, p: Tensor) -> int | None:
    """The address of a moment in the state, made of zeros if it is new; None if the loops cannot read it."""
    moment = state.get(name)
    if moment is None:
        if name == "exp_avg":
            state["step"] = 0
            state.pop("exp_avg_sq", None)
        moment = state[name] = torch.zeros_like(p)
    fits = (
        moment.dtype == p.dtype and moment.is_contiguous() and moment.is_cpu and moment.numel() == p.numel()
    )
    return moment.data_ptr() if fits else None


class _Tables:
    """What the loops read and write, for one set of parameters; their addresses and options change.

    Attributes:
        surveyed: arguments of the first call.
        advanced: arguments of the second.
    """

    def __init__(
        self,
        optimizer: PathSpaceOptimizer,
        start: dict[str, Tensor],
        key: _Key,
        parameters: list[Tensor],
        dtype: torch.dtype,
    ) -> None:
        network, skeleton = optimizer.network, optimizer.skeleton
        assert skeleton is not None
        self.key, self.dtype = key, dtype
        self._parameters = parameters  # their identities are taken
        names = [network.names_by_id.get(id(p)) for p in parameters]
        found = chart(network, skeleton, {n for n in names if n is not None}, torch.device("cpu"))
        self._tensors = np.zeros((len(parameters), loops.TENSOR), np.int64)
        self._tensors[:, loops.SOURCE :] = 2 * _NONE
        self._numbers = np.zeros((len(parameters), loops.NUMBER))
        self._options: list[tuple[float, ...]] = []
        lists: list[np.ndarray] = []
        edges: list[np.ndarray] = []  # flat indices of the K, by tensor
        owners: list[np.ndarray] = []
        numbers: list[np.ndarray] = []  # the chart's, which count up otherwise
        for i, (name, p) in enumerate(zip(names, parameters, strict=True)):
            rows = p.shape[0] if p.dim() > 1 and p.numel() else 1
            begin = sum(map(len, edges))
            self._tensors[i, loops.ROWS : loops.END + 1] = rows, p.numel() // rows, begin, begin
            if name is None:
                continue
            place = found.places[name]
            for end, nodes in ((loops.SOURCE, place.sources), (loops.TARGET, place.targets)):
                if nodes is not None:
                    self._tensors[i, end : end + 3] = _put(lists, nodes, rows, p)
            if place.skeleton is not None:
                flat = place.skeleton.numpy()
                ascending = np.argsort(flat, kind="stable")
                edges.append(flat[ascending])
                owners.append(np.full(len(flat), i))
                numbers.append(place.among.places.numpy()[ascending])
                self._tensors[i, loops.END] += len(flat)
        position = np.zeros(sum(map(len, edges)), np.int64)
        position[_joined(numbers)] = np.arange(len(position))
        classes = _classes(found, position, _joined(owners))
        self._keep(found, Measure(start["fixed"], start["units"], start["pace"]), classes, position)
        longest = max(loops.BLOCK, len(position), int(self._tensors[:, loops.COLUMNS].max()))
        scratch = np.zeros((loops.SCRATCH, longest), _TYPES[dtype])
        first = (self._tensors, _joined(lists), _joined(edges))
        memory = (self._numbers, self._nodes, self._at_edges, self._at_classes, scratch)
        self.surveyed = (*first, _order(found, position), classes, _links(found), *memory)
        self.advanced = (*first, classes, *memory)

    def _keep(self, found: Chart, measure: Measure, classes: np.ndarray, position: np.ndarray) -> None:
        """Memory over nodes, edges and classes."""
        self._nodes = np.ones((5, len(measure.fixed)))
        self._nodes[loops.PRODUCT] = measure.fixed.numpy()
        self._nodes[loops.INVERSE_UNIT] = measure.units.reciprocal().numpy()
        self._at_edges = np.zeros((4, len(position)))
        self._at_classes = np.zeros((4, len(classes)))
        self._at_classes[loops.RATE] = measure.rates(found).numpy()

    def write(
        self,
        places: list[tuple[int, int, int, int]],
        options: list[tuple[float, ...]],
        steps: list[int] | None,
    ) -> None:
        """Take addresses, options and, for Adam, numbers of steps."""
        self._tensors[:, : loops.ROWS] = places
        if options != self._options:
            self._numbers[:, : len(options[0])] = options
            self._options = options
        if steps is not None:
            self._numbers[:, loops.STEP] = steps


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _put(lists: list[np.ndarray], ends: Ends, rows: int, p: Tensor) -> tuple[int, int, int]:
    """Add the nodes at one end to the list of all; where those of the rows lie, of the columns, and how far apart."""
    at = sum(map(len, lists))
    nodes = ends.nodes.places.reshape(ends.shape)
    if p.dim() > 1 and nodes.numel() == nodes.shape[0]:  # alike in a row
        lists.append(nodes.expand(rows, *nodes.shape[1:]).reshape(-1).numpy())
        return at, -1, 0
    if p.dim() < 2 or nodes.shape[0] == 1:  # alike in a column
        lists.append(nodes.expand(1, *p.shape[1:]).reshape(-1).numpy() if p.dim() > 1 else _vector(nodes, p))
        return -1, at, 0
    lists.append(nodes.expand(p.shape).reshape(-1).numpy())
    return -1, at, p.numel() // rows


def _vector(nodes: Tensor, p: Tensor) -> np.ndarray:
    return nodes.reshape(-1).expand(p.numel()).contiguous().numpy()


def _edges(index: Index, position: np.ndarray) -> np.ndarray:
    return position[index.places.numpy()]


def _order(found: Chart, position: np.ndarray) -> np.ndarray:
    """Edge, node, and the node before it, level by level."""
    rows = [
        (_edges(level.edges, position), level.nodes.places.numpy(), _starts(level.starts, level.nodes.count))
        for level in found.levels
    ]
    return np.concatenate([np.stack(row, 1) for row in rows]) if rows else np.zeros((0, 3), np.int64)


def _starts(index: Index | None, count: int) -> np.ndarray:
    return np.zeros(count, np.int64) if index is None else index.places.numpy()


def _links(found: Chart) -> np.ndarray:
    rows = [np.stack([classes.numpy(), after.numpy()], 1) for classes, after in found.links]
    return np.concatenate(rows) if rows else np.zeros((0, 2), np.int64)


def _classes(found: Chart, position: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The table of classes."""
    count = found.classes.count
    table = np.zeros((count, 9), np.int64)
    table[:, loops.CLASS], table[:, loops.OPPOSITE] = found.classes.places, found.inverses.places
    table[:, loops.INTO], table[:, loops.OUT_OF] = (_edges(e, position) for e in (found.into, found.out_of))
    table[:, loops.OWNER] = owners[table[:, loops.INTO]]
    table[:, loops.START] = _starts(found.starts, count)
    table[:, loops.LIKE] = np.arange(count) if found.like is None else found.like.numpy()
    if found.moved is None:
        table[:, loops.MOVED] = 1
    else:
        table[found.moved.numpy(), loops.MOVED] = 1
    table[:, loops.SINGLE] = 1 if found.single is None else found.single.numpy()
    return table
