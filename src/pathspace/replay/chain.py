"""Networks that are a chain of linear maps and ReLUs, and how their forward pass on data is followed.

There the whole of what a pass shows is known beforehand: layer l makes z_l = W_l h_{l-1} + b_l, and h_l = relu(z_l). So
it is enough to see that each operation takes what the one before it made, which costs a tenth of matching operations in
general (see ``follower``), and gradients need no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.network.network import Network
from pathspace.network.trace.functions import METADATA, short_name
from pathspace.replay.arguments import tensors_in
from pathspace.replay.matched import Summary
from pathspace.replay.replay import Replay

_RELU = ("relu", "relu_")


@dataclass(frozen=True)
class Layer:
    """One linear map; a ReLU follows it, unless it is the last."""

    weight: str
    bias: str | None


@dataclass
class ChainPass:
    """A forward pass of a chain on data.

    Attributes:
        layers: from the input to the output.
        entering: h_{l-1} of every layer, ``[n, in]``; not part of a graph.
        spreads: what was wanted of the values z_l, but of the last layer.
        leaves: the parameters, by name.
        count: the number of examples n.
    """

    layers: tuple[Layer, ...]
    entering: list[Tensor]
    spreads: list[Tensor]
    leaves: dict[str, Tensor]
    count: int

    @staticmethod
    def of(found: Replay, layers: tuple[Layer, ...], summary: Summary) -> ChainPass | None:
        """The same of a pass that was followed in general."""
        names = {id(leaf): name for name, leaf in found.leaves.items()}
        if [names.get(id(use.args[1])) for use in found.uses] != [layer.weight for layer in layers]:
            return None
        if not _of_one_type(found.leaves) or any(use.args[0].dim() != 2 for use in found.uses):
            return None
        # the nodes are noted in the order of the layers, the last one as it leaves
        nodes = list(found.nodes.values())[:-1]
        spreads = [summary(node.value, 0) if node.spread is None else node.spread for node in nodes]
        return ChainPass(layers, [use.args[0] for use in found.uses], spreads, found.leaves, found.count)


def _of_one_type(leaves: Mapping[str, Tensor]) -> bool:
    return len({leaf.dtype for leaf in leaves.values()}) == 1


def layers_of(network: Network) -> tuple[Layer, ...] | None:
    """The layers of a network that is a chain; None for any other."""
    tape, program, call = network.tape, network.program, network.call
    if call.batch_dim is None or call.outside or call.states or len(tape.outputs) != 1:
        return None
    parameter = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    entering = [leaf for leaf in tape.leaves if leaf.kind != "parameter"]
    if (
        len(entering) != 1
        or entering[0].kind != "input"
        or set(parameter.values()) != set(network.parameters)
    ):
        return None
    layers: list[Layer] = []
    made: list[int] = []
    slot, ones = entering[0].slot, torch.ones(entering[0].shape, device="cpu")
    for instruction in tape.instructions:
        first, *others = instruction.inputs
        if first != slot or len(instruction.outputs) != 1:
            return None
        if instruction.form == "movement" and not layers and not others:
            moved = instruction.function(ones)
            if not isinstance(moved, Tensor) or not bool((moved == 1).all()):
                return None
            ones = moved
        elif instruction.form == "linear" and 1 <= len(others) <= 2 and all(i in parameter for i in others):
            names = [parameter.pop(i) for i in others]  # each is read once
            layers.append(Layer(names[0], names[1] if len(names) > 1 else None))
            made.append(instruction.outputs[0])
        else:
            return None
        slot = instruction.outputs[0]
    if parameter or not layers or ones.dim() != 2 or tape.outputs != (slot,) or program.outputs != (slot,):
        return None
    expected = [name for i in made for name in ((i, "linear"), (i, "relu"))][:-1]
    found = [(op.results[0], op.name.rstrip("_")) for op in program.operations]
    if (
        expected != found
        or any(op.batch != 0 for op in program.operations)
        or set(program.nodes) != set(made)
    ):
        return None
    shapes = [[network.parameters[n].shape for n in (x.weight, x.bias) if n] for x in layers]
    if any(len(own[0]) != 2 or any(b != own[0][:1] for b in own[1:]) for own in shapes):
        return None
    return tuple(layers)


@dataclass
class _Seen:
    """What was seen so far."""

    entering: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    spreads: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None
    is_linear: bool = False  # whether the last operation was a linear map


class ChainWitness(TorchFunctionMode):
    """Looks on while a chain runs; entered before the forward pass and left after it.

    Args:
        network: a traced network that is a chain.
        layers: its layers.
        summary: what is wanted of the values z_l.
        count: the number of examples.
        few: of how many, the first ones, the pass is to tell.
    """

    def __init__(
        self, network: Network, layers: tuple[Layer, ...], summary: Summary, count: int, few: int
    ) -> None:
        super().__init__()
        self._network, self._layers, self._summary = network, layers, summary
        self._count, self._few = count, few
        self._seen: _Seen | None = _Seen()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        seen = self._seen
        if seen is not None and not self._note(seen, short_name(func), args, kwargs, result):
            self._seen = None
        return result

    def _note(
        self, seen: _Seen, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Note an operation; False if the chain has another one here."""
        if name == "linear":
            return not kwargs and self._note_linear(seen, args, result)
        if name in _RELU and args and args[0] is seen.last and seen.is_linear:
            seen.last, seen.is_linear = result, False
            return True
        # what else there is must not touch the chain
        return name in METADATA or not any(t.requires_grad for t in tensors_in(args, kwargs))

    def _note_linear(self, seen: _Seen, args: tuple[Any, ...], z: Tensor) -> bool:
        place = len(seen.entering)
        if place == len(self._layers) or len(args) < 2 or seen.is_linear:
            return False
        layer, leaves, x = self._layers[place], self._network.parameters, args[0]
        bias = args[2] if len(args) > 2 else None
        if args[1] is not leaves[layer.weight] or bias is not (layer.bias and leaves[layer.bias]):
            return False
        if x.dim() != 2 or x.shape[0] != self._count or not z.requires_grad:
            return False
        if x.requires_grad if place == 0 else x is not seen.last:
            return False
        seen.entering.append(x)
        seen.versions.append(x._version)
        if place < len(self._layers) - 1:  # before a ReLU in place
            seen.spreads.append(self._summary(self._looked_at(z), 0))
        seen.last, seen.is_linear = z, True
        return True

    def _looked_at(self, values: Tensor) -> Tensor:
        values = values.detach()
        return values if self._few == self._count else values[: self._few]

    def found(self, result: Any) -> ChainPass | None:
        """What was seen, given what the model returned; None if the pass was not that of the chain."""
        seen, self._seen = self._seen, None
        if seen is None or len(seen.entering) < len(self._layers) or not seen.is_linear:
            return None
        if not _of_one_type(self._network.parameters):
            return None
        returned = self._network.returned(result)
        if len(returned) != 1 or returned[0] is not seen.last:
            return None
        if any(x._version != version for x, version in zip(seen.entering, seen.versions, strict=True)):
            return None
        entering = list(map(self._looked_at, seen.entering))
        return ChainPass(self._layers, entering, seen.spreads, dict(self._network.parameters), self._few)
