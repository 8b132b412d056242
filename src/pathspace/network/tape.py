"""The squared network as a list of instructions.

The squared network of P16 is the traced network with squared parameters and without its ReLUs, read for one
example with ones at its inputs. The value it gives a node v is gamma_v^2; the sum over its outputs is
gamma_net^2. It is recorded once, while tracing, and replayed whenever parameters have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Instruction:
    """``outputs = function(*inputs)`` on slots of the squared network."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str  # the operation and the module it was called in, for messages
    of_parameter: bool = False  # a view of a parameter, or a parameter times a constant
    recurrent: bool = False  # the function takes ``taps`` and ``names``


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
        total = slots[self.outputs[0]].sum()
        for i in self.outputs[1:]:
            total = total + slots[i].sum()
        return total, [slots[i] for i in watch]
