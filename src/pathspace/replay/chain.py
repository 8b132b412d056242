"""Networks that are a chain of recurrent layers and a linear readout, and how their forward pass on data is followed.

    z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,    h^l_t = relu(z^l_t)

There the whole of what a pass shows is known beforehand. So it is enough to see that the readout takes what the layers
made, instead of matching operations in general (see ``follower``), and gradients need no graph. ``nn.RNN`` runs in one
call, and returns all states of its last layer. That is enough: a state tells where its units are open, and z follows
from the states. Those of the layers below, which it does not return, are computed once more.

Letters: T time, n examples, D input, H hidden, l layer; h^0_t the input, h^l_{-1} = 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.network.network import Network
from pathspace.network.rules import MOVEMENTS
from pathspace.network.trace.functions import METADATA, short_name, tensors_in
from pathspace.replay.replay import evaluation
from pathspace.squared.recurrence import Stack
from pathspace.squared.tape import Instruction, Leaf


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
    chain = _recurrent_chain(links, owners, ones, network.parameters)
    if chain is None or owners:  # each is read once
        return None
    weight, *biases = (network.parameters[name].shape for name in chain.readout.parameters)
    if len(weight) != 2 or any(shape != weight[:1] for shape in biases):
        return None
    expected = [(link.outputs[0], link.name.split(" ")[0].removesuffix("_")) for link in links[:-1]]
    expected.append((links[-1].outputs[0], "linear"))
    if (
        [(op.results[0], op.name.removesuffix("_")) for op in program.operations] != expected
        or set(program.nodes) != {links[-1].outputs[0]}
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


def _recurrent_chain(
    links: Sequence[Instruction], owners: dict[int, str], ones: Tensor, parameters: Mapping[str, Tensor]
) -> Chain | None:
    """A stack of recurrent layers, movements and a linear layer; takes the names of their parameters."""
    stack, last = links[0].form, links[-1]
    if not isinstance(stack, Stack) or stack.directions > 1 or any(stack.starts):
        return None
    if last.form != "linear" or ones.dim() != 3:
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
    return Chain(tuple(cells), Cell(weight, "", tuple(biases)), steps, stack.time_dim, every)


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


# -- what a pass of one shows -------------------------------------------------------------------------------------


def chain_pass(
    network: Network, chain: Chain, inputs: Any, parameters: Mapping[str, Tensor] | None = None
) -> ChainPass | None:
    """Run a traced model on a batch; None if its pass was not that of the chain, as a replay tells.

    Args:
        network: a traced network that is a chain.
        chain: what it is.
        inputs: what the model is called with, as in :func:`pathspace.replay.replay.replay`, whose errors are raised.
        parameters: values to run with instead of the model's own, by name.
    """
    with evaluation(network, inputs, parameters=parameters) as form:
        with ChainWitness(network, chain, form.leaves, form.count) as witness:
            result = form.model(*form.args, **form.kwargs)
        return witness.finish(result)


class ChainWitness(TorchFunctionMode):
    """Looks on while a chain runs; entered before the forward pass and left after it.

    Args:
        network: a traced network that is a chain.
        chain: what it is.
        leaves: the parameters, by name.
        count: the number of examples.
    """

    def __init__(self, network: Network, chain: Chain, leaves: Mapping[str, Tensor], count: int) -> None:
        super().__init__()
        self._network, self._chain, self._leaves, self._count = network, chain, leaves, count
        self._failed = False
        self._held: list[tuple[Tensor, int]] = []  # what entered and what layers made, with their versions
        self._moved: list[Tensor] = []  # what the readout may read, and views of that
        self._same: tuple[Tensor, ...] = ()  # which of it the chain's reads
        self._result: Tensor | None = None  # of the readout

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = short_name(func)
        if not self._failed and name not in METADATA and not self._note(name, args, kwargs, result):
            # what else there is must not touch the chain
            self._failed = any(t.requires_grad for t in tensors_in(args, kwargs))
        return result

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note an operation; False if it is none of the chain's here."""
        if name == "linear":
            return not kwargs and self._note_linear(args, result)
        if name == "rnn_relu":
            return not kwargs and self._note_states(args, result)
        if name in MOVEMENTS and args and self._is_moved(args[0]) and isinstance(result, Tensor):
            self._moved.append(result)
            return result.requires_grad
        return False

    def _is_moved(self, tensor: Any) -> bool:
        return any(tensor is moved for moved in self._moved)

    def _note_linear(self, args: tuple[Any, ...], z: Tensor) -> bool:
        if not 2 <= len(args) <= 3 or self._result is not None or not z.requires_grad:
            return False
        if not self._are(args[1:], [self._chain.readout]):
            return False
        if not self._is_moved(args[0]) or not any(map(args[0].is_set_to, self._same)):
            return False
        self._result = z
        return True

    def _are(self, parameters: Sequence[Tensor | None], cells: Sequence[Cell]) -> bool:
        """Whether an operation takes the parameters of some layers."""
        expected = [self._leaves[name] for cell in cells for name in cell.parameters]
        parameters = [p for p in parameters if p is not None]
        return len(parameters) == len(expected) and all(
            p is q for p, q in zip(parameters, expected, strict=True)
        )

    def _note_states(self, args: tuple[Any, ...], result: Any) -> bool:
        chain, place = self._chain, self._chain.time_dim
        if self._held or len(args) != 9:  # a packed sequence has fewer
            return False
        x, start, params, _, layers, dropout, train, bidirectional, batch_first = args
        if layers != len(chain.cells) or bidirectional or (dropout and train and layers > 1):
            return False
        if not self._are(params, chain.cells):
            return False
        if x.dim() != 3 or x.requires_grad or bool(batch_first) != (place == 1):
            return False
        if x.shape[place] != chain.steps or x.shape[1 - place] != self._count:
            return False
        out, last = result
        if not out.requires_grad or start.requires_grad or bool(start.any()):
            return False
        self._held = [(t, t._version) for t in (x, out, last)]
        self._moved = [out, last]
        out, last = out.detach(), last.detach()
        self._same = (out,) if chain.every else (out.select(place, -1), last[-1])
        return True

    def finish(self, result: Any) -> ChainPass | None:
        """What was seen, given what the model returned; None if the pass was not that of the chain."""
        chain, leaves = self._chain, dict[str, Tensor](self._leaves)
        if self._failed or self._result is None or len({leaf.dtype for leaf in leaves.values()}) > 1:
            return None
        returned, changed = self._network.returned(result), any(t._version != v for t, v in self._held)
        if changed or len(returned) != 1 or returned[0] is not self._result:
            return None
        x, states = (t.detach().transpose(0, chain.time_dim) for t, _ in self._held[:2])  # [T, n, units]
        with torch.no_grad(), warnings.catch_warnings():
            # cuDNN copies weights that are not in one piece of memory, as these are not, and says so
            warnings.filterwarnings("ignore", "RNN module weights are not part of", UserWarning)
            below = _states_below(x, chain.cells, leaves)
            return ChainPass(chain, x, [*below, states], leaves, self._count)


def _states_below(x: Tensor, cells: Sequence[Cell], leaves: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The states ``[T, n, H]`` of all recurrent layers but the last."""
    for cell in cells[:-1]:
        start = x.new_zeros(1, x.shape[1], len(leaves[cell.weight]))
        weights = [leaves[name] for name in cell.parameters]
        x = torch.rnn_relu(x, start, weights, bool(cell.biases), 1, 0.0, False, False, False)[0]
        yield x
