"""Forward passes on data of chains: recurrent layers followed by a linear readout.

    z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,    h^l_t = relu(z^l_t)

Such a network needs no captured steps. One call for each layer computes its states from the input.
The states tell which units are active; z and the gradients follow from them.

Letters: T time, n examples, D input, H hidden, l layer; h^0_t the input, h^l_{-1} = 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.graph.program import Program, Ref
from pathspace.network.network import Network
from pathspace.replay.beside import Beside
from pathspace.replay.replay import Batch, captured
from pathspace.squared.recurrence import Stack
from pathspace.squared.tape import Instruction, Leaf, Tape


@dataclass(frozen=True)
class Cell:
    """One layer: names of its parameters. The readout has no recurrence, and an empty name for it."""

    weight: str
    recurrent: str
    biases: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of them."""
        return (self.weight, *((self.recurrent,) if self.recurrent else ()), *self.biases)


@dataclass(frozen=True)
class Chain:
    """Recurrent layers from the input to a linear readout.

    Attributes:
        cells: the recurrent layers, from the input on.
        readout: the last linear map.
        steps: T.
        time_dim: of what enters, the examples being the other of its first two dimensions.
        every: whether the states of all steps are read, or those of the last alone.
    """

    cells: tuple[Cell, ...]
    readout: Cell
    steps: int
    time_dim: int
    every: bool

    @property
    def layers(self) -> tuple[Cell, ...]:
        """All of them, the readout the last."""
        return (*self.cells, self.readout)


@dataclass
class ChainPass:
    """A forward pass of a chain on data.

    Attributes:
        chain: what ran.
        x: what entered, ``[T, n, D]``; not part of a graph.
        states: h^l of all layers but the readout, ``[T, n, H]``; likewise.
        leaves: the parameters, by name.
        count: the number of examples n.
    """

    chain: Chain
    x: Tensor
    states: list[Tensor]
    leaves: dict[str, Tensor]
    count: int


# -- which networks are one ------------------------------------------------------------------------


def chain_of(network: Network) -> Chain | None:
    """Return the network as a chain, or None if it is none."""
    tape = network.tape
    if not _has_plain_call(network) or len(tape.outputs) != 1:
        return None
    owners = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    entering = _only_input(tape)
    if entering is None or set(owners.values()) != set(network.parameters):
        return None
    moved = _after_movements(tape.instructions, entering)
    if moved is None:
        return None
    links, ones = moved
    chain = _recurrent_chain(links, owners, ones, network.parameters)
    if chain is None or owners:  # each is read once
        return None
    if not _has_linear_readout(chain, network.parameters) or not _does_no_more(network, links):
        return None
    return chain


def _has_plain_call(network: Network) -> bool:
    """Return whether the model is called with examples alone, and nothing of it is left outside."""
    call = network.call
    return call.batch_dim in (0, 1) and not call.outside and not call.states


def _only_input(tape: Tape) -> Leaf | None:
    """Return the input of a tape, if it reads one input and parameters alone; None otherwise."""
    entering = [leaf for leaf in tape.leaves if leaf.kind != "parameter"]
    return entering[0] if len(entering) == 1 and entering[0].kind == "input" else None


def _has_linear_readout(chain: Chain, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether the readout is a matrix, with biases of as many numbers as it has rows."""
    weight, *biases = (parameters[name].shape for name in chain.readout.parameters)
    return len(weight) == 2 and all(shape == weight[:1] for shape in biases)


def _does_no_more(network: Network, links: Sequence[Instruction]) -> bool:
    """Return whether the traced operations are the links, of which the last one is the only node and output."""
    program = network.program
    readout = links[-1].outputs
    expected = [(link.outputs[0], _operation_of(link)) for link in links[:-1]]
    expected.append((readout[0], "linear"))
    traced = [(o.results[0], o.name.removesuffix("_")) for o in program.operations]
    if traced != expected or set(program.nodes) != {readout[0]}:
        return False
    return network.tape.outputs == program.outputs == readout


def _operation_of(link: Instruction) -> str:
    """Return the name of the operation of an instruction, without its module and without a final ``_``."""
    return link.name.split(" ")[0].removesuffix("_")


def _after_movements(
    instructions: Sequence[Instruction], entering: Leaf
) -> tuple[list[Instruction], Tensor] | None:
    """Skip leading movements; return the remaining instructions and a mask moved along, or None if this is no chain."""
    links = list(instructions)
    slot = entering.slot
    ones = torch.ones(entering.shape, device="cpu")
    while links and links[0].form == "movement" and links[0].inputs == (slot,):
        moved = links[0].function(ones)
        if not isinstance(moved, Tensor) or not bool((moved == 1).all()):
            return None
        slot = links.pop(0).outputs[0]
        ones = moved
    return (links, ones) if links and links[0].inputs[0] == slot else None


def _recurrent_chain(
    links: Sequence[Instruction],
    owners: dict[int, str],
    ones: Tensor,
    parameters: Mapping[str, Tensor],
) -> Chain | None:
    """Read a stack of recurrent layers, movements and a linear layer; take the names of their parameters."""
    stack = links[0].form
    last = links[-1]
    if not isinstance(stack, Stack) or stack.directions > 1 or any(stack.starts):
        return None
    if last.form != "linear" or ones.dim() != 3:
        return None
    names = [owners.pop(i, "") for i in (*links[0].inputs[1:], *last.inputs[1:])]
    if "" in names or ones.shape[1 - stack.time_dim] != 1:
        return None
    of_cells = stack.layers * stack.per_cell
    cells = _cells(names[:of_cells], stack.per_cell)
    weight, *biases = names[of_cells:]
    steps = ones.shape[stack.time_dim]
    hidden = len(parameters[cells[-1].weight])
    every = _is_read_at_every_step(links[0], links[1:-1], last.inputs[0], steps, hidden)
    if every is None or len(biases) > 1 or parameters[weight].shape[1:] != (hidden,):
        return None
    return Chain(tuple(cells), Cell(weight, "", tuple(biases)), steps, stack.time_dim, every)


def _cells(names: Sequence[str], per_cell: int) -> list[Cell]:
    """Return the cells of a stack, from the names of their parameters."""
    cells = []
    for first in range(0, len(names), per_cell):
        w_in, w_rec, *biases = names[first : first + per_cell]
        cells.append(Cell(w_in, w_rec, tuple(biases)))
    return cells


def _is_read_at_every_step(
    recurrent: Instruction, movements: Sequence[Instruction], read: int, steps: int, hidden: int
) -> bool | None:
    """Return whether the readout reads all states of the last layer; False: those of the last step; None: neither."""
    stack = recurrent.form
    time = torch.arange(steps, device="cpu")
    time = time[:, None] if stack.time_dim == 0 else time[None]
    time = time[..., None].expand(-1, -1, hidden)
    of_layers = torch.full((stack.layers, 1, hidden), -1, device="cpu")
    of_layers[-1] = steps - 1
    units = torch.arange(hidden, device="cpu")
    # the step and the unit at every place
    held = {
        recurrent.outputs[0]: (time, units.expand(time.shape)),
        recurrent.outputs[1]: (of_layers, units.expand(of_layers.shape)),
    }
    entering = _moved_to(read, held, movements)
    if entering is None:
        return None
    step, unit = entering
    if step.shape[-1:] != units.shape or not torch.equal(unit, units.expand(unit.shape)):
        return None
    if torch.equal(step, time):
        return True
    is_last = step.dim() == 2 and bool((step == steps - 1).all())
    return False if is_last else None


_Places = tuple[Tensor, Tensor]
"""The step and the unit at every place of a tensor."""


def _moved_to(
    slot: int, held: dict[int, _Places], movements: Sequence[Instruction]
) -> _Places | None:
    """Return the steps and units at the places of a slot after movements; None if something else is done."""
    for link in movements:
        if len(link.inputs) != 1 or link.form != "movement" or link.inputs[0] not in held:
            return None
        steps, units = held[link.inputs[0]]
        step = link.function(steps)
        unit = link.function(units)
        if not isinstance(step, Tensor) or not isinstance(unit, Tensor):
            return None
        held = {link.outputs[0]: (step, unit)}
    return held.get(slot)


# -- what a pass of one shows ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Entering:
    """The steps of a captured pass up to its recurrent layers, and the places of what enters these, and of h_0."""

    program: Program
    names: list[str]
    x: Ref
    starts: list[Any]

    @staticmethod
    def of(beside: Beside) -> _Entering | None:
        """Read the steps before the recurrent layers from a captured pass; return None if it asks about its inputs."""
        seen = beside.seen
        if seen.questions:
            return None
        x = seen.uses[0].args[0]
        starts = seen.starts
        program = Program(beside.capture.steps, seen.inputs, seen.constants, [x, *starts])
        found = _Entering(program, seen.names, program.refer(x), program.refer(starts))
        program.seal()
        return found


def chain_pass(
    network: Network, chain: Chain, inputs: Any, parameters: Mapping[str, Tensor] | None = None
) -> ChainPass | None:
    """Run a traced model on a batch; None if its first states are not zero, or its types differ.

    Args:
        network: a traced network that is a chain.
        chain: what it is.
        inputs: what the model is called with, as in :func:`pathspace.replay.replay.replay`, whose
            errors are raised.
        parameters: values to run with instead of the model's own, by name.
    """
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        batch = Batch.of(network, inputs, parameters=parameters)
        found = captured(batch, _Entering.of)
        if found is None or len({leaf.dtype for leaf in batch.leaves.values()}) > 1:
            return None
        values = batch.run(found.program, found.names)
        starts = [values[ref] if isinstance(ref, Ref) else ref for ref in found.starts]
        x = values[found.x]
        if x.shape[1] != chain.steps or any(bool(start.any()) for start in starts):
            return None
        # cuDNN copies weights that are not in one piece of memory, as these are not, and says so
        warnings.filterwarnings("ignore", "RNN module weights are not part of", UserWarning)
        x = x.squeeze(2).transpose(0, 1).detach()  # [T, n, D]
        return ChainPass(
            chain, x, list(_states(x, chain.cells, batch.leaves)), batch.leaves, batch.given.count
        )


def _states(x: Tensor, cells: Sequence[Cell], leaves: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Compute the states ``[T, n, H]`` of all recurrent layers."""
    for cell in cells:
        start = x.new_zeros(1, x.shape[1], len(leaves[cell.weight]))
        weights = [leaves[name] for name in cell.parameters]
        x = torch.rnn_relu(x, start, weights, bool(cell.biases), 1, 0.0, False, False, False)[0]
        yield x
