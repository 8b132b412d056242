"""The squared network as a list of instructions.

The squared network of P16 is the traced network with squared parameters and without its ReLUs, read
for one example with ones at its inputs. The value it gives a node v is gamma_v^2; the sum over its
outputs is gamma_net^2. It is recorded once, while tracing, and replayed whenever parameters have
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.normalization import Normalization
from pathspace.squared.sharding import Gathering, first_sharded

Mix = Callable[[tuple[int, ...], Tensor], Tensor]
"""Replaces the value of a slot, (slot,), or of step t of a recurrent cell in it, (slot, cell, t)."""


@dataclass(frozen=True)
class Instruction:
    """``outputs = function(*inputs)`` on slots of the squared network."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str  # the operation and the module it was called in, for messages
    of_parameter: bool = False  # a view of a parameter, or a parameter times a constant
    recurrent: bool = False  # the function takes ``taps``
    # what it is, for those that read the tape: "linear", "movement", "product", the form of a
    # stack, or a normalization
    form: Any = None
    shape: tuple[int, ...] = ()  # of the first output
    fixed: bool = False  # the function has fixed edges, and takes their ``power``
    # the function multiplies by the inverse of a statistic, which this computes of its inputs; it
    # takes it as ``held``
    statistic: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Tap:
    """The inside of one recurrent cell: its recurrent parameter, its states, what enters."""

    recurrent: str
    before: Tensor  # [T, H], or of several sequences [T, N, H]
    states: Tensor  # likewise, after each transition
    entering: Tensor  # likewise; dG/d(entering) is the path mass after each transition
    backwards: bool = False  # the transitions run from T-1 down to 0


@dataclass(frozen=True)
class Sums:
    """The kind of sums over paths that a tape computes: those of squares by default.

    Attributes:
        power: of the weights of fixed edges, of constants and of buffers.
        other: returns a buffer of a second network by name; its product with that of the first then
            takes the place of a power.
        held: first output slot of an instruction -> the inverse of its statistic, where it is not
            to be computed.
        noted: takes the inverses of all statistics, by the first output slot of the instruction.
    """

    power: float = 2.0
    other: Callable[[str], Tensor] | None = None
    held: Mapping[int, Tensor] = field(default_factory=dict)
    noted: dict[int, Tensor] | None = None

    def options(self, instruction: Instruction, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the keyword arguments for an instruction's function; note its statistic if that is asked for."""
        options: dict[str, Any] = {}
        if instruction.fixed:
            options["power"] = self.power
        if instruction.statistic is None:
            return options
        slot = instruction.outputs[0]
        if slot in self.held:
            options["held"] = self.held[slot]
        if self.noted is not None:
            self.noted[slot] = instruction.statistic(*inputs)
        return options

    def of_buffer(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """Return the value of a buffer or constant on the tape, in the type and on the device of ``like``."""
        value = _as_fixed_edges(value, like)
        if self.other is None or not name:
            return raised(value, self.power)
        return value * _as_fixed_edges(self.other(name), like)


def raised(weights: Tensor, power: float) -> Tensor:
    """Return |w|^p of the weights of fixed edges."""
    return weights.square() if power == 2 else weights.abs().pow(power)


def _as_fixed_edges(value: Tensor, like: Tensor) -> Tensor:
    return value.to(dtype=like.dtype, device=like.device)


SQUARES = Sums()


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
    def of(
        leaves: Sequence[Leaf], instructions: Sequence[Instruction], outputs: Sequence[int]
    ) -> Tape:
        """Make a tape of the leaves and instructions that the outputs depend on."""
        needed = set(outputs)
        kept: list[Instruction] = []
        for instruction in reversed(instructions):
            if needed.intersection(instruction.outputs):
                needed.update(instruction.inputs)
                kept.append(instruction)
        kept.reverse()
        read = tuple(leaf for leaf in leaves if leaf.slot in needed)
        return Tape(read, tuple(kept), tuple(outputs))

    def run(
        self,
        squared: Mapping[str, Tensor],
        live: Callable[[str], Tensor],
        watch: Sequence[int] = (),
        taps: list[Tap] | None = None,
        mix: Mix | None = None,
        inputs: Callable[[tuple[int, ...]], Tensor] | None = None,
        sums: Sums = SQUARES,
    ) -> tuple[Tensor, list[Tensor]]:
        """Replay the squared network.

        Args:
            squared: squared parameters by name; their type and device are those of the computation.
                Sharded ones are gathered for each instruction that reads them, and freed after it.
            live: returns a buffer, or a parameter outside the network, of the model by name.
            watch: slots whose values are wanted too.
            taps: a list to which the inside of every recurrent cell is appended.
            mix: replaces values by others as soon as they are there.
            inputs: returns the values of a network input of some shape; ones by default.
            sums: which sums over paths are wanted; ``squared`` has the values of the parameters in
                these.

        Returns:
            gamma_net^2, a 0-dim tensor, and the watched values.
        """
        like = next(iter(squared.values())) if squared else torch.zeros(())
        slots = self._leaves(squared, live, like, inputs, sums)
        if first_sharded(slots.values()) is None:
            return self._run(slots, watch, taps, mix, sums)
        gathering = Gathering()
        with gathering:
            for slot in {*watch, *self.outputs} & slots.keys():
                slots[slot] = gathering.full(slots[slot])
            return self._run(slots, watch, taps, mix, sums, gathering)

    def _run(
        self,
        slots: dict[int, Tensor],
        watch: Sequence[int],
        taps: list[Tap] | None,
        mix: Mix | None,
        sums: Sums,
        gathering: Gathering | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the instructions on the values of the leaves."""
        for instruction, last_reads in zip(self.instructions, self._last_reads, strict=True):
            inputs = [slots[i] for i in instruction.inputs]
            if gathering is not None:
                inputs = [gathering.full(value) for value in inputs]
                # a slot that is not read again may keep a gathered weight in memory
                for slot in last_reads.difference(watch):
                    del slots[slot]
            if instruction.recurrent:
                inner = _inside(instruction, mix)
                result = instruction.function(*inputs, taps=taps, mix=inner)
            else:
                result = instruction.function(*inputs, **sums.options(instruction, inputs))
            results = (result,) if isinstance(result, Tensor) else result
            for slot, value in zip(instruction.outputs, results, strict=True):
                slots[slot] = value if mix is None else mix((slot,), value)
        return self._total(slots), [slots[i] for i in watch]

    def _total(self, slots: Mapping[int, Tensor]) -> Tensor:
        """Add up the outputs; a zero of their type where there is none."""
        totals = [slots[i].sum() for i in self.outputs]
        if totals:
            return sum(totals[1:], totals[0])
        some = next(iter(slots.values()), torch.zeros(()))
        return some.new_zeros(())

    def _leaves(
        self,
        squared: Mapping[str, Tensor],
        live: Callable[[str], Tensor],
        like: Tensor,
        inputs: Callable[[tuple[int, ...]], Tensor] | None,
        sums: Sums,
    ) -> dict[int, Tensor]:
        """Return the values of the leaves, in the type and on the device of ``like``."""
        slots: dict[int, Tensor] = {}
        for leaf in self.leaves:
            if leaf.kind == "parameter" and leaf.name in squared:
                slots[leaf.slot] = squared[leaf.name]
            elif leaf.kind == "input" and inputs is not None:
                slots[leaf.slot] = inputs(leaf.shape)
            elif leaf.kind == "input":
                one = torch.ones((), dtype=like.dtype, device=like.device)
                slots[leaf.slot] = one.expand(leaf.shape)
            elif leaf.data is not None:
                slots[leaf.slot] = sums.of_buffer("", self._constant(leaf, like.device), like)
            else:
                slots[leaf.slot] = sums.of_buffer(leaf.name, _without_mask(leaf, live), like)
        return slots

    def _constant(self, leaf: Leaf, device: torch.device) -> Tensor:
        """Return a constant on a device, moved there once: a copy from the processor makes a GPU wait."""
        assert leaf.data is not None
        if leaf.data.device == device:
            return leaf.data
        key = leaf.slot, device
        if key not in self._moved:
            self._moved[key] = leaf.data.to(device)
        return self._moved[key]

    @cached_property
    def _moved(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def read_buffers(
        self, live: Callable[[str], Tensor], parameters: Iterable[str]
    ) -> list[Tensor]:
        """Return the tensors of the model that the tape reads, but for some parameters."""
        inside = set(parameters)
        leaves = (leaf for leaf in self.leaves if leaf.kind != "input" and leaf.data is None)
        return [live(leaf.name) for leaf in leaves if leaf.name not in inside]

    @cached_property
    def _last_reads(self) -> list[set[int]]:
        """For each instruction, the slots that it reads and that nothing reads after it."""
        read_later = set(self.outputs)
        result: list[set[int]] = []
        for instruction in reversed(self.instructions):
            result.append(set(instruction.inputs) - read_later)
            read_later.update(instruction.inputs)
        result.reverse()
        return result

    @cached_property
    def maps(self) -> Mapping[str, tuple[int, int]]:
        """Parameter that is the matrix of a linear map, and read by nothing else -> slots that enter and leave it."""
        names = {leaf.slot: leaf.name for leaf in self.leaves if leaf.kind == "parameter"}
        read = list(self.outputs)
        for instruction in self.instructions:
            read += instruction.inputs
        uses = Counter(names[slot] for slot in read if slot in names)
        result: dict[str, tuple[int, int]] = {}
        for instruction in self.instructions:
            if instruction.form != "linear":
                continue
            name = names.get(instruction.inputs[1], "")
            if uses[name] == 1:
                result[name] = (instruction.inputs[0], instruction.outputs[0])
        return result

    @cached_property
    def divides(self) -> bool:
        """Return whether an instruction divides by a statistic of its inputs."""
        return any(instruction.statistic is not None for instruction in self.instructions)

    @cached_property
    def filled(self) -> frozenset[int]:
        """Slots that instructions fill."""
        return frozenset(slot for instruction in self.instructions for slot in instruction.outputs)

    @cached_property
    def normalizations(self) -> Mapping[int, Normalization]:
        """Slot -> the layer that fills it by dividing by a statistic of what enters."""
        return {
            i.outputs[0]: i.form for i in self.instructions if isinstance(i.form, Normalization)
        }

    @cached_property
    def product(self) -> str:
        """An operation that multiplies two activations or weights, and its place; empty where there is none."""
        return next((i.name for i in self.instructions if i.form == "product"), "")


def _inside(instruction: Instruction, mix: Mix | None) -> Mix | None:
    """Return what replaces the values inside a recurrent instruction, by the keys that they have there."""
    if mix is None:
        return None
    first = instruction.outputs[0]
    return lambda key, value: mix((first, *key), value)


def _without_mask(leaf: Leaf, live: Callable[[str], Tensor]) -> Tensor:
    """Return the tensor of the model that a leaf stands for; the infinities of a mask in a buffer are zeros."""
    data = live(leaf.name)
    return data.masked_fill(data.isinf(), 0) if leaf.kind == "buffer" else data
