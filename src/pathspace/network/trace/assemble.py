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
    scales = recorder.scales
    ends, empty = [v.slot for v in outputs], {v.slot for v in recorder.all_values() if 0 in v.shape}
    tape = Tape.of(recorder.leaves, recorder.instructions, ends)
    filled = [i for i in recorder.instructions if not empty.issuperset(i.outputs)]
    tapes = tape, Tape.of(recorder.leaves, filled, ends)
    read, used = ({leaf.name for leaf in t.leaves if leaf.kind == "parameter"} for t in tapes)
    known = recorder.uses.of.keys() & (used - left)
    inside = {name: p for name, p in parameters.items() if name in known}
    for name, uses in recorder.uses.of.items():
        if name in inside:
            continue
        for labels in (labels for use in uses for labels in (use.target, use.source)):
            # on no path to an output, or left outside: the plain rule trains it, so the units at its ends stay put
            scales.unify(labels, torch.zeros_like(labels))
    products = scales.solve()
    resolved = {name: _edge_labels(recorder, name, p.shape) for name, p in inside.items()}
    parts = [without_repeats(t).abs().flatten() for pair in resolved.values() for t in pair]
    roots = torch.cat(parts).unique() if parts else torch.zeros(0, dtype=torch.long)
    classes, number, monomials = _numbered(roots[roots > WILD], products)
    # rows of a table that an example is too short for, and what met zeros alone
    partly = [
        n for n, pair in resolved.items() if any(bool((without_repeats(t) == WILD).any()) for t in pair)
    ]

    final = scales.representatives()
    final = torch.where(final.abs() < len(number), final, FIXED)
    final = number[final.abs()] * final.sign()

    def renumber(labels: Tensor) -> Tensor:
        return final[without_repeats(labels)].expand(labels.shape)

    edges = {
        name: EdgeLabels(renumber(t), renumber(s), any(use.bias for use in recorder.uses.of[name]))
        for name, (t, s) in resolved.items()
    }
    # a pass with two examples is compared with the first, by its classes alone
    single = recorder.examples.count == 1
    names = _class_names(scales.origin(c) for c in classes.tolist())
    network = Network(
        model=model,
        parameters=MappingProxyType(inside),
        outside=tuple(name for name in parameters if name not in inside),
        edges=MappingProxyType(edges),
        num_classes=len(names),
        class_names=names,
        monomials=monomials,
        tape=tape,
        nodes=_nodes(recorder, renumber, tape.filled, len(names)) if single else {},
        returned=returned,
        call=replace(call, unused=(*call.unused, *partly, *(n for n in parameters if n in read - used))),
        program=replace(program, nodes=_before_activation(recorder, renumber, tape.filled, outputs))
        if single
        else program,
    )
    network.check_current()  # looks where everything stands now
    return network


def _numbered(roots: Tensor, products: Mapping[int, Monomial]) -> tuple[Tensor, Tensor, Tensor]:
    """Count off the unit classes: the scales at the ends of edges, except those that are monomials of others.

    Returns:
        The variables that stand for the classes; the label of every variable (see ``EdgeLabels``); and of every label
        beyond the classes the signed labels of its factors.
    """
    composed = [v for v in roots.tolist() if v in products] if products else []
    classes = roots
    if composed:
        generators = torch.tensor([g for v in composed for g in products[v]], dtype=torch.long)
        classes = torch.cat([roots[~torch.isin(roots, torch.tensor(composed))], generators]).unique()
    largest = max((int(t.max()) for t in (roots, classes) if t.numel()), default=WILD)
    number = torch.zeros(largest + 1, dtype=torch.long)
    number[classes] = torch.arange(1, classes.numel() + 1)
    rows: dict[tuple[int, ...], int] = {}
    for v in composed:
        factors = [(int(number[g]), n) for g, n in sorted(products[v].items())]
        sign = -1 if factors and factors[0][1] < 0 else 1  # one label for a monomial and its inverse
        row = tuple(c if sign * n > 0 else -c for c, n in factors for _ in range(abs(n)))
        if len(row) < 2:
            number[v] = sign * row[0] if row else FIXED
        else:
            number[v] = sign * (1 + len(classes) + rows.setdefault(row, len(rows)))
    width = max(map(len, rows), default=1)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return classes, number, torch.tensor(padded, dtype=torch.long).reshape(len(rows), width)


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
    scales: Scales = recorder.scales
    uses = recorder.uses.of[name]
    if len(uses) == 1 and recorder.uses.is_whole(uses[0], name):
        return scales.resolve(uses[0].target), scales.resolve(uses[0].source)
    labels = []
    for end in ("target", "source"):
        flat = torch.full((shape.numel(),), WILD)
        for use in uses:
            places = written_out(use.index).reshape(-1)
            found = scales.resolve(getattr(use, end)).expand(use.index.shape).reshape(-1)
            # a part read on zeros says nothing
            flat[places] = torch.where(found == WILD, flat[places], found)
        labels.append(flat.reshape(shape))
    return labels[0], labels[1]


def _nodes(
    recorder: Recorder, renumber: Callable[[Tensor], Tensor], live: Set[int], num_classes: int
) -> Mapping[int, Tensor]:
    """Collect the values of units after their ReLU, otherwise after their linear maps, otherwise any values."""
    nodes: dict[int, Tensor] = {}
    covered = torch.zeros(num_classes + 1, dtype=torch.bool)
    # units of recurrent layers have their mass from these (see ``paths.kernel.node_mass``)
    recurrent = {slot for i in recorder.instructions if i.recurrent for slot in i.outputs}
    others = [v for v in recorder.all_values() if v.slot not in recurrent]
    of_layers = [v for v in recorder.all_values() if v.slot in recurrent]
    for values in (recorder.unit_values, recorder.linear_values, others):
        seen = covered.clone()
        if values is others:
            for value in of_layers:
                seen[without_repeats(renumber(value.labels)).abs().unique()] = True
            if bool(seen[1:].all()):
                break
        for value in values:
            if value.slot in live and value.slot not in nodes and value.kind == "hidden":
                labels = without_repeats(renumber(value.labels))
                labels = torch.where(labels.abs() > num_classes, FIXED, labels)  # of a product of classes
                missing = (labels != 0) & ~seen[labels.abs()]
                if bool(missing.any()):
                    nodes[value.slot] = torch.where(missing, labels, 0).expand(value.shape)
                    covered[labels.abs().unique()] = True
    return MappingProxyType(nodes)


def _before_activation(
    recorder: Recorder, renumber: Callable[[Tensor], Tensor], live: Set[int], outputs: Sequence[Value]
) -> MappingProxyType[int, Tensor]:
    """Map slots to the labels of the nodes of the graph, by the value that they have before their activation."""
    seen: dict[tuple[int, ...], Tensor] = {}  # a loop meets the same labels at every step

    def numbered(labels: Tensor) -> Tensor:
        small = without_repeats(labels)
        key = (small.data_ptr(), *small.shape, *small.stride())
        if key not in seen:
            seen[key] = renumber(small)
        return seen[key].expand(labels.shape)

    nodes = {v.slot: numbered(v.labels) for v in recorder.activated if v.slot in live}
    covered = {0, *(label for labels in nodes.values() for label in _classes(labels))}
    for value in recorder.linear_values:
        if value.slot in live and value.slot not in nodes:
            labels = numbered(value.labels)
            if not covered.issuperset(_classes(labels)):
                nodes[value.slot] = labels
    nodes.update((v.slot, numbered(v.labels)) for v in outputs if v.slot not in nodes)
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
        counts = sum(torch.bincount(written_out(use.index).reshape(-1), minlength=size) for use in uses)
        result[name] = int(torch.as_tensor(counts).count_nonzero())
    return result
