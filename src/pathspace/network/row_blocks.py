"""Parameters that are several in one: rows of a matrix that are used apart from the others.

A layer with a fused weight, such as the projections of attention to queries, keys and values, is
the same function as one with a layer for each. Both are trained alike if each block of rows is
treated as a parameter of its own.

A row is used where something reads it: the instruction of the squared network that its values enter
after they were moved about. Rows that one instruction reads together belong together, and those
between them. So do rows whose units have one scale: the two halves of a head that a rotary
embedding turns into each other are one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.units import EdgeLabels
from pathspace.squared.tape import Instruction, Leaf, Tape

Rows = dict[str, Tensor]
"""By parameter, the row (from 1 on) that each element of a value is made of; 0 for none."""


@tables_on_the_cpu()
def row_blocks(tape: Tape, edges: Mapping[str, EdgeLabels]) -> Mapping[str, tuple[int, ...]]:
    """Return the sizes of the blocks of rows that are used apart, for the parameters that have more than one.

    Those are weights and biases of linear maps, and nothing else.

    Args:
        tape: a squared network.
        edges: the unit classes at both ends of each parameter's elements.
    """
    if not any(i.form == "movement" for i in tape.instructions):
        return {}
    leaves = [leaf for leaf in tape.leaves if leaf.name in edges and len(leaf.shape) in (1, 2)]
    sizes = {leaf.name: leaf.shape[0] for leaf in leaves}
    spans = _spans_read(tape, leaves)
    result = {}
    for name, size in sizes.items():
        if len(_blocks(size, spans[name])) < 2:
            continue
        # rows whose units have one scale stay together, though they are read apart
        together = _of_one_scale(edges[name].target, size)
        blocks = _blocks(size, [*spans[name], *together])
        if len(blocks) > 1:
            result[name] = blocks
    return result


Spans = dict[str, set[tuple[int, int]]]
"""By parameter, the first and last row of each thing that something reads of it."""


def _spans_read(tape: Tape, leaves: Sequence[Leaf]) -> Spans:
    """Return what each instruction and output reads of each parameter.

    A movement (a chunk, a transposition) reads nothing: what it moves is followed to whoever reads
    that. So are the features that a linear map makes of rows, if a movement comes right after it.
    """
    sizes = {leaf.name: leaf.shape[0] for leaf in leaves}
    spans: Spans = {name: set() for name in sizes}
    weights = {leaf.slot: {leaf.name: _rows_of(leaf.shape)} for leaf in leaves}
    features: dict[int, Rows] = {}
    moved = {i.inputs[0] for i in tape.instructions if i.form == "movement"}
    for instruction in tape.instructions:
        if instruction.form == "movement":
            _move(instruction, weights)
            _move(instruction, features)
            continue
        for slot in instruction.inputs:
            _note(features.get(slot, {}), spans)
        made, whole = _weights_read(instruction, weights)
        for name in whole:
            spans[name].add((1, sizes[name]))
        result = instruction.outputs[0]
        if result in moved:
            features[result] = made
        else:
            _note(made, spans)
    for slot in tape.outputs:
        _note(features.get(slot, {}), spans)
        _note(weights.get(slot, {}), spans)
    return spans


def _weights_read(instruction: Instruction, weights: dict[int, Rows]) -> tuple[Rows, list[str]]:
    """Return the parameters that an instruction reads.

    Returns:
        Weights and biases of a linear map, with the row that each element of the result is made of;
        and names of parameters that are read as a whole, since the instruction is no linear map
        with them, or makes a feature of several rows.
    """
    made: Rows = {}
    whole: list[str] = []
    for position, slot in enumerate(instruction.inputs):
        is_weight = instruction.form == "linear" and position > 0
        for name, rows in weights.get(slot, {}).items():
            row_of_feature = _by_feature(rows) if is_weight else None
            if row_of_feature is None:
                whole.append(name)
            else:
                made[name] = row_of_feature.expand(instruction.shape)
    return made, whole


def _note_whole(names: Iterable[str], leaves: Sequence[Leaf], spans: Spans) -> None:
    """Remember that all rows of some parameters are read together."""
    sizes = {leaf.name: leaf.shape[0] for leaf in leaves}
    for name in names:
        spans[name].add((1, sizes[name]))


def _of_one_scale(targets: Tensor, size: int) -> list[tuple[int, int]]:
    """Return the first and last row of each unit class; units of scale 1 are in none.

    Args:
        targets: labels, with a row for each of a parameter, or one for all.
        size: how many rows the parameter has.
    """
    labels = targets.reshape(targets.shape[0], -1)[:, 0].expand(size)
    spans: dict[int, tuple[int, int]] = {}
    for row, label in enumerate(labels.tolist(), 1):
        if label:
            spans[label] = spans.get(label, (row, row))[0], row
    return list(spans.values())


def _rows_of(shape: tuple[int, ...]) -> Tensor:
    """Return the row of each element of a parameter."""
    rows = torch.arange(1, shape[0] + 1, dtype=torch.float64)
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def _move(instruction: Instruction, slots: dict[int, Rows]) -> None:
    """Let the rows of a movement's results be those of what it moves."""
    for name, rows in slots.get(instruction.inputs[0], {}).items():
        result = instruction.function(rows)
        results = (result,) if isinstance(result, Tensor) else result
        for slot, part in zip(instruction.outputs, results, strict=True):
            slots.setdefault(slot, {})[name] = part


def _by_feature(rows: Tensor) -> Tensor | None:
    """Return the row that each feature of a linear map is made of; None where one is made of several."""
    small = _small(rows)
    if small.shape[0] != rows.shape[0]:
        return None
    small = small.reshape(len(small), -1)
    return small[:, 0] if bool((small == small[:, :1]).all()) else None


def _small(rows: Tensor) -> Tensor:
    """Return one element along each dimension that repeats the same."""
    for dim, step in enumerate(rows.stride()):
        if step == 0:
            rows = rows.narrow(dim, 0, min(1, rows.shape[dim]))
    return rows


def _note(rows: Rows, spans: Spans) -> None:
    """Remember from which to which row a value is made of."""
    for name, each in rows.items():
        some = _small(each)
        some = some[some > 0]
        if some.numel():
            spans[name].add((int(some.amin()), int(some.amax())))


def _blocks(size: int, spans: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the sizes of the blocks that spans of rows make, which are merged where they overlap.

    Where nothing reads some rows there is one block, of all rows.
    """
    ends: list[list[int]] = []
    for first, last in sorted(spans):
        if ends and first <= ends[-1][1]:
            ends[-1][1] = max(ends[-1][1], last)
        else:
            ends.append([first, last])
    sizes = tuple(last - first + 1 for first, last in ends)
    return sizes if sum(sizes) == size else (size,)
