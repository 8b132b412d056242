"""Permutations of the units of a traced network, and what they do to its weights.

One pass of the model is captured as a list of operations, and read for which dimensions of its
weights and buffers run over the same units (see ``axes``). Units need no scale of their own: those
in front of a normalization, heads of attention and channels of BatchNorm may stand in any order,
too. Whether each group of units may is then tried: with changed weights the model must return the
same when they are shuffled.

Letters: C unit classes, n units of a group.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pathspace.graph.capture import Capture, Step, plain, wrapped
from pathspace.network import Network
from pathspace.network.call import arguments_in
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.eager import uncompiled
from pathspace.network.trace.drawn import EvaluationForm
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.network.trace.tracer import with_other_sizes
from pathspace.rescaling.axes import Axis, Dim, fix, places_of, resolved
from pathspace.rescaling.axis_rules import AxisReader
from pathspace.squared.precision import wide_copy
from pathspace.torch_private import pytree

_ROUNDING = 1e-7
"""The largest difference of outputs, relative to the largest of them, that counts as rounding in float64."""

_MORE_EXAMPLES = (1, 2, 3)
"""Seeds of the inputs on which units are shuffled once more."""

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Lines:
    """A dimension of a parameter or buffer along which the units of a group lie.

    Attributes:
        name: of the parameter or buffer.
        dim: the dimension.
        places: the positions of each unit along it, ``[n, elements of a unit]``.
        enters: whether the elements are edges into the units.
    """

    name: str
    dim: int
    places: Tensor
    enters: bool


@dataclass(frozen=True)
class Group:
    """Units that may stand in any order.

    Attributes:
        lines: where they are.
        axis: them, in the pass that was read.
        within: the axis of larger units and the one among them that all of these belong to, such as
            heads and the head whose features they are; None where the order is the same in all.
    """

    lines: tuple[Lines, ...]
    axis: Axis
    within: tuple[Axis, int] | None = None

    def __len__(self) -> int:
        return len(self.lines[0].places)

    @property
    def key(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """The key of the group within the model: where its units begin."""
        return tuple(
            (line.name, line.dim, tuple(line.places[:, 0].tolist())) for line in self.lines
        )

    def places_in(self, dim: Dim) -> Tensor | None:
        """Return the positions of each unit along a dimension, ``[n, elements of a unit]``; None if there are none."""
        places = places_of(self.axis, dim)
        if places is None or self.within is None:
            return places
        outer, number = self.within
        outer_places = places_of(outer, dim)
        if outer_places is None:
            return None
        # each column has the units of one larger unit, in one order
        belongs = torch.isin(places[0], outer_places[number])
        return places[:, belongs]

    def permuted(self, values: Mapping[str, Tensor], order: Tensor) -> Values:
        """Return values whose k-th unit of the group is the unit ``order[k]`` of these; others stay as they are."""
        result = dict(values)
        for line in self.lines:
            value = result.get(line.name)
            if value is None or value.shape[line.dim] == 1:  # labels that are the same for all
                continue
            index = torch.arange(value.shape[line.dim])
            index[line.places.reshape(-1)] = line.places[order.cpu()].reshape(-1)
            result[line.name] = value.index_select(line.dim, index.to(value.device))
        return result


def all_permuted(
    values: Mapping[str, Tensor], groups: Sequence[Group], orders: Sequence[Tensor]
) -> Values:
    """Return values permuted by an order for each group, one after the other; see :meth:`Group.permuted`."""
    result = dict(values)
    for group, order in zip(groups, orders, strict=True):
        result = group.permuted(result, order)
    return result


@tables_on_the_cpu()
def groups_of(network: Network) -> list[Group]:
    """Find the groups of units of a network that may be permuted."""
    example = _drawn(network.call.arguments)
    reading = read_axes(network, example)
    found = list(candidates(reading))
    if not found:
        return []
    values = _unlike_values(network, reading.model)
    groups = _Trial(network, reading.model, values, example).finest_that_hold(found)
    # whatever lies in front of a unit that is dead on one example may stand in any order there
    for seed in _MORE_EXAMPLES:
        if not groups:
            return []
        other = _drawn(network.call.arguments, seed)
        trial = _Trial(network, reading.model, values, other)
        groups = trial.those_that_hold(groups)
    if not any(group.axis.root.divided for group in groups):
        return groups

    def trial_of(example: Any) -> _Trial:
        return _Trial(network, reading.model, values, _drawn(example))

    # a reshape of units and positions may fit by chance
    for trial in with_other_sizes(trial_of, network.call.arguments, network.call.batch_dim):
        groups = trial.those_that_hold(groups)
    return groups


@dataclass(frozen=True)
class Reading:
    """The result of reading one captured pass.

    Attributes:
        model: a copy of the model, in evaluation form and float64.
        reader: the dimensions of all tensors.
        weights: those parameters and buffers of the copy that the pass used, by name.
        results: the tensors that operations made, with the names of these.
    """

    model: nn.Module
    reader: AxisReader
    weights: Values
    results: tuple[tuple[str, Tensor], ...]


def state_of(network: Network) -> Values:
    """Return what may be permuted: the model's parameters and buffers.

    Buffers that decided the network are not among them, nor second names of the memory of others.
    """
    state: Values = dict(network.model.named_parameters())
    seen = {tensor.data_ptr() for tensor in state.values()}
    for name, buffer in network.model.named_buffers():
        if (
            buffer.is_floating_point()
            and name not in network.call.constants
            and buffer.data_ptr() not in seen
        ):
            seen.add(buffer.data_ptr())
            state[name] = buffer
    return state


@torch.no_grad()
def read_axes(network: Network, data: Any) -> Reading:
    """Run a copy of the model on data, and read which dimensions of all tensors run over the same units."""
    model = evaluation_form_of(network.model).to("cpu", torch.float64)
    reader = AxisReader()
    held = _held(model)
    state = {name: wrapped(tensor.detach()) for name, tensor in held.items()}
    weights = {name: plain(state[name]) for name in state_of(network)}
    for name, weight in weights.items():
        reader.bind_weight(name, weight)
    steps = _captured(network, model, state, data, reader)
    used = {id(tensor) for step in steps for tensor in step.tensors}
    return Reading(
        model,
        reader,
        {name: weight for name, weight in weights.items() if id(weight) in used},
        tuple(result for step in steps for result in _results_of(step)),
    )


def _captured(
    network: Network, model: nn.Module, state: Values, data: Any, reader: AxisReader
) -> list[Step]:
    """Capture one pass, and let a reader read its operations; the order in inputs and outputs is fixed."""

    def given(tensor: Tensor) -> Tensor:
        one = wide_copy(tensor)
        _fix_all(reader, one)
        return wrapped(one)

    args, kwargs = pytree.tree_map_only(Tensor, given, arguments_in(data))
    capture = Capture()
    with _as_written(), capture.running():
        output = functional_call(model, state, tuple(args), kwargs)
        returned = [plain(tensor) for tensor in network.returned(output)]
    steps = capture.live(returned)
    for step in steps:
        reader.read(step)
    for tensor in returned:
        _fix_all(reader, tensor)
    return steps


def _held(model: nn.Module) -> Values:
    """Return the parameters and buffers of a model by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _fix_all(reader: AxisReader, tensor: Tensor) -> None:
    """Note that the order matters along all dimensions of a tensor."""
    for dim in reader.of(tensor):
        fix(dim)


def _results_of(step: Step) -> list[tuple[str, Tensor]]:
    """Return the tensors that an operation made, each with its name."""
    leaves = pytree.tree_leaves(step.result)
    return [(step.name, leaf) for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def _as_written() -> Iterator[None]:
    """Let a model run without dropout and compiled code, and layers of attention operation by operation.

    In evaluation form torch has one call for all of such a layer.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]), uncompiled(), EvaluationForm():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _drawn(arguments: Any, seed: int = 0) -> Any:
    """Return inputs of a form without data: random numbers, and zeros for whole ones."""
    generator = torch.Generator().manual_seed(seed)

    def values(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    return pytree.tree_map_only(Tensor, values, arguments)


Candidate = tuple[Group, list[list[Group]]]
"""All units of an axis, and the ways to divide them into groups that are put in order apart, the best first."""


def candidates(reading: Reading) -> Iterator[Candidate]:
    """Yield a group for each axis of weights that nothing fixes, and its divisions, if there are any.

    Those with divisions come last: the units that contain them are put in order before.
    """
    found: dict[int, tuple[Axis, list[tuple[str, int, Dim]]]] = {}
    for name, weight in reading.weights.items():
        for d, dim in enumerate(reading.reader.of(weight)):
            for axis in {id(a.root): a.root for segment in resolved(dim) for a in segment}.values():
                found.setdefault(id(axis), (axis, []))[1].append((name, d, dim))
    result = []
    for axis, uses in found.values():
        whole = _group(reading, axis, uses, None)
        if axis.root.fixed or axis.size < 2:
            continue
        divisions = [
            [_group(reading, axis, uses, (outer, k)) for k in range(outer.size)]
            for outer in _common_outer(axis, [dim for _, _, dim in uses])
        ]
        result.append((whole, divisions))
    yield from sorted(result, key=lambda pair: len(pair[1]) > 0)


def _group(
    reading: Reading,
    axis: Axis,
    uses: Sequence[tuple[str, int, Dim]],
    within: tuple[Axis, int] | None,
) -> Group:
    """Return the units of an axis where weights run over them."""
    group = Group((), axis, within)
    lines = []
    for name, d, dim in uses:
        places = group.places_in(dim)
        if places is not None:
            enters = (name, d) not in reading.reader.read_along
            lines.append(Lines(name, d, places, enters))
    return Group(tuple(lines), axis, within)


def _common_outer(axis: Axis, dims: Sequence[Dim]) -> list[Axis]:
    """Return the axes that stand before another one wherever that stands, the nearest first."""
    common: dict[int, Axis] | None = None
    for dim in dims:
        for segment in resolved(dim):
            roots = [one.root for one in segment]
            if axis.root not in roots:
                continue
            before = {id(one): one for one in reversed(roots[: roots.index(axis.root)])}
            common = before if common is None else {k: v for k, v in common.items() if k in before}
    return list((common or {}).values())


def _unlike_values(network: Network, model: nn.Module) -> Values:
    """Return weights and buffers near those of a model, changed at random so that no two units share them."""
    held = _held(model)
    values: Values = {}
    for name in state_of(network):
        value = held[name].detach()
        generator = torch.Generator().manual_seed(value.numel())
        factor, summand = (
            torch.rand(value.shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        values[name] = value * (0.9 + 0.2 * factor) + 0.01 * summand
    return values


class _Trial:
    """Tries whether the model returns the same when units are shuffled, with weights that no two units share.

    Args:
        network: the traced network.
        model: its model, in evaluation form and float64.
        values: the weights and buffers to try it with, by name.
        example: what it is called with.
    """

    def __init__(
        self, network: Network, model: nn.Module, values: Mapping[str, Tensor], example: Any
    ) -> None:
        self._network = network
        self._model = model
        self._values = dict(values)
        self._arguments = pytree.tree_map_only(Tensor, wide_copy, arguments_in(example))
        self._expected = self._run(self._values)

    @torch.no_grad()
    def _run(self, values: Values) -> list[Tensor]:
        args, kwargs = copy.deepcopy(self._arguments)
        with _as_written():
            torch.manual_seed(0)
            returned = self._network.returned(
                functional_call(self._model, values, tuple(args), kwargs)
            )
            return [t.clone() for t in returned]

    def finest_that_hold(self, found: Sequence[Candidate]) -> list[Group]:
        """Return the groups of the first divisions where all of them may be shuffled, else the best that may."""
        finest = [group for whole, ways in found for group in (ways[0] if ways else [whole])]
        if self._hold_apart(finest):
            return finest
        if len(found) > 1:
            half = len(found) // 2
            return self.finest_that_hold(found[:half]) + self.finest_that_hold(found[half:])
        ((whole, ways),) = found
        others = [*ways[1:], [whole]] if ways else []
        return next((groups for groups in others if self._hold_apart(groups)), [])

    def _hold_apart(self, groups: Sequence[Group]) -> bool:
        """Return whether groups may be shuffled all at once, and those of one axis without one another.

        Groups of one axis, such as the features of each head, are numbered. For each binary digit
        those are shuffled alone whose number has it. Any two numbers differ in some digit, so two
        groups that have to move together are found out.
        """
        numbers = [0 if group.within is None else group.within[1] for group in groups]
        digits = max(numbers, default=0).bit_length()
        return self._holds(groups) and all(
            self._holds([g for g, k in zip(groups, numbers, strict=True) if k >> digit & 1])
            for digit in range(digits)
        )

    def those_that_hold(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups whose units may be shuffled, all at once if that shows it; else half of them at a time."""
        if not groups or self._holds(groups):
            return list(groups)
        if len(groups) == 1:
            return []
        half = len(groups) // 2
        return self.those_that_hold(groups[:half]) + self.those_that_hold(groups[half:])

    def _holds(self, groups: Sequence[Group]) -> bool:
        generator = torch.Generator().manual_seed(0)  # groups of one size have orders of their own
        orders = [_shuffled(len(group), generator) for group in groups]
        found = self._run(all_permuted(self._values, groups, orders))
        return all(_near(one, other) for one, other in zip(self._expected, found, strict=True))


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    """Return a random order that is not the one of the numbers themselves."""
    order = torch.randperm(count, generator=generator)
    return order.flip(0) if torch.equal(order, torch.arange(count)) else order


def _near(one: Tensor, other: Tensor) -> bool:
    one = one.double()
    other = other.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    size = one[finite].abs().max() if bool(finite.any()) else torch.zeros(())
    return bool(((one - other)[finite].abs() <= _ROUNDING * size).all())


def class_order(network: Network, groups: Sequence[Group], orders: Sequence[Tensor]) -> Tensor:
    """Return the unit class that each class was before its group was permuted, int64 ``[C]``."""
    result = torch.arange(network.num_classes)
    ends: tuple[Values, ...] = ({}, {})
    for name, edges in network.edges.items():
        dims = network.parameters[name].dim()
        for values, labels in zip(ends, (edges.target, edges.source), strict=True):
            values[name] = labels.cpu()[(None,) * (dims - labels.dim())]
    for labels in ends:
        moved = all_permuted(labels, groups, orders)
        for name, now in labels.items():
            here = now.abs().reshape(-1)
            before = moved[name].abs().reshape(-1)
            of_classes = (here > 0) & (here <= network.num_classes)
            result[here[of_classes] - 1] = before[of_classes] - 1
    return result
