"""Path mass into and out of unit classes, the gauge that makes scale-dependent quantities comparable.

For a unit class c, gamma_in,c is the sum of gamma^2 over its units (all time steps and positions),
gamma_out,c the sum of dG/dgamma^2: what all paths from it to the outputs weigh. Under node-wise
rescaling they become s_c^2 gamma_in and gamma_out / s_c^2, so their product is invariant, and
(gamma_in / gamma_out)^(1/4) tells how far c is from balance.

A ReLU lets half of what enters it through, if signs are even: so of what enters a unit half is
counted, w^2 / 2 for w^2, and mass stays what it is from layer to layer of He's start. Counted whole
it would double, which is a constant in kappa; but balance would take the two ends of a deep network
apart by 2^(depth / 2): the first and the last layer would stand still, and biases near the end run
away.

In a network that normalizes, by statistics of what enters, balance is no measure of a weight:
scales in front of a normalization are 1, and whatever lies behind a gain, such as an average over n
positions, which divides path mass by n, would be made up for by that gain. What enters a unit has a
size of its own there, and the gauge is that size. A maximum has the size of one of its n values, so
there it counts as their mean, where kappa adds them up: behind a window of four, steps of what
enters a unit would else be four times as long, and those of what leaves it a quarter.

Nor is it where a unit is read at many positions, as channels of a convolution are: gamma_out is a
sum over positions then, and what is read at fewer of them, the linear layers at the end, would seem
to weigh little. There the gain from layer to layer is made even instead: with M the path mass of
one output, l_c and l'_c the mean numbers of weights on the paths into c and out of it,

    b_c^2 = gamma_in,c / n_c / M^(l_c / (l_c + l'_c))

is the path mass of one node in units of what it would be if every weight changed mass by the same
factor, as in the starts of He, of Glorot and of PyTorch. Mass is counted whole there: a factor for
every weight of a path cancels. Networks that are recurrent in time alone keep balance.

Letters: c unit class, n_c its number of nodes, h value of a node in the squared network, delta =
dG/dh.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values
from pathspace.squared.sharding import local_factor, to_local
from pathspace.squared.tape import Instruction, Tap, Tape

_MORE = 1 + 2.0**-10
"""By how much squares grow to tell how many weights are on a path: little, so that the longest do not lead."""

_MAXIMUM = re.compile(r"_?(adaptive_)?max_pool[123]d|amax|amin")


@dataclass(frozen=True)
class NodeMass:
    """Path mass of every unit class, float64, shape ``[num_classes]`` each.

    Attributes:
        into: gamma_in.
        out_of: gamma_out.
        nodes: n_c, over how many nodes each is summed.
        normalized: whether the network normalizes.
        even: M^(l / (l + l')), what a node has at an even gain; None where the gauge is another.
    """

    into: Tensor
    out_of: Tensor
    nodes: Tensor
    normalized: bool
    even: Tensor | None = None

    def gauge(self) -> Tensor:
        """Return the scales b_c at which each class stands, covariant: b_c becomes s_c b_c.

        Those of the balanced member; in a network that normalizes b_c = sqrt(gamma_in / n_c), and
        at an even gain where units are read at many positions. A class that no path enters has the
        scale of its other side, 1 / sqrt(gamma_out).
        """
        balance = self.balance()
        if not self.normalized and self.even is None:
            return balance
        size = self.into / self.nodes.clamp_min(1)
        return torch.where(
            self.into > 0, (size if self.even is None else size / self.even).sqrt(), balance
        )

    def balance(self) -> Tensor:
        """Return how far each class is from balance, (gamma_in / gamma_out)^(1/4): 1 where as much enters as leaves.

        A class that no path leaves, as in front of a zero-initialised layer, still has the scale of
        what enters one of its nodes, sqrt(gamma_in / n), as He's start has it; one that no path
        enters has that of what leaves it, 1 / sqrt(gamma_out), and one without any path has no
        scale: 1 stands for it.
        """
        enters = self.into > 0
        leaves = self.out_of > 0
        into = torch.where(enters, self.into, 1.0)
        out_of = torch.where(leaves, self.out_of, torch.where(enters, self.nodes, 1.0))
        balance = (into / out_of).sqrt()
        return torch.where(enters & leaves, balance.sqrt(), balance)


@torch.inference_mode(False)
def node_mass(network: Network) -> NodeMass:
    """Path mass into and out of every unit class.

    Half of what enters a unit is counted, but all of it in a network that normalizes or whose units
    have positions; in one that normalizes, one of the values of a maximum.

    Raises:
        FloatingPointError: a mass is not finite in float64.
    """
    source = current_values(network, parts=True)
    normalized = bool(network.tape.normalizations)
    positions = not normalized and _has_positions(network)
    q = _squares(network, source, halved=not normalized and not positions)
    into, out_of, nodes, mass = _sums(network, q)
    if not bool(torch.isfinite(into.sum() + out_of.sum())):
        worst = next(
            (n for n, p in source.items() if not bool(torch.isfinite(to_local(p.detach())).all())),
            None,
        )
        raise FloatingPointError(
            "the path mass of a unit class is not finite in float64: "
            + ("the weights are too large" if worst is None else f"'{worst}' is not finite")
        )
    even = None
    if positions:
        for square in q.values():
            to_local(square).mul_(_MORE)
        longer_in, longer_out, _, _ = _sums(network, q)
        # q^l: where all squares grow by a factor, mass grows by it as often as there are weights on
        # a path
        length = (longer_in / into).log()
        rest = (longer_out / out_of).log()
        # where no path leaves, as in front of a zero-initialised layer, what a ReLU lets through of
        # one layer is 1
        even = torch.where((into > 0) & (out_of > 0), mass ** (length / (length + rest)), 2.0)
    return NodeMass(into, out_of, nodes, normalized, even)


@torch.inference_mode(False)
def path_measure(network: Network) -> Tensor:
    """Compute the mean path mass of a node of every unit class, where half of what enters a unit counts.

    It is about the mean square that a unit has for inputs of size 1.

    Returns:
        float64 ``[num_classes]``.
    """
    source = current_values(network, parts=True)
    halved = not network.tape.normalizations
    into, _, nodes, _ = _sums(network, _squares(network, source, halved=halved))
    return into / nodes.clamp_min(1)


def _squares(network: Network, source: Mapping[str, Tensor], *, halved: bool) -> dict[str, Tensor]:
    """Return the squares of the weights in float64; half of them where a weight enters a unit, if that is asked for."""
    q = {n: source[n].detach().to(torch.float64, copy=True).square_() for n in network.parameters}
    if not halved:
        return q
    for n, square in q.items():
        share = torch.where(network.edges[n].target != 0, 0.5, 1.0)
        to_local(square).mul_(local_factor(share.to(square.device, torch.float64), square))
    return q


def _sums(network: Network, q: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gamma_in, gamma_out and n of every class, and the path mass of one output, from squares of the weights."""
    total, masses, outputs = _masses(network, q)
    into = torch.zeros(network.num_classes + 1, dtype=torch.float64, device=total.device)
    out_of = torch.zeros_like(into)
    count = torch.zeros_like(into)
    for labels, value, delta in masses:
        # no product of classes
        single = torch.where(labels.abs() > network.num_classes, 0, labels)
        flat = single.to(into.device).expand(value.shape).reshape(-1)
        classes = flat.abs()
        h = value.detach().reshape(-1)
        d = delta.reshape(-1)
        # a unit with the inverse scale of its class: its two masses change places
        inverse = flat < 0
        into.index_add_(0, classes, torch.where(inverse, d, h))
        out_of.index_add_(0, classes, torch.where(inverse, h, d))
        count.index_add_(0, classes, torch.ones_like(h))
    return into[1:], out_of[1:], count[1:], total.detach() / max(outputs, 1)


def _masses(
    network: Network, q: Mapping[str, Tensor]
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]], int]:
    """Run the squared network, and pull its sum back to the nodes.

    Returns:
        G; labels, h and dG/dh of all tensors of nodes; and how many outputs there are.
    """
    with torch.enable_grad():
        q = {n: square.detach().requires_grad_() for n, square in q.items()}
        taps: list[Tap] = []
        watched = [*network.nodes, *network.tape.outputs]
        tape = _with_means(network.tape) if network.tape.normalizations else network.tape
        total, values = tape.run(q, network.live, watched, taps)
        nodes = list(values[: len(network.nodes)])
        outputs = sum(value.numel() for value in values[len(network.nodes) :])
        labels = list(network.nodes.values())
        # what has the gradient dG/dh
        ends = list(nodes)
        for tap in taps:
            labels.append(network.edges[tap.recurrent].target.T)
            nodes.append(tap.states)
            ends.append(tap.entering)
        reached = [i for i, end in enumerate(ends) if end.requires_grad]
        if not reached:
            return total, [], outputs
        deltas = torch.autograd.grad(total, [ends[i] for i in reached], materialize_grads=True)
    masses = [(labels[i], nodes[i], delta) for i, delta in zip(reached, deltas, strict=True)]
    return total, masses, outputs


def _with_means(tape: Tape) -> Tape:
    """Return the same with the mean of a window where a maximum has the sum, which for ones is the window's size."""

    def mean(i: Instruction) -> Instruction:
        sums: Any = i.function
        return replace(i, function=lambda t: sums(t) / sums(torch.ones_like(t)), fixed=False)

    found = [mean(i) if _MAXIMUM.fullmatch(i.name.split(" ")[0]) else i for i in tape.instructions]
    return replace(tape, instructions=tuple(found))


def _has_positions(network: Network) -> bool:
    """Return whether some operation has several nodes of one class at once, as at positions of an image.

    In time a unit feeds itself by a parameter that is read at every step: what counts there is
    whether one step has several nodes of a class, as in a recurrent convolution.
    """
    if any(instruction.recurrent for instruction in network.tape.instructions):
        return False
    several = {
        slot for slot, labels in network.nodes.items() if labels.numel() > labels.unique().numel()
    }
    if not several:
        return False
    readers = _readers(network.tape)
    for leaf in network.tape.leaves:
        steps = readers[leaf.slot]
        if len(steps) < 2 or leaf.name not in network.edges:
            continue
        edge = network.edges[leaf.name]
        feeds_itself = bool(((edge.target == edge.source) & (edge.target != 0)).any())
        if feeds_itself and several.isdisjoint(_slots_of(steps)):
            return False
    return True


def _readers(tape: Tape) -> Mapping[int, list[Instruction]]:
    """Return the instructions that read each slot, also through views of parameters."""
    readers: defaultdict[int, list[Instruction]] = defaultdict(list)
    for instruction in reversed(tape.instructions):
        found = [instruction]
        if instruction.of_parameter and instruction.outputs:
            found = [reader for view in instruction.outputs for reader in readers[view]]
        for slot in instruction.inputs:
            readers[slot] += found
    return readers


def _slots_of(steps: Iterable[Instruction]) -> set[int]:
    """Return all slots that some instructions read or write."""
    slots: set[int] = set()
    for step in steps:
        slots.update(step.inputs, step.outputs)
    return slots
