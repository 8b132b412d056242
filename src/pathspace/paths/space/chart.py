"""Charts of path space: which weights move how when the values of basis paths are the coordinates.

The weights O of a skeleton are held. Then the values v_e = A_u w_e B_v of the basis paths are
coordinates, and every step of them is one step of the weights (see ``frame``). A chart is the part
of this that does not change while a network is trained: numbers of nodes, classes and elements.

Some classes cannot move along. Their products are constants to a chart: those without a skeleton
edge, those with units of the inverse scale (tied input and output embeddings), and those where a
weight that would have to change takes no part.

Letters: c a unit class, C their number, e = (u -> v) an edge. Nodes are those of the double cover
(see ``condensation``): 0, 1 + c with the product A_c, 1 + C + c with B_c. P is the number of
classes that move, K = 2 P that of their skeleton edges.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.trace.scales import compressed, without_repeats
from pathspace.paths.space.condensation import cover
from pathspace.paths.space.skeleton import Skeleton
from pathspace.paths.space.slots import Index, Slots


@dataclass(frozen=True, eq=False, slots=True)
class Ends:
    """The nodes at one end of all elements of a parameter.

    Attributes:
        nodes: one for every element of ``shape``.
        shape: compact shape, broadcastable to the parameter's.
    """

    nodes: Index
    shape: tuple[int, ...]

    @staticmethod
    def of(nodes: Tensor, dims: int, device: torch.device) -> Ends | None:
        """Their ends, or None where all are node 0, whose product is 1."""
        if not bool((nodes > 0).any()):
            return None
        nodes = nodes.reshape((1,) * (dims - nodes.dim()) + tuple(nodes.shape))
        # one along a dimension along which nothing varies
        nodes = without_repeats(compressed(nodes))
        return Ends(Index.of(nodes.reshape(-1), device), tuple(nodes.shape))

    def at(self, slots: Slots) -> Tensor:
        """Return the entries of a vector over nodes, for good, broadcastable to the parameter (see :class:`Slots`)."""
        return slots.at(self.nodes).view(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Places of one parameter in a chart.

    Attributes:
        sources: nodes whose product is A_u; None where it is 1 for all elements.
        targets: nodes whose product is B_v; likewise.
        skeleton: flat indices of those of its elements that are skeleton edges; None if there are
            none.
        among: where these are among the K.
    """

    sources: Ends | None
    targets: Ends | None
    skeleton: Tensor | None
    among: Index


@dataclass(frozen=True, eq=False, slots=True)
class Level:
    """Skeleton edges whose products can be computed together: which of the K, their nodes, the nodes before them."""

    edges: Index
    nodes: Index
    starts: Index | None  # None where all start at node 0


@dataclass(frozen=True, eq=False)
class Chart:
    """The classes that move, their skeleton edges, and where every parameter stands; made by :func:`chart`.

    Attributes:
        places: name -> place of the parameters that take part.
        levels: the skeleton edges in the order in which products are computed.
        classes: nodes of the P classes that move.
        inverses: their inverse nodes.
        into: which of the K is I(c).
        out_of: which of the K is O(c).
        starts: node where I(c) starts; None if it is 0 for all.
        moved: which of the P have a coordinate at I(c), because it is in no O; None if all.
        single: 1 where O(c) is no I(c'), 0 where it is, float64; None if all are 1.
        links: which of the P have O(c) = I(c'), and the places of c', the last before an output
            first.
        like: which of the P gives each its R; None if each has its own.
    """

    places: Mapping[str, Place]
    levels: tuple[Level, ...]
    classes: Index
    inverses: Index
    into: Index
    out_of: Index
    starts: Index | None
    moved: Tensor | None
    single: Tensor | None
    links: tuple[tuple[Tensor, Tensor], ...]
    like: Tensor | None


@dataclass(frozen=True, eq=False)
class Measure:
    """Units and rates of steps, and the products that do not move: float64 ``[1 + 2 C]`` each.

    Attributes:
        fixed: products of all nodes; those of the classes that move are not looked at.
        units: a and b of every node.
        pace: at classes, the factor of a_e for the coordinates at I(c): a_e = pace a_u b_c.
    """

    fixed: Tensor
    units: Tensor
    pace: Tensor

    def rates(self, chart: Chart) -> Tensor:
        """Return the constant part of a_e / v_e at e = I(c) = (u -> c), for the P classes: pace a_u / a_c."""
        result = chart.classes.take(self.pace) / chart.classes.take(self.units)
        return result if chart.starts is None else result * chart.starts.take(self.units)


def chart(
    network: Network, skeleton: Skeleton, names: Collection[str], device: torch.device
) -> Chart:
    """Return the chart around a skeleton, with its numbers on a device.

    Parameters take part whose ``names`` are given; the network's others are to stay as they are.
    """
    c = network.num_classes
    classes = _moving(network, skeleton, names).nonzero().flatten() + 1
    nodes, elements = _by_parameter(skeleton, torch.cat([classes, classes + c]))
    # which of the K enters each node
    position = torch.full((1 + 2 * c,), -1)
    position[nodes] = torch.arange(len(nodes))
    after = _following(skeleton, classes)
    linked = bool((after >= 0).any())
    before = torch.arange(len(classes))
    before[after[after >= 0]] = (after >= 0).nonzero().flatten()
    moved = before == torch.arange(len(classes))
    like = _first_of_each_chain(before)
    return Chart(
        places=_places(network, names, elements, device),
        levels=_levels(skeleton, position, device),
        classes=Index.of(classes, device),
        inverses=Index.of(classes + c, device),
        into=Index.of(position[classes], device),
        out_of=Index.of(position[classes + c], device),
        starts=_starts(skeleton.starts[classes], device),
        moved=moved.nonzero().flatten().to(device) if linked else None,
        single=(after < 0).double().to(device) if linked else None,
        links=tuple((a.to(device), b.to(device)) for a, b in _links(after)),
        like=like.to(device) if linked else None,
    )


def _by_parameter(skeleton: Skeleton, nodes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sort nodes by the parameters that hold their skeleton edges.

    Returns:
        The nodes, and the flat indices of their edges in each parameter, by name.
    """
    graph = skeleton.graph
    sizes = [shape.numel() for shape in graph.shapes]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    numbers = skeleton.edges[nodes]
    owner = torch.bucketize(numbers, starts[1:], right=True)
    order = torch.argsort(owner, stable=True)
    flat = (numbers - starts[owner])[order]
    counts = torch.bincount(owner, minlength=len(sizes)).tolist()
    return nodes[order], dict(zip(graph.names, flat.split(counts), strict=True))


def _places(
    network: Network,
    names: Collection[str],
    elements: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Place]:
    """Return the places of the parameters that take part.

    Args:
        network: a traced network.
        names: the parameters that take part.
        elements: by name, flat indices of the skeleton edges, of which all together are the K.
        device: of the result.
    """
    shared: dict[tuple[int, tuple[int, ...]], Ends] = {}

    def ends(labels: Tensor, dims: int) -> Ends | None:
        """Return the nodes at an end. Parameters with the same nodes share them: a frame looks them up once."""
        result = Ends.of(cover(labels.cpu(), network.num_classes), dims, device)
        if result is None or result.nodes.first < 0:
            return result
        return shared.setdefault((result.nodes.first, result.shape), result)

    places = {}
    start = 0
    for name, flat in elements.items():
        end = start + len(flat)
        if name in names:
            labels = network.edges[name]
            dims = network.parameters[name].dim()
            places[name] = Place(
                sources=ends(labels.source, dims),
                targets=ends(-labels.target, dims),
                skeleton=flat.to(device) if len(flat) else None,
                among=Index.of(torch.arange(start, end), device),
            )
        start = end
    return places


def _following(skeleton: Skeleton, classes: Tensor) -> Tensor:
    """Return for each of some classes which of them, c', has O(c) = I(c'); -1 where none has."""
    enters = torch.full((skeleton.graph.num_edges + 1,), -1)
    enters[skeleton.edges[classes]] = torch.arange(len(classes))
    # the same edge number at node 1 + C + c and at node 1 + c'
    return enters[skeleton.edges[classes + skeleton.num_classes]]


def _levels(skeleton: Skeleton, position: Tensor, device: torch.device) -> tuple[Level, ...]:
    """Return the levels of the skeleton, with those of their nodes that one of the K enters.

    Args:
        skeleton: the skeleton.
        position: which of the K enters each node; -1 for none.
        device: of the result.
    """
    levels = []
    for level in skeleton.levels:
        at = level[position[level] >= 0]
        if len(at):
            starts = _starts(skeleton.starts[at], device)
            levels.append(Level(Index.of(position[at], device), Index.of(at, device), starts))
    return tuple(levels)


def _first_of_each_chain(before: Tensor) -> Tensor:
    """Return the first member of each member's chain, from the member before each, or itself at the beginning."""
    while not torch.equal(before, before[before]):
        before = before[before]
    return before


def _starts(nodes: Tensor, device: torch.device) -> Index | None:
    return Index.of(nodes, device) if bool(nodes.any()) else None


def _moving(network: Network, skeleton: Skeleton, names: Collection[str]) -> Tensor:
    """Return which classes can be moved: R_c changes I(c) and every weight that leaves c."""
    moving = torch.cat([torch.zeros(1, dtype=torch.bool), skeleton.complete])
    missing = [name for name in network.parameters if name not in names]
    for name in missing:
        leaving = network.edges[name].source.cpu().unique()
        moving[leaving[leaving > 0]] = False
    if missing:
        graph = skeleton.graph
        shapes = zip(graph.names, graph.shapes, strict=True)
        still = torch.cat([torch.full((shape.numel(),), name in missing) for name, shape in shapes])
        into = skeleton.edges[: 1 + network.num_classes]
        moving &= ~((into >= 0) & still[into])
    return moving[1:]


def _links(after: Tensor) -> list[tuple[Tensor, Tensor]]:
    links = []
    done = after < 0
    while not bool(done.all()):
        ready = (~done & done[after]).nonzero().flatten()
        links.append((ready, after[ready]))
        done[ready] = True
    return links
