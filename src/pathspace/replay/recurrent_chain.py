"""Networks that are a stack of recurrent layers and a linear readout, and how their forward pass on data is followed.

``nn.RNN`` runs in one call, and returns all states of its last layer. That is enough: a state is the ReLU of its value
z, so it tells where the units are open, and z^l_t = W_in h^{l-1}_t + W_rec h^l_{t-1} + b. The states of the layers
below, which it does not return, are computed once more.

Letters: T time, n examples, D input, H hidden, l layer; h^l_t = relu(z^l_t), h^0_t the input, h^l_{-1} = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.network.network import Network
from pathspace.network.rules import MOVEMENTS
from pathspace.network.trace.functions import METADATA, short_name
from pathspace.replay.arguments import tensors_in
from pathspace.replay.chain import Layer
from pathspace.squared.stacked import Stack
from pathspace.squared.tape import Instruction


@dataclass(frozen=True)
class Cell:
    """One recurrent layer: names of its parameters."""

    weight: str
    recurrent: str
    biases: tuple[str, ...]


@dataclass(frozen=True)
class RecurrentChain:
    """Recurrent layers from the input to a linear readout.

    Attributes:
        cells: the layers, from the input on.
        readout: the last linear map.
        steps: T.
        time_dim: of what enters, the examples being the other of its first two dimensions.
        every: whether the states of all steps are read, or those of the last alone.
    """

    cells: tuple[Cell, ...]
    readout: Layer
    steps: int
    time_dim: int
    every: bool


@dataclass
class RecurrentPass:
    """A forward pass of a recurrent chain on data.

    Attributes:
        chain: what ran.
        x: what entered, ``[T, n, D]``; not part of a graph.
        states: h^l of all layers, ``[T, n, H]``; likewise.
        leaves: the parameters, by name.
        count: the number of examples n.
    """

    chain: RecurrentChain
    x: Tensor
    states: list[Tensor]
    leaves: dict[str, Tensor]
    count: int


def recurrent_chain_of(network: Network) -> RecurrentChain | None:
    """What a network is if it is a recurrent chain; None for any other."""
    tape, program, call = network.tape, network.program, network.call
    if call.batch_dim not in (0, 1) or call.outside or call.states or len(tape.outputs) != 1:
        return None
    owners = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    entering = [leaf for leaf in tape.leaves if leaf.kind != "parameter"]
    if len(entering) != 1 or entering[0].kind != "input" or set(owners.values()) != set(network.parameters):
        return None
    links = list(tape.instructions)
    slot, ones = entering[0].slot, torch.ones(entering[0].shape, device="cpu")
    while links and links[0].form == "movement" and links[0].inputs == (slot,):
        moved = links[0].function(ones)
        if not isinstance(moved, Tensor) or not bool((moved == 1).all()):
            return None
        slot, ones = links.pop(0).outputs[0], moved
    if len(links) < 2 or not isinstance(links[0].form, Stack) or ones.dim() != 3:
        return None
    stack, movements, last = links[0].form, links[1:-1], links[-1]
    if stack.directions > 1 or any(stack.starts) or links[0].inputs[0] != slot or last.form != "linear":
        return None
    names = [owners.pop(i, "") for link in (links[0], last) for i in link.inputs[1:]]  # each is read once
    if "" in names or owners or ones.shape[1 - stack.time_dim] != 1:
        return None
    own, cells = stack.per_cell, []
    for first in range(0, stack.layers * own, own):
        w_in, w_rec, *biases = names[first : first + own]
        cells.append(Cell(w_in, w_rec, tuple(biases)))
    weight, *biases = names[stack.layers * own :]
    shapes = [network.parameters[name].shape for name in (weight, cells[-1].recurrent)]
    every = _is_read_at_every_step(links[0], movements, last.inputs[0], ones.shape[stack.time_dim], shapes[1])
    expected = [link.outputs[0] for link in links]
    if (
        every is None
        or len(biases) > 1
        or shapes[0][1:] != shapes[1][1:]
        or tape.outputs != last.outputs
        or program.outputs != last.outputs
        or set(program.nodes) != set(last.outputs)
        or [op.results[0] for op in program.operations] != expected
        or any(op.name != link.name.split(" ")[0] for op, link in zip(program.operations, links, strict=True))
    ):
        return None
    readout = Layer(weight, biases[0] if biases else None)
    return RecurrentChain(tuple(cells), readout, ones.shape[stack.time_dim], stack.time_dim, every)


def _is_read_at_every_step(
    recurrent: Instruction, movements: Sequence[Instruction], read: int, steps: int, shape: torch.Size
) -> bool | None:
    """Whether all states of the last layer reach the readout as they are, or those of the last step; None: neither."""
    stack, hidden = recurrent.form, shape[0]
    time = torch.arange(steps, device="cpu")
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


class RecurrentWitness(TorchFunctionMode):
    """Looks on while a recurrent chain runs; entered before the forward pass and left after it.

    Args:
        network: a traced network.
        chain: what it is.
        count: the number of examples.
        few: of how many, the first ones, the pass is to tell.
    """

    def __init__(self, network: Network, chain: RecurrentChain, count: int, few: int) -> None:
        super().__init__()
        self._network, self._chain, self._count, self._few = network, chain, count, few
        self._leaves = network.parameters
        self._names = [n for cell in chain.cells for n in (cell.weight, cell.recurrent, *cell.biases)]
        self._failed = False
        self._x: Tensor | None = None
        self._out: Tensor | None = None  # of the last layer, as it was returned
        self._result: Tensor | None = None  # of the readout
        self._versions: tuple[int, ...] = ()
        self._moved = list[Tensor]()  # what the recurrent layers returned, and views of that

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._failed = self._failed or not self._note(short_name(func), args, kwargs, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Note an operation; False if the chain has another one here."""
        if name in METADATA:
            return True
        if name == "rnn_relu":
            return self._out is None and not kwargs and self._note_states(args, result)
        if name == "linear" and args and self._is_moved(args[0]):
            return not kwargs and self._note_readout(args, result)
        if name in MOVEMENTS and args and self._is_moved(args[0]) and isinstance(result, Tensor):
            self._moved.append(result)
            return result.requires_grad
        # what else there is must not touch the chain
        return not any(t.requires_grad for t in tensors_in(args, kwargs))

    def _is_moved(self, tensor: Any) -> bool:
        return any(tensor is known for known in self._moved)

    def _note_states(self, args: tuple[Any, ...], result: Any) -> bool:
        if len(args) != 9:  # a packed sequence has fewer
            return False
        x, start, params, _, layers, dropout, train, bidirectional, batch_first = args
        chain, place = self._chain, self._chain.time_dim
        if layers != len(chain.cells) or bidirectional or (dropout and train and layers > 1):
            return False
        own = [self._leaves[name] for name in self._names]
        if len(params) != len(own) or any(p is not q for p, q in zip(params, own, strict=True)):
            return False
        if x.dim() != 3 or x.requires_grad or bool(batch_first) != (place == 1):
            return False
        if x.shape[place] != chain.steps or x.shape[1 - place] != self._count:
            return False
        if start.requires_grad or bool(start.any()):
            return False
        out, last = result
        self._x, self._out, self._moved = x, out, [out, last]
        self._versions = tuple(t._version for t in (x, out, last))
        return out.requires_grad

    def _note_readout(self, args: tuple[Any, ...], z: Tensor) -> bool:
        readout, place, out = self._chain.readout, self._chain.time_dim, self._out
        if out is None or self._result is not None or not 2 <= len(args) <= 3:
            return False
        (h, weight), bias = args[:2], args[2] if len(args) > 2 else None
        if weight is not self._leaves[readout.weight]:
            return False
        if bias is not (readout.bias and self._leaves[readout.bias]):
            return False
        out, last = out.detach(), self._moved[1].detach()
        same = (out,) if self._chain.every else (out.select(place, -1), last[-1])
        self._result = z
        return z.requires_grad and any(_is_same(h, t) for t in same)

    def found(self, result: Any) -> RecurrentPass | None:
        """What was seen, given what the model returned; None if the pass was not that of the chain."""
        x, out = self._x, self._out
        if self._failed or x is None or out is None or self._result is None:
            return None
        if len({leaf.dtype for leaf in self._leaves.values()}) > 1:
            return None
        returned = self._network.returned(result)
        if len(returned) != 1 or returned[0] is not self._result:
            return None
        if self._versions != tuple(t._version for t in (x, *self._moved[:2])):
            return None
        x, out = x.detach(), out.detach()
        if self._chain.time_dim == 1:
            x, out = x.transpose(0, 1), out.transpose(0, 1)
        if self._few < self._count:
            x, out = x[:, : self._few], out[:, : self._few]
        with torch.no_grad():
            states = states_below(x, self._chain.cells, self._leaves)
        return RecurrentPass(self._chain, x, [*states, out], dict(self._leaves), self._few)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same part of the same memory."""
    place = (tensor.data_ptr(), tensor.shape, tensor.stride())
    return place == (other.data_ptr(), other.shape, other.stride())


def states_below(x: Tensor, cells: Sequence[Cell], leaves: Any) -> list[Tensor]:
    """The states ``[T, n, H]`` of all layers but the last."""
    states: list[Tensor] = []
    for cell in cells[:-1]:
        # z_t = W_in x_t + b + W_rec h_{t-1}
        recurrent = leaves[cell.recurrent].t()
        h = entering_values(x, cell, leaves, x.new_empty(*x.shape[:2], len(recurrent)))
        rows = h.unbind(0)
        before = rows[0].relu_()
        for row in rows[1:]:
            before = row.addmm_(before, recurrent).relu_()
        states.append(h)
        x = h
    return states


def entering_values(x: Tensor, cell: Cell, leaves: Any, out: Tensor) -> Tensor:
    """W_in x_t + b of all steps, ``[T, n, H]``, in memory that is given."""
    flat, weight = x.reshape(-1, x.shape[2]), leaves[cell.weight]
    made = out.view(len(flat), -1)
    if cell.biases:
        torch.addmm(leaves[cell.biases[0]] + leaves[cell.biases[1]], flat, weight.t(), out=made)
    else:
        torch.mm(flat, weight.t(), out=made)
    return out
