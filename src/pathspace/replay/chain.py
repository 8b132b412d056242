"""Networks that are a chain of layers, linear or recurrent ones, and how their forward pass on data is followed.

There the whole of what a pass shows is known beforehand. A linear layer and its ReLU are a cell with one step and no
recurrence, T = 1 and W_rec = 0:

    z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b,    h^l_t = relu(z^l_t)

So it is enough to see that each operation takes what the one before it made, instead of matching operations in general
(see ``follower``), and gradients need no graph. ``nn.RNN`` runs in one call, and returns all states of its last layer.
That is enough: a state tells where its units are open, and z follows from the states. Those of the layers below, which
it does not return, are computed once more.

Letters: T time, n examples, D input, H hidden, l layer; h^0_t the input, h^l_{-1} = 0.
"""

from __future__ import annotations

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

Summary = Callable[[Tensor, int], Tensor]
"""From a layer's values and the dimension of the examples to what is wanted of them."""


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


@dataclass
class ChainPass:
    """A forward pass of a chain on data.

    Attributes:
        chain: what ran.
        x: what entered, ``[T, n, D]``; not part of a graph.
        states: h^l of all layers but the readout, ``[T, n, H]``; likewise.
        spreads: what was wanted of their values z^l; of recurrent ones nothing, as it is found from the states.
        leaves: the parameters, by name.
        count: the number of examples n.
    """

    chain: Chain
    x: Tensor
    states: list[Tensor]
    spreads: list[Tensor]
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


# -- what a pass of one shows -------------------------------------------------------------------------------------


def chain_pass(
    network: Network,
    chain: Chain,
    inputs: Any,
    summary: Summary,
    parameters: Mapping[str, Tensor] | None = None,
) -> ChainPass | None:
    """Run a traced model on a batch; None if its pass was not that of the chain, as a replay tells.

    Args:
        network: a traced network that is a chain.
        chain: what it is.
        inputs: what the model is called with, as in :func:`pathspace.replay.replay.replay`, whose errors are raised.
        summary: what is wanted of the values z^l.
        parameters: values to run with instead of the model's own, by name.
    """
    with evaluation(network, inputs, parameters=parameters) as form:
        with ChainWitness(network, chain, summary, form.leaves, form.count) as witness:
            result = form.model(*form.args, **form.kwargs)
        return witness.finish(result)


class ChainWitness(TorchFunctionMode):
    """Looks on while a chain runs; entered before the forward pass and left after it.

    Args:
        network: a traced network that is a chain.
        chain: what it is.
        summary: what is wanted of the values z^l.
        leaves: the parameters, by name.
        count: the number of examples.
    """

    def __init__(
        self, network: Network, chain: Chain, summary: Summary, leaves: Mapping[str, Tensor], count: int
    ) -> None:
        super().__init__()
        self._network, self._chain, self._summary = network, chain, summary
        self._leaves, self._count = leaves, count
        self._failed = False
        self._held: list[tuple[Tensor, int]] = []  # what entered and what layers made, with their versions
        self._moved: list[Tensor] = []  # what the next layer may read, and views of that
        self._same: tuple[Tensor, ...] = ()  # which of it the chain's reads
        self._seen = 0  # layers
        self._spreads: list[Tensor] = []
        self._closed: Tensor | None = None  # values of a linear layer whose ReLU is to come
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
        if name in ("relu", "relu_"):
            return bool(args) and args[0] is self._closed and self._note_relu(result)
        if name == "rnn_relu":
            return not kwargs and self._note_states(args, result)
        if name in MOVEMENTS and args and self._is_moved(args[0]) and isinstance(result, Tensor):
            self._moved.append(result)
            return result.requires_grad
        return False

    def _is_moved(self, tensor: Any) -> bool:
        return any(tensor is moved for moved in self._moved)

    def _note_linear(self, args: tuple[Any, ...], z: Tensor) -> bool:
        chain, last = self._chain, len(self._chain.cells)
        if not 2 <= len(args) <= 3 or self._seen > last or self._closed is not None:
            return False
        x, cell = args[0], chain.layers[self._seen]
        if cell.recurrent is not None or not z.requires_grad or not self._are(args[1:], [cell]):
            return False
        if self._seen:
            if not self._is_moved(x) or not any(map(x.is_set_to, self._same)):
                return False
        elif x.dim() != 2 or x.shape[0] != self._count or x.requires_grad:
            return False
        else:
            self._hold(x)
        if self._seen == last:
            self._result = z
        else:  # before a ReLU in place
            self._spreads.append(self._summary(z.detach(), 0))
            self._closed = z
        self._seen += 1
        return True

    def _are(self, parameters: Sequence[Tensor | None], cells: Sequence[Cell]) -> bool:
        """Whether an operation takes the parameters of some layers."""
        expected = [self._leaves[name] for cell in cells for name in cell.parameters]
        parameters = [p for p in parameters if p is not None]
        return len(parameters) == len(expected) and all(
            p is q for p, q in zip(parameters, expected, strict=True)
        )

    def _note_relu(self, h: Tensor) -> bool:
        self._hold(h)
        self._moved, self._same, self._closed = [h], (h,), None
        return True

    def _note_states(self, args: tuple[Any, ...], result: Any) -> bool:
        chain, place = self._chain, self._chain.time_dim
        if place is None or self._seen or len(args) != 9:  # a packed sequence has fewer
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
        self._hold(x, out, last)
        self._moved, self._seen = [out, last], layers
        out, last = out.detach(), last.detach()
        self._same = (out,) if chain.every else (out.select(place, -1), last[-1])
        return True

    def _hold(self, *tensors: Tensor) -> None:
        self._held += [(t, t._version) for t in tensors]

    def finish(self, result: Any) -> ChainPass | None:
        """What was seen, given what the model returned; None if the pass was not that of the chain."""
        chain, leaves = self._chain, dict[str, Tensor](self._leaves)
        if self._failed or self._result is None or len({leaf.dtype for leaf in leaves.values()}) > 1:
            return None
        returned = self._network.returned(result)
        if len(returned) != 1 or returned[0] is not self._result:
            return None
        if any(t._version != version for t, version in self._held):
            return None
        held = self._held[:2] if chain.recurrent else self._held
        x, *states = (self._looked_at(t) for t, _ in held)
        if chain.recurrent:
            with torch.no_grad():
                states = [*_states_below(x, chain.cells, leaves), *states]
        return ChainPass(chain, x, states, self._spreads, leaves, self._count)

    def _looked_at(self, values: Tensor) -> Tensor:
        """Values ``[T, n, units]``."""
        values, place = values.detach(), self._chain.time_dim
        return values.unsqueeze(0) if place is None else values.transpose(0, place)


def _states_below(x: Tensor, cells: Sequence[Cell], leaves: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """The states ``[T, n, H]`` of all recurrent layers but the last."""
    for cell in cells[:-1]:
        start = x.new_zeros(1, x.shape[1], len(leaves[cell.weight]))
        weights = [leaves[name] for name in cell.parameters]
        x = torch.rnn_relu(x, start, weights, bool(cell.biases), 1, 0.0, False, False, False)[0]
        yield x
