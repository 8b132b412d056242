"""The squared network as a list of instructions.

The squared network of P16 is the traced network with squared parameters and without its ReLUs, read for one
example with ones at its inputs. The value it gives a node v is gamma_v^2; the sum over its outputs is
gamma_net^2. It is recorded once, while tracing, and replayed whenever parameters have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pathspace.squared.blend import Blend
from pathspace.squared.normalization import Normalization
from pathspace.squared.repeated import Repeated, spread
from pathspace.squared.squares import Outer, Square, dense

Pullback = Callable[
    [Sequence[Any], Any, Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | Outer | None]
]
"""(inputs, what was saved, gradients of the outputs, which inputs need one) -> gradients of the inputs."""

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
    pullback: Pullback | None = None  # its gradient by hand; None leaves it to autograd
    # the function once more, for parameters that are ``Square``: (outputs, what its pullback needs); where there is
    # none the pullback gets the outputs
    forward: Callable[..., tuple[Tensor | tuple[Tensor, ...], Any]] | None = None
    shape: tuple[int, ...] | None = None  # of its output, where the pullback needs no more of it than that
    # what it is, for those that read the tape: "linear", "movement", "windows", the form of a stack, or a
    # normalization; "windows" take and give ``Repeated`` values
    form: Any = None


@dataclass(frozen=True)
class Tap:
    """The inside of one recurrent cell: its recurrent parameter, its states, what enters."""

    recurrent: str
    before: Tensor  # [T, H]
    states: Tensor  # [T, H], after each transition
    entering: Tensor  # [T, H]; dG/d(entering) is the path mass after each transition
    backwards: bool = False  # the transitions run from T-1 down to 0


@dataclass
class Inside:
    """What a recurrent instruction keeps for its pullback: of every cell the states, and dG/d(state) once known."""

    recurrent: list[str]  # names of the recurrent parameters
    states: list[Tensor]  # [T, H] each
    deltas: list[Tensor | None]


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
        mix: Mix | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Replay the squared network.

        Args:
            squared: squared parameters by name; their type and device are those of the computation.
            live: returns a buffer, or a parameter outside the network, of the model by name.
            watch: slots whose values are wanted too.
            taps: a list to which the inside of every recurrent cell is appended.
            mix: replaces values by others as soon as they are there.

        Returns:
            gamma_net^2, a 0-dim tensor, and the watched values.
        """
        slots = self._leaves(squared, live, next(iter(squared.values())))
        for instruction in self.instructions:
            inputs = [slots[i] for i in instruction.inputs]
            if instruction.recurrent:
                first = instruction.outputs[0]
                inner = None if mix is None else lambda key, h, first=first: mix((first, *key), h)
                result = instruction.function(*inputs, taps=taps, mix=inner)
            else:
                result = instruction.function(*inputs)
            for slot, value in zip(instruction.outputs, _several(result), strict=True):
                slots[slot] = value if mix is None else mix((slot,), value)
        total = slots[self.outputs[0]].sum()
        for i in self.outputs[1:]:
            total = total + slots[i].sum()
        return total, [slots[i] for i in watch]

    def _leaves(
        self, squared: Mapping[str, Any], live: Callable[[str], Tensor], like: Tensor
    ) -> dict[int, Any]:
        """The values of the leaves, in the type and on the device of ``like``."""
        one = torch.ones((), dtype=like.dtype, device=like.device)
        slots: dict[int, Any] = {}
        for leaf in self.leaves:
            if leaf.kind == "parameter" and leaf.name in squared:
                slots[leaf.slot] = squared[leaf.name]
            elif leaf.kind == "input":
                slots[leaf.slot] = one.expand(leaf.shape)
            else:
                data = live(leaf.name) if leaf.data is None else leaf.data
                slots[leaf.slot] = data.to(dtype=like.dtype, device=like.device).square()
        return slots

    @cached_property
    def made(self) -> frozenset[int]:
        """Slots that instructions fill."""
        return frozenset(slot for instruction in self.instructions for slot in instruction.outputs)

    @cached_property
    def normalizations(self) -> Mapping[int, Normalization]:
        """Slot -> the layer that fills it by dividing by a statistic of what enters."""
        return {i.outputs[0]: i.form for i in self.instructions if isinstance(i.form, Normalization)}

    @cached_property
    def _last(self) -> frozenset[int]:
        """Outputs of the network that nothing reads: their values need not be known to know the gradient."""
        read = {i for instruction in self.instructions for i in instruction.inputs}
        return frozenset(self.outputs) - read

    @cached_property
    def read_once(self) -> frozenset[str]:
        """Names of the parameters that one instruction alone reads, once."""
        reads = Counter(i for instruction in self.instructions for i in instruction.inputs)
        reads.update(self.outputs)
        return frozenset(
            leaf.name for leaf in self.leaves if leaf.kind == "parameter" and reads[leaf.slot] == 1
        )

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
        self,
        squared: Mapping[str, Square],
        live: Callable[[str], Tensor],
        names: Sequence[str],
        blend: Blend | None = None,
    ) -> list[Tensor | Outer]:
        """dG/d(squared) for some parameters, by the instructions' own pullbacks.

        For small networks autograd's bookkeeping costs as much as the arithmetic, and for large ones it keeps and
        writes what nobody reads. Instructions without a pullback take autograd, one by one. To be called without
        gradient mode, but not in inference mode.

        Args:
            squared: parameters to be squared, by name.
            live: returns a buffer, or a parameter outside the network, of the model by name.
            names: whose gradients are wanted.
            blend: mixes given values into some slots, none of them inside a recurrent layer.

        Returns:
            The gradients; they may share memory.
        """
        position = {leaf.name: leaf.slot for leaf in self.leaves if leaf.kind == "parameter"}
        wanted = frozenset(position[name] for name in names if name in position)
        _, gradients, _ = self._sweep(squared, live, self._active(wanted), blend=blend)
        found = [gradients.get(position.get(name, -1)) for name in names]
        zeros = (
            squared[n].like().new_zeros(squared[n].shape) if g is None else g
            for n, g in zip(names, found, strict=True)
        )
        return list(zeros)

    def masses(
        self, squared: Mapping[str, Square], live: Callable[[str], Tensor], watch: Sequence[int]
    ) -> tuple[list[tuple[Tensor, Tensor | None]], list[Inside]]:
        """Values h and dG/dh of some slots, and the inside of all recurrent instructions; see :meth:`gradient`."""
        parameters = frozenset(leaf.slot for leaf in self.leaves if leaf.kind == "parameter")
        active = self._active(parameters) - parameters
        slots, gradients, saved = self._sweep(squared, live, active, frozenset(watch))
        found = [(spread(slots[i]), gradients.get(i)) for i in watch]
        return [(h, None if g is None else dense(g)) for h, g in found], [
            item for item in saved if isinstance(item, Inside)
        ]

    def _sweep(
        self,
        squared: Mapping[str, Square],
        live: Callable[[str], Tensor],
        active: frozenset[int],
        watch: frozenset[int] = frozenset(),
        blend: Blend | None = None,
    ) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:
        """Forward and backward: values and gradients of slots, the latter where active, and what was saved."""
        like = next(iter(squared.values())).like()
        slots = self._leaves(squared, live, like)
        last = self._last - watch
        saved = []
        for instruction in self.instructions:
            saved.append(self._forward(instruction, slots, active, last))
            if blend is not None:
                blend.mix_(slots, instruction.outputs)
        gradients: dict[int, Any] = {}

        def accumulate(slot: int, gradient: Tensor | Outer | Repeated) -> None:
            known = gradients.get(slot)
            gradients[slot] = gradient if known is None else dense(known) + dense(gradient)

        one = like.new_ones(())
        for slot in self.outputs:
            accumulate(slot, one.expand(slots[slot] if isinstance(slots[slot], tuple) else slots[slot].shape))
        for instruction, kept in zip(reversed(self.instructions), reversed(saved), strict=True):
            if blend is not None:
                blend.unmix_(gradients, instruction.outputs)
            outgoing = [gradients.get(i) for i in instruction.outputs]
            needed = [i in active for i in instruction.inputs]
            if all(g is None for g in outgoing) or not (any(needed) or instruction.recurrent):
                continue
            inputs = [slots[i] for i in instruction.inputs]
            if instruction.forward is None:
                inputs = [dense(value) for value in inputs]
            if instruction.form != "windows":
                outgoing = [None if g is None else dense(g) for g in outgoing]
            pullback = instruction.pullback or _by_autograd
            for slot, gradient in zip(
                instruction.inputs, pullback(inputs, kept, outgoing, needed), strict=True
            ):
                if gradient is not None and slot in active:
                    accumulate(slot, gradient)
        return slots, gradients, saved

    def _forward(
        self, instruction: Instruction, slots: dict[int, Any], active: frozenset[int], last: frozenset[int]
    ) -> Any:
        """Fill an instruction's slots, but for those whose values nobody needs; returns what its pullback needs."""
        if instruction.form != "windows":
            slots.update((i, spread(slots[i])) for i in instruction.inputs if isinstance(slots[i], Repeated))
        if instruction.shape is not None and instruction.outputs[0] in last:
            slots[instruction.outputs[0]] = instruction.shape
            return None
        inputs = [slots[i] for i in instruction.inputs]
        if instruction.forward is not None:
            result, saved = instruction.forward(*inputs)
        else:
            inputs = [dense(value) for value in inputs]
            if instruction.pullback is not None or not active.intersection(instruction.inputs):
                result = saved = instruction.function(*inputs)
            else:
                ends = zip(inputs, instruction.inputs, strict=True)
                inputs = [t.detach().requires_grad_() if i in active else t for t, i in ends]
                with torch.enable_grad():
                    made = _several(instruction.function(*inputs))
                saved = (inputs, made)
                result = tuple(t.detach() for t in made)
        slots.update(zip(instruction.outputs, _several(result), strict=True))
        return saved


def _several(result: Any) -> Sequence[Any]:
    return (result,) if isinstance(result, (Tensor, Repeated)) else result


def _by_autograd(
    _: Sequence[Tensor],
    saved: tuple[list[Tensor], Sequence[Tensor]],
    gradients: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The pullback of an instruction that has none of its own."""
    inputs, outputs = saved
    known = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None and t.requires_grad]
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
    if not known:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([t for t, _ in known], wanted, [g for _, g in known], allow_unused=True))
    return [next(found) if need else None for need in needed]
