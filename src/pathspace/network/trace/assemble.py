"""From a finished recording to a network: unit classes are numbered, edges and nodes get their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pathspace.network.call import Call
from pathspace.network.network import Network
from pathspace.network.program import Program
from pathspace.network.returned import Returned
from pathspace.network.trace.lattice import Monomial
from pathspace.network.trace.parameter_uses import written_out
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED, WILD, Scales, without_repeats
from pathspace.network.trace.values import Value
from pathspace.network.units import EdgeLabels
from pathspace.squared.tape import Tape


def assemble(
    model: nn.Module,
    recorder: Recorder,
    parameters: dict[str, nn.Parameter],
    left: set[str],
    outputs: Sequence[Value],
    returned: Returned,
    call: Call,
    program: Program,
) -> Network:
    """Make a network from a finished recording.

    Args:
        model: the user's model.
        recorder: what was recorded.
        parameters: all parameters of the model by name.
        left: names of those that modules left outside own.
        outputs: the network's outputs.
        returned: see :class:`Network`.
        call: likewise.
        program: the forward pass, without its nodes.
    """
    tape, used = _tape(recorder, outputs)
    known = recorder.uses.of.keys() & (used - left)
    inside = {name: p for name, p in parameters.items() if name in known}
    outside = tuple(name for name in parameters if name not in inside)
    _fix_ends(recorder, recorder.uses.of.keys() - inside.keys())
    products = recorder.scales.solve()
    resolved = {name: _edge_labels(recorder, name, p.shape) for name, p in inside.items()}
    classes, number, monomials = _numbered(_roots(resolved), products)
    renumber = _renumbering(recorder.scales, number)
    names = _class_names(recorder.scales.origin(c) for c in classes.tolist())
    nodes: Mapping[int, Tensor] = {}
    # a pass with two examples is compared with the first, by its classes alone
    if recorder.examples.count == 1:
        nodes = _nodes(recorder, renumber, tape.filled, len(names))
        before_activation = _before_activation(recorder, renumber, tape.filled, outputs)
        program = replace(program, nodes=before_activation)
    read_on_empty = _parameters_of(tape) - used
    unused = [name for name in parameters if name in read_on_empty]
    network = Network(
        model=model,
        parameters=MappingProxyType(inside),
        outside=outside,
        edges=MappingProxyType(_edges(recorder, resolved, renumber)),
        num_classes=len(names),
        class_names=names,
        monomials=monomials,
        tape=tape,
        nodes=nodes,
        returned=returned,
        call=replace(call, unused=(*call.unused, *_partly_used(resolved), *unused)),
        program=program,
    )
    network.check_current()  # looks where everything stands now
    return network


def _partly_used(resolved: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Return names of parameters with elements of which nothing is known: rows of a table, or what met zeros alone."""
    return [
        name
        for name, (target, source) in resolved.items()
        if _has_wild(target) or _has_wild(source)
    ]


def _tape(recorder: Recorder, outputs: Sequence[Value]) -> tuple[Tape, set[str]]:
    """Return the tape of the outputs, and the parameters that it reads without instructions on empty tensors."""
    ends = [v.slot for v in outputs]
    empty = {v.slot for v in recorder.all_values() if 0 in v.shape}
    filled = [i for i in recorder.instructions if not empty.issuperset(i.outputs)]
    tape = Tape.of(recorder.leaves, recorder.instructions, ends)
    filled_tape = Tape.of(recorder.leaves, filled, ends)
    return tape, _parameters_of(filled_tape)


def _edges(
    recorder: Recorder,
    resolved: Mapping[str, tuple[Tensor, Tensor]],
    renumber: Callable[[Tensor], Tensor],
) -> dict[str, EdgeLabels]:
    """Return the labels of parameters in the network, from those at their ends in the recording."""
    edges = {}
    for name, (target, source) in resolved.items():
        bias = any(use.bias for use in recorder.uses.of[name])
        edges[name] = EdgeLabels(renumber(target), renumber(source), bias)
    return edges


def _parameters_of(tape: Tape) -> set[str]:
    """Return the names of the parameters that a tape reads."""
    return {leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}


def _fix_ends(recorder: Recorder, names: Iterable[str]) -> None:
    """Fix the scales at both ends of parameters at 1.

    They are on no path to an output, or left outside: the plain rule trains them, so the units
    there stay put.
    """
    for name in names:
        for use in recorder.uses.of[name]:
            recorder.scales.unify(use.target, torch.zeros_like(use.target))
            recorder.scales.unify(use.source, torch.zeros_like(use.source))


def _roots(resolved: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the variables at the ends of edges, once each."""
    if not resolved:
        return torch.zeros(0, dtype=torch.long)
    ends = [t for pair in resolved.values() for t in pair]
    roots = torch.cat([without_repeats(t).abs().flatten() for t in ends]).unique()
    return roots[roots > WILD]


def _has_wild(labels: Tensor) -> bool:
    """Return whether some labels are free, because only zeros met these elements."""
    return bool((without_repeats(labels) == WILD).any())


def _renumbering(scales: Scales, number: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from labels of the recording to those of the network."""
    final = scales.representatives()
    final = torch.where(final.abs() < len(number), final, FIXED)
    final = number[final.abs()] * final.sign()

    def renumber(labels: Tensor) -> Tensor:
        return final[without_repeats(labels)].expand(labels.shape)

    return renumber


def _numbered(roots: Tensor, products: Mapping[int, Monomial]) -> tuple[Tensor, Tensor, Tensor]:
    """Count off the unit classes: the scales at the ends of edges, except those that are monomials of others.

    Returns:
        The variables that stand for the classes; the label of every variable (see ``EdgeLabels``);
        and of every label beyond the classes the signed labels of its factors.
    """
    composed = [v for v in roots.tolist() if v in products] if products else []
    classes = _generators(roots, composed, products) if composed else roots
    largest = max((int(t.max()) for t in (roots, classes) if t.numel()), default=WILD)
    number = torch.zeros(largest + 1, dtype=torch.long)
    number[classes] = torch.arange(1, classes.numel() + 1)
    rows: dict[tuple[int, ...], int] = {}
    for v in composed:
        sign, row = _signed_row(products[v], number)
        if not row:
            number[v] = FIXED
        elif len(row) == 1:
            number[v] = sign * row[0]
        else:
            place = rows.setdefault(row, len(rows))
            number[v] = sign * (1 + len(classes) + place)
    return classes, number, _padded(list(rows))


def _generators(roots: Tensor, composed: Sequence[int], products: Mapping[int, Monomial]) -> Tensor:
    """Return the variables without those that are composed, and the variables that compose these."""
    factors = [factor for v in composed for factor in products[v]]
    free = roots[~torch.isin(roots, torch.tensor(composed))]
    return torch.cat([free, torch.tensor(factors, dtype=torch.long)]).unique()


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of numbers as a matrix, filled up with zeros."""
    width = max((len(row) for row in rows), default=1)
    matrix = torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        matrix[place, : len(row)] = torch.tensor(row)
    return matrix


def _signed_row(monomial: Monomial, number: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return a monomial as a sign and the signed labels of its factors, the same for it and its inverse."""
    factors = [(int(number[g]), exponent) for g, exponent in sorted(monomial.items())]
    sign = -1 if factors and factors[0][1] < 0 else 1
    row: list[int] = []
    for label, exponent in factors:
        signed = label if sign * exponent > 0 else -label
        row += [signed] * abs(exponent)
    return sign, tuple(row)


def _class_names(origins: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Name each class after the operation that made it; repeated calls of one module are numbered from 2 on."""
    met: Counter[tuple[str, int]] = Counter()
    names = []
    for where, index in origins:
        met[where, index] += 1
        again = met[where, index]
        names.append(f"{where} ({again})[{index}]" if again > 1 else f"{where}[{index}]")
    return tuple(names)


def _edge_labels(recorder: Recorder, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return target and source labels of a parameter, compact if all its uses are of the whole parameter."""
    uses = recorder.uses.of[name]
    ends = [(use.index, use.target, use.source) for use in uses]
    if len(uses) == 1 and recorder.uses.is_whole(uses[0], name):
        _, target, source = ends[0]
        return recorder.scales.resolve(target), recorder.scales.resolve(source)
    targets = [(index, target) for index, target, _ in ends]
    sources = [(index, source) for index, _, source in ends]
    return (
        _labels_in_parts(recorder.scales, targets, shape),
        _labels_in_parts(recorder.scales, sources, shape),
    )


def _labels_in_parts(
    scales: Scales, parts: Iterable[tuple[Tensor, Tensor]], shape: torch.Size
) -> Tensor:
    """Return labels of all elements of a parameter, from the index and the labels of each part that is used."""
    flat = torch.full((shape.numel(),), WILD)
    for index, labels in parts:
        places = written_out(index).reshape(-1)
        found = scales.resolve(labels).expand(index.shape).reshape(-1)
        # a part read on zeros says nothing
        flat[places] = torch.where(found == WILD, flat[places], found)
    return flat.reshape(shape)


def _nodes(
    recorder: Recorder, renumber: Callable[[Tensor], Tensor], live: Set[int], num_classes: int
) -> Mapping[int, Tensor]:
    """Collect the values of units after their ReLU, otherwise after their linear maps, otherwise any values."""
    nodes = _Nodes(renumber, live, num_classes)
    nodes.add(recorder.unit_values)
    nodes.add(recorder.linear_values)
    # units of recurrent layers have their mass from these (see ``paths.kernel.node_mass``)
    recurrent = {slot for i in recorder.instructions if i.recurrent for slot in i.outputs}
    others = []
    for value in recorder.all_values():
        if value.slot in recurrent:
            nodes.cover(nodes.classes_of(value))
        else:
            others.append(value)
    for values in (others, recorder.overwritten_values()):
        if not bool(nodes.covered[1:].all()):
            nodes.add(values)
    return MappingProxyType(nodes.labels)


class _Nodes:
    """The values that show the units of classes.

    Attributes:
        labels: by slot, the classes that its value shows; 0 elsewhere.
        covered: for each class, whether a value shows it.
    """

    def __init__(
        self, renumber: Callable[[Tensor], Tensor], live: Set[int], num_classes: int
    ) -> None:
        self._renumber = renumber
        self._live = live
        self._num_classes = num_classes
        self.labels: dict[int, Tensor] = {}
        self.covered = torch.zeros(num_classes + 1, dtype=torch.bool)

    def add(self, values: Iterable[Value]) -> None:
        """Add the values whose class is not represented yet."""
        before = self.covered.clone()
        for value in values:
            if value.kind != "hidden" or value.slot not in self._live or value.slot in self.labels:
                continue
            labels = self.classes_of(value)
            missing = (labels != 0) & ~before[labels.abs()]
            if bool(missing.any()):
                self.labels[value.slot] = torch.where(missing, labels, 0).expand(value.shape)
                self.cover(labels)

    def classes_of(self, value: Value) -> Tensor:
        """Return the class of each unit of a value, 0 for products of classes."""
        labels = without_repeats(self._renumber(value.labels))
        return torch.where(labels.abs() > self._num_classes, FIXED, labels)

    def cover(self, labels: Tensor) -> None:
        """Note that a value shows these classes."""
        self.covered[labels.abs().unique()] = True


def _before_activation(
    recorder: Recorder,
    renumber: Callable[[Tensor], Tensor],
    live: Set[int],
    outputs: Sequence[Value],
) -> MappingProxyType[int, Tensor]:
    """Map slots to the labels of the nodes of the graph, by the value that they have before their activation."""
    seen: dict[tuple[int, ...], Tensor] = {}  # a loop meets the same labels at every step

    def numbered(labels: Tensor) -> Tensor:
        small = without_repeats(labels)
        key = (small.data_ptr(), *small.shape, *small.stride())
        if key not in seen:
            seen[key] = renumber(small)
        return seen[key].expand(labels.shape)

    hidden = [v for v in recorder.activated if v.kind == "hidden" and v.slot in live]
    nodes = {v.slot: numbered(v.labels) for v in hidden}
    covered = {FIXED}
    for labels in nodes.values():
        covered.update(_classes(labels))
    for value in recorder.linear_values:
        if value.slot not in live or value.slot in nodes:
            continue
        labels = numbered(value.labels)
        if not covered.issuperset(_classes(labels)):
            nodes[value.slot] = labels
    for value in outputs:
        if value.slot not in nodes:
            nodes[value.slot] = numbered(value.labels)
    return MappingProxyType(nodes)


def _classes(labels: Tensor) -> list[int]:
    return without_repeats(labels).abs().unique().tolist()


def coverage(recorder: Recorder) -> dict[str, int]:
    """Count the elements of each parameter that are used as edges."""
    result = {}
    for name, uses in recorder.uses.of.items():
        size = recorder.uses.shapes[name].numel()
        if any(recorder.uses.is_whole(use, name) for use in uses):
            result[name] = size
            continue
        is_used = torch.zeros(size, dtype=torch.bool)
        for use in uses:
            is_used[written_out(use.index).reshape(-1)] = True
        result[name] = int(is_used.count_nonzero())
    return result
