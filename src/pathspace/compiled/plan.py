"""The squared network as a table for the compiled loops of ``passes``; made once for an optimizer.

There is a plan for chains of linear maps and unidirectional ``nn.RNN`` layers, each used once, with views and a
selection of the last step between them. Everything else is left to the tape.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pathspace.compiled import passes
from pathspace.network import Network
from pathspace.paths.kernel.safe_type import MODERATE, Surveyed
from pathspace.squared.squares import Outer
from pathspace.squared.stacked import Stack
from pathspace.squared.tape import Instruction

# rows of a sequence that there is memory for; longer ones must settle before, or are left to the tape
_ROOM = 40


class Gauge(Protocol):
    """Weights of the mean of a kappa: rows ``[n, 1]`` times columns ``[1, m]``, or of one element; see ``optim``."""

    rows: Tensor
    columns: Tensor


class NoPlanError(ValueError):
    """The compiled loops do not know an operation of the network; the message says which."""


@dataclass
class _Slot:
    """Rows of one width, for each of ``times`` steps."""

    index: int
    width: int
    times: int
    positions: (
        Tensor  # the step of each place of the tensor, but for its last dimension; -1 where it is not known
    )

    @property
    def enters(self) -> bool:
        """Whether it is the network's input: ones at all places."""
        return self.index == 0


@dataclass
class _Table:
    """What is known of a plan while the tape is read."""

    names: list[str]
    rows: dict[str, int]
    operations: list[list[int]] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)
    forms: dict[str, int] = field(default_factory=dict)  # of kappa
    shares: dict[str, str] = field(default_factory=dict)  # bias -> the matrix whose rows' gradient is its own

    def slot(self, width: int, times: int, positions: Tensor) -> _Slot:
        self.slots.append(_Slot(len(self.slots), width, times, positions))
        return self.slots[-1]


class Plan:
    """Compiled passes through the squared network, with memory of their own.

    Args:
        network: a traced network; its parameters must be of one type, float32 or float64, in order and on the CPU.

    Raises:
        NoPlanError: there is an operation that the loops do not know.
    """

    def __init__(self, network: Network) -> None:
        table = _read(network)
        like = next(iter(network.parameters.values())).detach()
        self.network, self.names, self.dtype = network, table.names, like.dtype
        self._operations = np.array(table.operations, np.int64)
        self._slots, size = _rooms(table)
        self._memory = np.zeros(size, str(like.dtype).removeprefix("torch."))
        first, last = table.slots[0], table.slots[-1]
        self._memory[: first.width] = 1.0
        start = int(self._slots[-1, passes.BACK_OFFSET])
        self._memory[start : start + last.width] = last.positions.numel() / last.times
        self._slots[-1, passes.BACK_COUNT] = 1
        self._scratch = np.zeros(4 * int(self._slots[:, passes.WIDTH].max()), self._memory.dtype)
        # rows met in a sum over time: one of the two changes from each pair to the next
        pairs = min(max(slot.times for slot in table.slots), 2 * _ROOM)
        self._pairs = np.zeros((pairs, 3), np.int64)
        self._report = np.ones((len(self.names), 6))
        self._own = list(network.parameters.values())
        self._addresses: list[int] = []
        self._count = np.array([1.0 / p.numel() for p in self._own])
        self._ones = like.new_ones(max(len(self._scratch) // 4, 1))
        self._parameters = np.zeros((len(self.names), 8), np.int64)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._shares = {name: 1.0 / p.numel() for name, p in network.parameters.items()}
        self._weights: dict[str, tuple[Gauge, Tensor, Tensor]] = {}
        self.values: dict[str, Tensor | Outer] = {}
        self._spare: list[Tensor] = []
        self._lay_out(table, like)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        # the tables hold addresses
        return Plan(copy.deepcopy(self.network, memo))

    def _lay_out(self, table: _Table, like: Tensor) -> None:
        """Memory for kappa."""
        totals: dict[str, Tensor] = {}
        for i, name in enumerate(self.names):
            shape, form = self.network.parameters[name].shape, table.forms[name]
            rows, columns = shape[0], shape.numel() // shape[0]
            first, second = None, None
            if form == passes.OUTER:
                first, second = like.new_zeros(rows), like.new_zeros(columns)
                self.values[name] = Outer(first, second)
                totals[name] = first
            elif form == passes.DENSE:
                first, second = like.new_zeros(rows, columns), like.new_zeros(rows)
                self.values[name] = first
                totals[name] = second
                self._spare.append(second)
            ends = [0 if t is None else t.data_ptr() for t in (first, second)]
            ones = self._ones.data_ptr()
            self._parameters[i] = [0, rows, columns, form, *ends, ones, ones]
        for name, matrix in table.shares.items():
            self.values[name] = totals[matrix]
            self._parameters[self._index[name], passes.FIRST] = totals[matrix].data_ptr()

    def weigh(self, gauges: Mapping[str, Gauge]) -> None:
        """Take the weights of the means from gauges that are not yet known."""
        for name, gauge in gauges.items():
            known = self._weights.get(name)
            if known is not None and known[0] is gauge:
                continue
            row = self._parameters[self._index[name]]
            ends = gauge.rows[:, 0].expand(int(row[passes.ROWS])), gauge.columns[0]
            if row[passes.FORM] == passes.VECTOR:
                ends = ends[0] * ends[1], ends[1]
            rows, columns = ends[0].to(self.dtype).contiguous(), ends[1].to(self.dtype)
            columns = columns.expand(int(row[passes.COLUMNS])).contiguous()
            row[passes.ROW_WEIGHTS], row[passes.COLUMN_WEIGHTS] = rows.data_ptr(), columns.data_ptr()
            self._weights[name] = gauge, rows, columns

    def _read_in_place(self) -> bool:
        """Whether the loops can read the parameters where they lie now."""
        addresses = [p.data_ptr() if p.is_contiguous() and p.dtype == self.dtype else 0 for p in self._own]
        if addresses != self._addresses:
            if not all(addresses) or any(p.device.type != "cpu" for p in self._own):
                return False
            self._addresses = addresses
            self._parameters[:, passes.ADDRESS] = addresses
        return True

    def _call(self) -> int:
        return passes.kappa_pass(
            self._operations,
            self._slots,
            self._parameters,
            self._memory,
            self._scratch,
            self._pairs,
            self._report,
            MODERATE,
        )

    def place(self, name: str) -> int:
        """The place of a parameter in :meth:`means`."""
        return self._index[name]

    def value_at(self, place: int) -> Tensor | Outer:
        """kappa1 of a parameter, as the last call left it."""
        return self.values[self.names[place]]

    @property
    def bytes(self) -> int:
        """The memory that it keeps."""
        tensors: list[Tensor] = [self._ones, *self._spare]
        for value in self.values.values():
            tensors += [value.rows, value.columns] if isinstance(value, Outer) else [value]
        for _, *ends in self._weights.values():
            tensors += ends
        own = {
            t.data_ptr(): t.numel() * t.element_size() for t in tensors
        }  # biases share theirs with a matrix
        arrays = (self._memory, self._scratch, self._pairs, self._report, self._parameters, self._slots)
        return sum(own.values()) + sum(array.nbytes for array in arrays)

    def means(self) -> list[float] | None:
        """Means of kappa1 in the gauges of the last :meth:`run`, if all of it may be divided by as it is."""
        if not self._read_in_place() or self._call() != passes.SAFE:
            return None
        return (self._report[:, passes.SUM] * self._report[:, passes.COLUMN_SUM] * self._count).tolist()

    def run(self, gauges: Mapping[str, Gauge]) -> tuple[Surveyed, list[float]] | None:
        """kappa1, in memory that the next call fills anew, and means of it; None if that is for the tape to find.

        Args:
            gauges: of the parameters that are asked for.

        Returns:
            What is known of their kappas, and their means in the gauges.
        """
        self.weigh(gauges)
        if not self._read_in_place() or self._call() == passes.UNSETTLED:
            return None
        bounds: dict[str, tuple[tuple[float, float], ...]] = {}
        sums: list[float] = []
        means: list[float] = []
        report = self._report.tolist()
        for name in gauges:
            low, high, total, low_column, high_column, column_total = report[self._index[name]]
            if isinstance(self.values[name], Outer):
                bounds[name] = ((low, high), (low_column, high_column))
                sums += (total, column_total)
            else:
                bounds[name] = ((low, high),)
                sums.append(total)
                column_total = 1.0
            means.append(total * column_total * self._shares[name])
        if not all(math.isfinite(number) for number in sums):  # as they are only if all elements are
            return None
        result = Surveyed(self.values, bounds, sums)
        fits = all(result.fits(name, self.dtype) for name in gauges)
        return (result, means) if fits and (result.moderate or self.dtype == torch.float64) else None


def _rooms(table: _Table) -> tuple[np.ndarray, int]:
    """The table of slots, with room for as many rows as they may need, and the size of all."""
    before = {op[passes.AFTER]: op for op in table.operations}
    selected = {op[passes.BEFORE] for op in table.operations if op[passes.CODE] == passes.LAST}
    rooms, slots, size = {0: 1}, [], 0
    for slot in table.slots:
        op = before.get(slot.index)
        if op is not None:
            linear = op[passes.CODE] == passes.LINEAR
            rooms[slot.index] = rooms[op[passes.BEFORE]] if linear else min(slot.times, _ROOM)
        values = rooms[slot.index] if op is None or op[passes.CODE] != passes.LAST else 1
        back = 0 if slot.enters else min(slot.times, 2 if slot.index in selected else _ROOM)
        rooms[slot.index] = values
        middle = size + values * slot.width
        slots.append([slot.width, slot.times, size, values, 1, middle, back, 0, 0])
        size = middle + back * slot.width
    return np.array(slots, np.int64), size


def _read(network: Network) -> _Table:
    """The table of a network."""
    parameters = network.parameters
    types = {p.dtype for p in parameters.values()}
    alike = types in ({torch.float32}, {torch.float64})
    if not alike or any(p.device.type != "cpu" for p in parameters.values()):
        raise NoPlanError("its parameters are not all float32, or all float64, and on the CPU")
    tape = network.tape
    owners = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    if set(owners.values()) != set(parameters):
        raise NoPlanError("some of its parameters are on no path to an output")
    inputs = [leaf for leaf in tape.leaves if leaf.kind != "parameter"]
    if len(inputs) != 1 or inputs[0].kind != "input" or not inputs[0].shape:
        raise NoPlanError("it has several inputs, buffers or constants")
    shape, current = inputs[0].shape, inputs[0].slot
    table = _Table(list(parameters), {name: p.shape[0] for name, p in parameters.items()})
    slot = table.slot(shape[-1], 1, torch.zeros(shape[:-1], dtype=torch.long))
    readers = Counter(i for instruction in tape.instructions for i in instruction.inputs)
    readers.update(tape.outputs)
    for instruction in tape.instructions:
        if instruction.inputs[0] != current:
            raise NoPlanError(f"{instruction.name} is no link of a chain")
        names = [owners.pop(i, "") for i in instruction.inputs[1:]]
        if "" in names:
            raise NoPlanError(f"{instruction.name} reads a parameter that is read elsewhere, or none")
        if instruction.form == "linear":
            made = [_linear(table, slot, names)]
        elif instruction.form == "movement":
            made = [_movement(table, slot, instruction)]
        elif isinstance(instruction.form, Stack):
            made = _stack(table, slot, names, instruction.form)
        else:
            raise NoPlanError(f"{instruction.name} is not among the operations that the loops know")
        read = [i for i, output in enumerate(instruction.outputs) if readers[output]]
        if len(read) != 1 or readers[instruction.outputs[read[0]]] != 1:
            raise NoPlanError(f"the result of {instruction.name} is read twice")
        current, slot = instruction.outputs[read[0]], made[read[0]]
    return table


def _linear(table: _Table, x: _Slot, names: list[str], steps: int = 0) -> _Slot:
    """Y = W^2 x + b^2."""
    weight, *biases = names
    if len(biases) > 2 or bool((x.positions < 0).any()):
        raise NoPlanError(f"'{weight}' reads states of several layers")
    times = steps or x.times
    y = table.slot(table.rows[weight], times, x.positions)
    table.forms[weight] = passes.OUTER if x.enters or x.times == 1 else passes.DENSE
    for bias in biases:
        table.forms[bias] = passes.VECTOR
        table.shares[bias] = weight
    ends = [table.names.index(name) for name in names] + [-1] * (3 - len(names))
    table.operations.append([passes.LINEAR, x.index, y.index, *ends, times, int(not x.enters)])
    return y


def _stack(table: _Table, x: _Slot, names: list[str], stack: Stack) -> list[_Slot]:
    """U = W_in^2 x + b^2;  h_t = W_rec^2 h_{t-1} + u_t, layer upon layer; all states, and the last of every layer."""
    if stack.directions > 1 or any(stack.starts):
        raise NoPlanError("a recurrent layer is bidirectional, or has an initial state of its own")
    lead = x.positions.shape
    steps = lead[stack.time_dim]
    shape = [steps if d == stack.time_dim else 1 for d in range(len(lead))]
    time = torch.arange(steps).reshape(shape).expand(lead)
    if not x.enters and not torch.equal(x.positions, time):
        raise NoPlanError("a recurrent layer reads its input in another order than it was made in")
    for layer in range(stack.layers):
        w_in, w_rec, *biases = names[layer * stack.per_cell : (layer + 1) * stack.per_cell]
        u = _linear(table, x, [w_in, *biases], steps)
        h = table.slot(u.width, steps, time)
        table.forms[w_rec] = passes.DENSE
        recurrent = table.names.index(w_rec)
        table.operations.append([passes.CELL, u.index, h.index, recurrent, -1, -1, steps, 1])
        x = h
    examples = [n for d, n in enumerate(lead) if d != stack.time_dim]
    of_layers = torch.full((stack.layers, *examples), -1)
    of_layers[-1] = steps - 1
    return [x, _Slot(x.index, x.width, steps, of_layers)]


def _movement(table: _Table, x: _Slot, instruction: Instruction) -> _Slot:
    """A view that keeps the last dimension; of a sequence all steps equally often, or the last alone."""
    shape = (*x.positions.shape, x.width)
    moved = instruction.function(x.positions.unsqueeze(-1).expand(shape))
    if not isinstance(moved, Tensor):
        raise NoPlanError(f"{instruction.name} has several results")
    if x.enters:
        x.width, x.positions = moved.shape[-1], moved[..., 0]
        return x
    features = torch.arange(x.width)
    seen = instruction.function(features.expand(shape))
    same = (
        isinstance(seen, Tensor)
        and seen.shape[-1] == x.width
        and torch.equal(seen, features.expand(seen.shape))
    )
    positions = moved[..., 0] if same else moved
    if not same or not torch.equal(positions.unsqueeze(-1).expand(moved.shape), moved):
        raise NoPlanError(f"{instruction.name} mixes features with what comes before them")
    if bool((positions == x.times - 1).all()) and x.times > 1:
        y = table.slot(x.width, 1, torch.zeros_like(positions))
        table.operations.append([passes.LAST, x.index, y.index, -1, -1, -1, 1, 1])
        return y
    often = torch.bincount(positions.reshape(-1), minlength=x.times) if bool((positions >= 0).all()) else None
    if often is not None and bool((often != often[0]).any()):
        raise NoPlanError(f"{instruction.name} selects steps other than the last")
    return _Slot(x.index, x.width, x.times, positions)
