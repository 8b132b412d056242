"""Recurrent layers: ``nn.RNN(nonlinearity="relu")`` and ``nn.RNNCell`` as whole layers.

Units are tied over time. The start h_0 counts as zero (P16 lists it among the inputs; as ones it
would destroy the invariance). An initial state that is an input of the model is a state carried
over from earlier data: it scales with the units, so it may be anything and is zero here. An initial
state that is a parameter is a bias edge into the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.rules.elementwise import add_bias
from pathspace.network.rules.linear import map_units, require_parameter
from pathspace.network.rules.packed import packed_of
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED, WILD
from pathspace.network.trace.values import Value
from pathspace.squared.recurrence import Stack, stacked_recurrence
from pathspace.squared.tape import Mix, Tap


def rnn(
    recorder: Recorder, input: Tensor, hx: Tensor, params: Any, *args: Any, below: int = 0
) -> tuple[Tensor, Tensor]:
    """Trace a (stacked, bidirectional) ReLU RNN; return the output sequence and the last states.

    ``below`` counts the layers of the same module that are read apart.
    """
    if isinstance(params, Tensor):
        return _packed_rnn(recorder, input, hx, params, *args)
    has_biases, layers, _dropout, _train, bidirectional, batch_first = args
    directions = 2 if bidirectional else 1
    x = recorder.as_units(input)
    time_dim, batch_dim = _time_and_batch(x, batch_first=batch_first)
    if x.batch not in (None, batch_dim):
        recorder.wrong_batch()
    per_cell = 4 if has_biases else 2
    weights: list[Tensor] = list(params)
    cells = [weights[i : i + per_cell] for i in range(0, len(weights), per_cell)]
    _check_features(recorder, x, cells[0][0])
    if not x.shape[time_dim]:
        recorder.refuse("the example has no time step", "Give one with as many as the data")
    labelled = _label_layers(recorder, x, hx, cells[: layers * directions], directions, below)
    examples = None if batch_dim is None else x.shape[batch_dim]
    in_squared = _SquaredStack(
        Stack(per_cell, tuple(labelled.starts), layers, directions, time_dim),
        [recorder.value(cell[1]).name for cell in cells],
        examples=examples,
        apart=examples is not None and examples > 1 and x.batch is None,
    )
    return _emit_stack(recorder, x, labelled, in_squared, input.dtype)


def _time_and_batch(x: Value, *, batch_first: bool) -> tuple[int, int | None]:
    """Return the dimensions of time and of the examples in what enters; None for a single sequence."""
    if x.labels.dim() != 3:
        return 0, None
    return (1, 0) if batch_first else (0, 1)


def _emit_stack(
    recorder: Recorder, x: Value, labelled: _Labelled, in_squared: _SquaredStack, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Record a stack of layers; return the output sequence and the last states."""
    time_dim = in_squared.stack.time_dim
    sequence = labelled.sequence.expand(x.shape[time_dim], -1)
    labels = in_squared.batch_of(sequence, 1 - time_dim)
    last_labels = in_squared.batch_of(torch.stack(labelled.last), 1)
    last_batch = None if x.batch is None else 1
    results = [
        Value(recorder.new_slot(), labels, batch=x.batch),
        Value(recorder.new_slot(), last_labels, batch=last_batch, state=True),
    ]
    out = recorder.emit_many(
        in_squared,
        labelled.inputs,
        results,
        dtype=dtype,
        recurrent=True,
        form=in_squared.stack,
    )
    return out[0], out[1]


def _cells(params: Sequence[Tensor], per_cell: int) -> list[list[Tensor]]:
    """Return the parameters of a stack, cell by cell."""
    weights = list(params)
    return [weights[i : i + per_cell] for i in range(0, len(weights), per_cell)]


@dataclass
class _Labelled:
    """The layers of a recurrent stack after their units got labels.

    Attributes:
        inputs: values that enter the stack: x, then the weights and the start of each cell.
        sequence: labels of the units of the last layer.
        last: labels of the units of every cell.
        starts: whether a cell has a start that counts.
    """

    inputs: list[Value]
    sequence: Tensor
    last: list[Tensor]
    starts: list[bool]


def _label_layers(
    recorder: Recorder, x: Value, hx: Tensor, cells: list[list[Tensor]], directions: int, below: int
) -> _Labelled:
    """Label the units of all layers; a layer reads both directions of the one below it."""
    labelled = _Labelled([x], recorder.scales.unify_over(x.labels, (-1,)), [], [])
    for first in range(0, len(cells), directions):
        outputs = []
        for cell in range(first, first + directions):
            origin = f"{recorder.name} layer {below + first // directions}"
            if cell > first:
                origin += " reversed"
            with recorder.running(origin, recorder.func):
                labels = _cell_labels(recorder, cells[cell], labelled.sequence)
            start = _start_value(recorder, hx, cell, labels)
            labelled.starts.append(start is not None)
            labelled.inputs += [recorder.value(p) for p in cells[cell]]
            if start is not None:
                labelled.inputs.append(start)
            outputs.append(recorder.scales.resolve(labels))
        labelled.sequence = torch.cat(outputs)
        labelled.last += outputs
    return labelled


@dataclass(frozen=True)
class _SquaredStack:
    """A stack of layers in the squared network, in which all examples are alike.

    Attributes:
        stack: its form.
        recurrent_names: the recurrent matrices, cell by cell.
        examples: how many sequences the input has; None if it has no dimension for them.
        apart: whether the sequences are parts of one example, such as its windows, and may differ.
    """

    stack: Stack
    recurrent_names: list[str]
    examples: int | None
    apart: bool

    def __call__(
        self, h: Tensor, *slots: Tensor, taps: list[Tap] | None = None, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the output sequence and the last states, from the input, the weights and the first states."""
        stack = self.stack
        dim = 1 - self.stack.time_dim
        inside: list[tuple[Tensor, Tensor, Tensor]] | None = None if taps is None else []
        sequence, last = stacked_recurrence(self._one_of(h, dim, mix), slots, stack, inside, mix)
        if taps is not None and inside is not None:
            for cell, (name_of, states) in enumerate(
                zip(self.recurrent_names, inside, strict=True)
            ):
                taps.append(Tap(name_of, *states, backwards=cell % stack.directions == 1))
        return self.batch_of(sequence, dim), self.batch_of(last, 1)

    def _one_of(self, t: Tensor, dim: int, mix: Mix | None) -> Tensor:
        """Return one sequence if all are equal, otherwise all of them, in dimension 1."""
        if self.examples is None:
            return t
        alike = not self.apart or (
            mix is None and t.stride(dim) == 0 and not any(self.stack.starts)
        )
        return t.select(dim, 0) if alike else t.movedim(dim, 1)

    def batch_of(self, one: Tensor, dim: int) -> Tensor:
        """Return all sequences, from one of them or from all in dimension 1."""
        if one.dim() > 2:
            return one.movedim(1, dim)
        if self.examples is None:
            return one
        shape = [*one.shape[:dim], self.examples, *one.shape[dim:]]
        return one.unsqueeze(dim).expand(shape)


def _packed_rnn(
    recorder: Recorder,
    rows: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    """Trace a (stacked, bidirectional) ReLU RNN on packed sequences, layer by layer."""
    packed = packed_of(recorder, batch_sizes)
    x = recorder.as_units(rows)
    directions = 2 if bidirectional else 1
    steps = len(batch_sizes)
    each = directions * (4 if has_biases else 2)
    sequence = recorder.emit(
        packed.steps, [x], packed.steps(x.labels), dtype=rows.dtype, batch=1, kind=x.kind
    )
    last: list[Tensor] = []
    for layer in range(layers):
        cells = (0, layer * directions, directions)
        known = recorder.lookup(hx) is not None
        start = (
            recorder.apply("narrow", torch.Tensor.narrow, hx, *cells)
            if known
            else hx.narrow(*cells)
        )
        weights = list(params)[layer * each : (layer + 1) * each]
        options = (has_biases, 1, dropout, train, bidirectional, False)
        sequence, final = rnn(recorder, sequence, start, weights, *options, below=layer)
        last.append(_any_last(recorder, sequence, directions) if packed.any_length else final)
    out = recorder.value(sequence)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(steps * packed.examples, *t.shape[2:])

    created = recorder.emit(flat, [out], flat(out.labels), dtype=rows.dtype, batch=0)
    states = recorder.apply("cat", torch.cat, last, 0)
    recorder.bind(states, replace(recorder.value(states), state=True))
    return created, states


def _any_last(recorder: Recorder, sequence: Tensor, directions: int) -> Tensor:
    """Return the last states ``[directions, B, H]``: forwards that of any step, backwards that of the first."""
    x = recorder.value(sequence)

    def last(t: Tensor) -> Tensor:
        parts = t.chunk(directions, -1)
        return torch.stack([parts[0].sum(0), *(part[0] for part in parts[1:])])

    labels = torch.stack([part[0] for part in x.labels.chunk(directions, -1)])
    return recorder.emit(last, [x], labels, dtype=sequence.dtype, batch=1)


def _check_features(recorder: Recorder, x: Value, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[1]:
        message = f"{x.shape[-1]} features enter a layer for {weight.shape[1]}"
        raise RuntimeError(f"{recorder.where()}: {message}")


def _cell_labels(recorder: Recorder, cell: Sequence[Tensor], source: Tensor) -> Tensor:
    """Return the labels of the hidden units of a cell whose inputs have labels ``source``."""
    w_in, w_rec, *biases = [require_parameter(recorder, p) for p in cell]
    hidden = w_rec.shape[0]
    labels = map_units(recorder, w_in, hidden, source)
    if bool((labels == WILD).all()):
        labels = recorder.scales.fresh(hidden, recorder.where())
    recorder.uses.add(w_rec, labels.reshape(-1, 1), labels.reshape(1, -1), target_dim=0)
    for bias in biases:
        labels = add_bias(recorder, bias, recorder.scales.resolve(labels))
    return recorder.scales.resolve(labels)


def _start_value(recorder: Recorder, hx: Tensor, cell: int | None, labels: Tensor) -> Value | None:
    """Return the summand of the initial state in the squared network; None for zero and for a carried state."""
    of_start = recorder.lookup(hx)
    if of_start is None:
        if bool(recorder.zeros(hx).all()):
            return None
    elif of_start.kind == "input" or (
        of_start.kind == "hidden" and bool((recorder.scales.resolve(of_start.labels) == WILD).all())
    ):
        return None
    state = recorder.apply("select", torch.Tensor.select, hx, 0, cell) if cell is not None else hx
    value = recorder.value(state)
    if value.kind == "parameter":
        recorder.uses.add(
            value, labels.expand(value.shape), torch.full(value.shape, FIXED), bias=True
        )
    elif value.kind == "hidden":
        recorder.scales.unify(labels, value.labels)
    else:  # a constant start does not scale
        recorder.scales.unify(labels, torch.full_like(labels, FIXED))
    return value


def rnn_cell(
    recorder: Recorder,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Trace one step of a ReLU RNN."""
    x = recorder.as_units(input)
    if x.batch is not None and (x.labels.dim() == 1 or x.batch != 0):
        recorder.wrong_batch()
    _check_features(recorder, x, w_ih)
    biases = [b for b in (b_ih, b_hh) if b is not None]
    source = recorder.scales.unify_over(x.labels, (-1,))
    labels = _cell_labels(recorder, [w_ih, w_hh, *biases], source)
    start = _start_value(recorder, hx, None, labels)
    labels = recorder.scales.resolve(labels)
    inputs = [
        x,
        *(recorder.value(p) for p in (w_ih, w_hh, *biases)),
        *([start] if start is not None else []),
    ]

    def squared(h: Tensor, s_in: Tensor, s_rec: Tensor, *rest: Tensor) -> Tensor:
        out = sum(rest[: len(biases)], F.linear(h, s_in))
        return out + F.linear(rest[-1].expand(out.shape), s_rec) if start is not None else out

    out = recorder.emit(
        squared, inputs, labels.expand(*x.shape[:-1], -1), dtype=input.dtype, batch=x.batch
    )
    return recorder.note_unit(out)


RULES: dict[str, Callable[..., Any]] = {"rnn_relu": rnn, "rnn_relu_cell": rnn_cell}
