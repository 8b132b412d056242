"""The squared network as a list of instructions.

The squared network of P16 is the traced network with squared parameters and without its ReLUs, read for one
example with ones at its inputs. The value it gives a node v is gamma_v^2; the sum over its outputs is
gamma_net^2. It is recorded once, while tracing, and replayed whenever parameters have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Pullback = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | None]
]
"""(inputs, outputs, gradients of the outputs, which inputs need one) -> gradients of the inputs."""


@dataclass(frozen=True)
class Instruction:
    """``outputs = function(*inputs)`` on slots of the squared network."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str  # the operation and the module it was called in, for messages
    of_parameter: bool = False  # a view of a parameter, or a parameter times a constant
    recurrent: bool = False  # the function takes ``taps``
    pullback: Pullback | None = None  # its gradient, where that is cheaper by hand than by autograd


@dataclass(frozen=True)
class Tap:
    """The inside of one recurrent cell: its recurrent parameter, its states, what enters."""

    recurrent: str
    before: Tensor  # [T, H]
    states: Tensor  # [T, H], after each transition
    entering: Tensor  # [T, H]; dG/d(entering) is the path mass after each transition
    backwards: bool = False  # the transitions run from T-1 down to 0


@dataclass(frozen=True)
class Leaf:
    """A slot that is filled from outside: a parameter, a buffer, a constant, or ones at a network input."""

    slot: int
    kind: str  # "parameter" | "buffer" | "constant" | "input"
    name: str = ""
    shape: tuple[int, ...] = ()
    data: Tensor | None = None


@dataclass(frozen=True)
class Tape:
    """Leaves, instructions and output slots of one squared network."""

    leaves: tuple[Leaf, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(leaves: Sequence[Leaf], instructions: Sequence[Instruction], outputs: Sequence[int]) -> Tape:
        """Keep only what the outputs depend on."""
        needed, kept = set(outputs), []
        for instruction in reversed(instructions):
            if needed.intersection(instruction.outputs):
                needed.update(instruction.inputs)
                kept.append(instruction)
        return Tape(tuple(x for x in leaves if x.slot in needed), tuple(reversed(kept)), tuple(outputs))

    def run(
        self,
        squared: Mapping[str, Tensor],
        live: Callable[[str], Tensor],
        watch: Sequence[int] = (),
        taps: list[Tap] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Replay the squared network.

        Args:
            squared: squared parameters by name; their type and device are those of the computation.
            live: returns a buffer, or a parameter outside the network, of the model by name.
            watch: slots whose values are wanted too.
            taps: a list to which the inside of every recurrent cell is appended.

        Returns:
            gamma_net^2, a 0-dim tensor, and the watched values.
        """
        slots = self._replay(squared, live, taps)
        total = slots[self.outputs[0]].sum()
        for i in self.outputs[1:]:
            total = total + slots[i].sum()
        return total, [slots[i] for i in watch]

    def _replay(
        self, squared: Mapping[str, Tensor], live: Callable[[str], Tensor], taps: list[Tap] | None = None
    ) -> dict[int, Tensor]:
        """The values of all slots."""
        like = next(iter(squared.values()))
        one = torch.ones((), dtype=like.dtype, device=like.device)
        slots: dict[int, Tensor] = {}
        for leaf in self.leaves:
            if leaf.kind == "parameter" and leaf.name in squared:
                slots[leaf.slot] = squared[leaf.name]
            elif leaf.kind == "input":
                slots[leaf.slot] = one.expand(leaf.shape)
            else:
                data = live(leaf.name) if leaf.data is None else leaf.data
                slots[leaf.slot] = data.to(dtype=like.dtype, device=like.device).square()
        for instruction in self.instructions:
            inputs = [slots[i] for i in instruction.inputs]
            if taps is not None and instruction.recurrent:
                result = instruction.function(*inputs, taps=taps)
            else:
                result = instruction.function(*inputs)
            if isinstance(result, Tensor):
                slots[instruction.outputs[0]] = result
            else:
                slots.update(zip(instruction.outputs, result, strict=True))
        return slots

    @cached_property
    def has_pullbacks(self) -> bool:
        """Whether every instruction knows its own gradient."""
        return all(instruction.pullback is not None for instruction in self.instructions)

    @cached_property
    def _active_of(self) -> dict[frozenset[int], frozenset[int]]:
        return {}

    def _active(self, wanted: frozenset[int]) -> frozenset[int]:
        """The slots that depend on some leaves; found once for each set of them."""
        if wanted not in self._active_of:
            active = set(wanted)
            for instruction in self.instructions:
                if active.intersection(instruction.inputs):
                    active.update(instruction.outputs)
            self._active_of[wanted] = frozenset(active)
        return self._active_of[wanted]

    def gradient(
        self, squared: Mapping[str, Tensor], live: Callable[[str], Tensor], names: Sequence[str]
    ) -> list[Tensor]:
        """dG/d(squared) for some parameters, by the instructions' own pullbacks, without autograd.

        For small networks autograd's bookkeeping costs as much as the arithmetic.
        """
        slots = self._replay(squared, live)
        wanted = {
            leaf.slot: leaf.name for leaf in self.leaves if leaf.kind == "parameter" and leaf.name in names
        }
        active = set(wanted)
        for instruction in self.instructions:
            if active.intersection(instruction.inputs):
                active.update(instruction.outputs)
        gradients: dict[int, Tensor] = {}

        def accumulate(slot: int, gradient: Tensor) -> None:
            gradients[slot] = gradients[slot] + gradient if slot in gradients else gradient

        for slot in self.outputs:
            accumulate(slot, torch.ones_like(slots[slot]))
        for instruction in reversed(self.instructions):
            outgoing = [gradients.get(i) for i in instruction.outputs]
            if instruction.pullback is None or all(g is None for g in outgoing):
                continue
            inputs, outputs = ([slots[i] for i in ends] for ends in (instruction.inputs, instruction.outputs))
            needed = [i in active for i in instruction.inputs]
            for slot, gradient in zip(
                instruction.inputs, instruction.pullback(inputs, outputs, outgoing, needed), strict=True
            ):
                if gradient is not None:
                    accumulate(slot, gradient)
        by_name = {name: gradients.get(slot) for slot, name in wanted.items()}
        found = (by_name.get(name) for name in names)
        return [torch.zeros_like(squared[n]) if g is None else g for n, g in zip(names, found, strict=True)]
