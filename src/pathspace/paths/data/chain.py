"""Networks that are a chain of layers, linear or recurrent ones: what a pass on data shows follows from what enters.

A linear layer and its ReLU are a cell with one step and no recurrence, T = 1 and W_rec = 0:

    z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,    h^l_t = relu(z^l_t)

So nothing has to be matched (see ``replay.follower``), and gradients need no graph (see ``chain_terms``).

Letters: T time, n examples, D input, H hidden, l layer; h^0_t the input, h^l_{-1} = 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network.network import Network
from pathspace.replay.replay import Reading
from pathspace.squared.recurrence import Stack
from pathspace.squared.tape import Instruction, Leaf


@dataclass(frozen=True)
class Cell:
    """One layer: names of its parameters. A linear one has no recurrence."""

    weight: str
    recurrent: str | None
    biases: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of them."""
        return (self.weight, *((self.recurrent,) if self.recurrent else ()), *self.biases)


@dataclass(frozen=True)
class Chain:
    """Layers from the input to a linear readout, all of them recurrent or none.

    Attributes:
        cells: the layers, from the input on; a ReLU follows each.
        readout: the last linear map.
        steps: T.
        time_dim: of what enters, the examples being the other of its first two dimensions; None without recurrence,
            where the examples are the first.
        every: whether the states of all steps are read, or those of the last alone.
    """

    cells: tuple[Cell, ...]
    readout: Cell
    steps: int = 1
    time_dim: int | None = None
    every: bool = True

    @property
    def layers(self) -> tuple[Cell, ...]:
        """All of them, the readout the last."""
        return (*self.cells, self.readout)

    @property
    def recurrent(self) -> bool:
        """Whether its layers are recurrent."""
        return self.time_dim is not None

    def entered(self, reading: Reading) -> Tensor | None:
        """What enters the first layer, ``[T, n, D]``, where it was read; None if that was not done as it was traced."""
        x, *rest = reading.args
        if self.time_dim is None:
            return x[None] if reading.name == "linear" and x.dim() == 2 and len(x) == reading.count else None
        # a packed sequence has fewer arguments
        if reading.name != "rnn_relu" or len(rest) != 8 or x.dim() != 3:
            return None
        x = x.transpose(0, self.time_dim)
        return x if x.shape[:2] == (self.steps, reading.count) else None


# -- which networks are one ---------------------------------------------------------------------------------------


def chain_of(network: Network) -> Chain | None:
    """What a network is if it is a chain; None for any other."""
    tape, program, call = network.tape, network.program, network.call
    if call.batch_dim not in (0, 1) or call.outside or call.states or len(tape.outputs) != 1:
        return None
    owners = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    entering = [leaf for leaf in tape.leaves if leaf.kind != "parameter"]
    if len(entering) != 1 or entering[0].kind != "input" or set(owners.values()) != set(network.parameters):
        return None
    moved = _after_movements(tape.instructions, entering[0])
    if moved is None:
        return None
    links, ones = moved
    if isinstance(links[0].form, Stack):
        chain = _recurrent_chain(links, owners, ones, network.parameters)
    else:
        chain = _linear_chain(links, owners, ones)
    if chain is None or owners:  # each is read once
        return None
    for cell in (chain.readout,) if chain.recurrent else chain.layers:
        weight, *biases = (network.parameters[name].shape for name in cell.parameters)
        if len(weight) != 2 or any(shape != weight[:1] for shape in biases):
            return None
    expected: list[tuple[int, str]] = []
    for link in links:
        expected.append((link.outputs[0], "linear" if link.form == "linear" else link.name.split(" ")[0]))
        if link.form == "linear":
            expected.append((link.outputs[0], "relu"))
    operations = program.operations
    if (
        [(op.results[0], op.name.removesuffix("_")) for op in operations]
        != [(slot, name.removesuffix("_")) for slot, name in expected[:-1]]
        or (not chain.recurrent and any(op.batch != 0 for op in operations))
        or set(program.nodes) != {slot for slot, name in expected if name == "linear"}
        or not tape.outputs == program.outputs == links[-1].outputs
    ):
        return None
    return chain


def _after_movements(
    instructions: Sequence[Instruction], entering: Leaf
) -> tuple[list[Instruction], Tensor] | None:
    """What follows the movements of what enters, and ones that were moved like it; None if something else does."""
    links, slot, ones = list(instructions), entering.slot, torch.ones(entering.shape, device="cpu")
    while links and links[0].form == "movement" and links[0].inputs == (slot,):
        moved = links[0].function(ones)
        if not isinstance(moved, Tensor) or not bool((moved == 1).all()):
            return None
        slot, ones = links.pop(0).outputs[0], moved
    return (links, ones) if links and links[0].inputs[0] == slot else None


def _linear_chain(links: Sequence[Instruction], owners: dict[int, str], ones: Tensor) -> Chain | None:
    """Linear layers alone; takes the names of their parameters."""
    cells: list[Cell] = []
    slot = links[0].inputs[0]
    for link in links:
        names = [owners.pop(i, "") for i in link.inputs[1:]]
        if link.form != "linear" or link.inputs[0] != slot or "" in names or not 1 <= len(names) <= 2:
            return None
        cells.append(Cell(names[0], None, tuple(names[1:])))
        slot = link.outputs[0]
    return Chain(tuple(cells[:-1]), cells[-1]) if ones.dim() == 2 else None


def _recurrent_chain(
    links: Sequence[Instruction], owners: dict[int, str], ones: Tensor, parameters: Mapping[str, Tensor]
) -> Chain | None:
    """A stack of recurrent layers, movements and a linear layer; takes the names of their parameters."""
    stack, last = links[0].form, links[-1]
    if stack.directions > 1 or any(stack.starts) or last.form != "linear" or ones.dim() != 3:
        return None
    names = [owners.pop(i, "") for link in (links[0], last) for i in link.inputs[1:]]
    if "" in names or ones.shape[1 - stack.time_dim] != 1:
        return None
    per_cell, cells = stack.per_cell, []
    for first in range(0, stack.layers * per_cell, per_cell):
        w_in, w_rec, *biases = names[first : first + per_cell]
        cells.append(Cell(w_in, w_rec, tuple(biases)))
    weight, *biases = names[stack.layers * per_cell :]
    steps, hidden = ones.shape[stack.time_dim], len(parameters[cells[-1].weight])
    every = _is_read_at_every_step(links[0], links[1:-1], last.inputs[0], steps, hidden)
    if every is None or len(biases) > 1 or parameters[weight].shape[1:] != (hidden,):
        return None
    return Chain(tuple(cells), Cell(weight, None, tuple(biases)), steps, stack.time_dim, every)


def _is_read_at_every_step(
    recurrent: Instruction, movements: Sequence[Instruction], read: int, steps: int, hidden: int
) -> bool | None:
    """Whether all states of the last layer reach the readout as they are, or those of the last step; None: neither."""
    stack, time = recurrent.form, torch.arange(steps, device="cpu")
    time = (time[:, None] if stack.time_dim == 0 else time[None])[..., None].expand(-1, -1, hidden)
    of_layers = torch.full((stack.layers, 1, hidden), -1, device="cpu")
    of_layers[-1] = steps - 1
    units = torch.arange(hidden, device="cpu")
    # the step and the unit at every place
    held = {recurrent.outputs[0]: (time, units), recurrent.outputs[1]: (of_layers, units)}
    held = {slot: (step, unit.expand(step.shape)) for slot, (step, unit) in held.items()}
    for link in movements:
        if len(link.inputs) != 1 or link.form != "movement" or link.inputs[0] not in held:
            return None
        step, unit = (link.function(t) for t in held[link.inputs[0]])
        if not isinstance(step, Tensor) or not isinstance(unit, Tensor):
            return None
        held = {link.outputs[0]: (step, unit)}
    if read not in held:
        return None
    step, unit = held[read]
    if step.shape[-1:] != units.shape or not torch.equal(unit, units.expand(unit.shape)):
        return None
    if torch.equal(step, time):
        return True
    return False if step.dim() == 2 and bool((step == steps - 1).all()) else None
