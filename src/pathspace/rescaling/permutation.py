"""Which hidden units of a traced network may change places, and how weights change then.

The labels of unit classes say which slices of which parameters belong to a unit. Classes that only move together are
one *unit* here: those that are multiplied with each other, and the two sides of a depthwise convolution. Units that
occupy the same dimensions of the same parameters, equally often, are candidates for a *group* within which any order
serves. Whether one does is then tried: the path mass of the outputs, as a function of random weights and buffers, must
not change when the units move on by one.

Letters: C unit classes, d dimension of a parameter, n units of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.likeness import mass_at_random

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Axis:
    """A dimension of a parameter along which units lie.

    Attributes:
        parameter: its name.
        dim: the dimension.
        places: where each unit of the group is, in the order of its elements, ``[n, elements of a unit]``.
        enters: whether the elements are edges into the units.
    """

    parameter: str
    dim: int
    places: Tensor
    enters: bool


@dataclass(frozen=True)
class Group:
    """Units that may stand in any order.

    Attributes:
        classes: the unit classes of every unit, ``[n, classes of a unit]``.
        axes: where they are.
    """

    classes: Tensor
    axes: tuple[Axis, ...]

    def __len__(self) -> int:
        return len(self.classes)

    def permuted(self, values: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
        """Return parameters whose k-th unit of the group is the unit ``order[k]`` of these."""
        result = dict(values)
        for axis in self.axes:
            value = result[axis.parameter]
            index = torch.arange(value.shape[axis.dim])
            index[axis.places.reshape(-1)] = axis.places[order.cpu()].reshape(-1)
            result[axis.parameter] = value.index_select(axis.dim, index.to(value.device))
        return result


@tables_on_the_cpu()
def groups_of(network: Network) -> tuple[list[Group], list[int]]:
    """Find the groups of units of a network that may be permuted.

    Returns:
        The groups, and the classes that are in none: their order is fixed by something else than weights, as that of
        normalized units is by running statistics.
    """
    units = _Units(network)
    groups = [group for group in units.candidates() if _moves_on(network, group)]
    inside = {c for group in groups for c in group.classes.reshape(-1).tolist()}
    return groups, [c for c in range(network.num_classes) if c not in inside]


class _Units:
    """The units of a network, and the dimensions along which they lie.

    Args:
        network: a traced network.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._C = network.num_classes
        self._leader = list(range(self._C))
        self._fixed: set[int] = set()
        # (parameter, dimension, whether they enter) -> the classes at every place
        self._lines: dict[tuple[str, int, bool], list[tuple[int, ...]]] = {}
        for factors in network.monomials.abs().tolist():
            self._tie([factor - 1 for factor in factors if factor])
        for name in network.parameters:
            self._read(name)

    def _root(self, c: int) -> int:
        while self._leader[c] != c:
            c = self._leader[c]
        return c

    def _tie(self, classes: Sequence[int]) -> None:
        for c in classes[1:]:
            self._leader[self._root(c)] = self._root(classes[0])

    def _classes(self, label: int) -> tuple[int, ...]:
        """Return the classes that a label is made of."""
        label = abs(label)
        if label <= self._C:
            return (label - 1,) if label else ()
        return tuple(f - 1 for f in self._network.monomials[label - self._C - 1].abs().tolist() if f)

    def _read(self, name: str) -> None:
        """Note along which dimensions of a parameter units lie."""
        parameter, edges = self._network.parameters[name], self._network.edges[name]
        lines: dict[int, list[tuple[int, ...]]] = {}
        for enters, labels in ((True, edges.target.cpu()), (False, edges.source.cpu())):
            labels = labels[(None,) * (parameter.dim() - labels.dim())]
            dims = [d for d in range(labels.dim()) if labels.shape[d] > 1 and not _repeats(labels, d)]
            if not dims:
                # one label for all: a unit that cannot be told from its place
                self._fixed |= set(self._classes(int(labels.reshape(-1)[0]))) if labels.numel() else set()
                continue
            if len(dims) > 1:
                for label in labels.unique().tolist():
                    self._fixed |= set(self._classes(label))
                continue
            line = labels.movedim(dims[0], 0).reshape(labels.shape[dims[0]], -1)[:, 0]
            classes = [self._classes(label) for label in line.tolist()]
            if dims[0] in lines:
                for pair in zip(lines[dims[0]], classes, strict=True):
                    self._tie([*pair[0], *pair[1]])
            lines[dims[0]] = classes
            self._lines[name, dims[0], enters] = classes

    def candidates(self) -> list[Group]:
        """Return groups of units that occupy the same dimensions of the same parameters."""
        members: dict[int, list[int]] = defaultdict(list)
        for c in range(self._C):
            members[self._root(c)].append(c)
        places: dict[int, dict[tuple[str, int, bool], list[int]]] = {root: {} for root in members}
        for key, line in self._lines.items():
            for place, classes in enumerate(line):
                if classes:
                    places[self._root(classes[0])].setdefault(key, []).append(place)
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for root, found in places.items():
            if not self._fixed & set(members[root]):
                signature = tuple((key, len(at)) for key, at in sorted(found.items()))
                alike[(len(members[root]), *signature)].append(root)
        return [self._group(roots, members, places) for roots in alike.values()]

    def _group(
        self,
        roots: list[int],
        members: Mapping[int, list[int]],
        places: Mapping[int, Mapping[tuple[str, int, bool], list[int]]],
    ) -> Group:
        axes: dict[tuple[str, int], Axis] = {}
        for name, dim, enters in sorted(places[roots[0]]):
            at = torch.tensor([places[root][name, dim, enters] for root in roots])
            # a depthwise filter has both ends along one dimension, which moves once
            axes.setdefault((name, dim), Axis(name, dim, at, enters))
        return Group(torch.tensor([members[root] for root in roots]), tuple(axes.values()))


def _repeats(labels: Tensor, d: int) -> bool:
    """Return whether labels are the same all along a dimension."""
    return bool((labels == labels.narrow(d, 0, 1)).all())


def _moves_on(network: Network, group: Group) -> bool:
    """Return whether the outputs stay as they are if every unit of a group takes the place of the next one."""
    squares = _random_squares(network)
    order = torch.arange(len(group)).roll(1)
    before, after = (mass_at_random(network, q) for q in (squares, group.permuted(squares, order)))
    return bool(torch.isclose(before, after, rtol=_ROUNDING, atol=0.0))


def _random_squares(network: Network) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, p in network.parameters.items():
        fan_in = p[0].numel() if p.dim() > 1 and len(p) else 1
        drawn = 0.5 + torch.rand(p.shape, generator=generator, dtype=torch.float64)
        result[name] = (drawn / max(1, fan_in)).to(p.device)
    return result
