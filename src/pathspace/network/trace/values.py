"""The facts that a trace knows about one tensor, and the memory that the tensor shares with its views.

A write into one view changes the others. The write is only noted. The value of another view is
computed when it is read: unchanged if the view shows other elements, else the current value of the
memory's owner, seen through the view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pathspace.network.errors import UntraceableError
from pathspace.network.program import Cut, Operation

View = Callable[[Tensor], Tensor]
"""From a tensor of the owner's shape to what a view of it shows."""


def identity(t: Tensor) -> Tensor:
    """Return the tensor itself: a view of all elements, or an operation that changes nothing."""
    return t


class Memory:
    """The memory of one tensor, its owner, and of all views of it.

    Attributes:
        members: how many tensors show it.
        version: how many writes there were while several did.
        owner: the value of all of it, up to the writes that are pending.
        pending: (elements, their new value) for each write since.
        unsure: the last write through a view that may have been a copy.
        parameter: name of the parameter that lives there; empty for none.
        constant: whether a constant of the model lay there first.
    """

    __slots__ = (
        "_last_write",
        "constant",
        "members",
        "owner",
        "parameter",
        "pending",
        "unsure",
        "version",
    )

    def __init__(self) -> None:
        self.members = 1
        self.version = 0
        self.unsure = 0
        self.owner: Value | None = None
        self.parameter = ""
        self.constant = False
        self.pending: list[tuple[Tensor, Value]] = []
        self._last_write: Tensor | None = None  # of every element

    def share(self, value: Value) -> None:
        """Note that one more tensor shares the memory of ``value``."""
        if self.owner is None:  # up to now there was one tensor
            self.owner = value
        self.members += 1

    def elements(self, view: View) -> Tensor:
        """Return the indices of the elements that a view shows."""
        assert self.owner is not None
        return view(torch.arange(self.owner.labels.numel()).reshape(self.owner.shape))

    def write(self, elements: Tensor | None, value: Value) -> None:
        """Note that elements have a new value; None where it is not known which, or whether."""
        assert self.owner is not None
        self.version += 1
        if elements is None:
            self.unsure = self.version
            return
        if self._last_write is None:
            self._last_write = torch.zeros(self.owner.labels.numel(), dtype=torch.long)
        self._last_write[elements.reshape(-1)] = self.version
        self.pending.append((elements, value))

    def changed(self, view: View, version: int) -> bool:
        """Return whether a view shows elements that were written after a version."""
        return self._last_write is not None and bool(
            (self._last_write[self.elements(view)] > version).any()
        )


@dataclass(frozen=True)
class Statistic:
    """A step to the divisor of a normalization: (factor * mean over S of (x - c)^2) ^ (power / 2).

    Attributes:
        of: x.
        power: 2 for x^2, its mean, and a variance.
        over: the dimensions of S; none before the mean is taken.
        centred: whether c is the mean over S; else c = 0.
        factor: n for a sum over S, n / (n - 1) for an unbiased variance.
    """

    of: Value
    power: float
    over: tuple[int, ...] = ()
    centred: bool = False
    factor: float = 1.0


@dataclass(frozen=True)
class Mean:
    """The mean of an activation over some dimensions."""

    of: Value
    over: tuple[int, ...]


@dataclass(frozen=True)
class Numerator:
    """The numerator of a normalization: an activation, minus its mean over some dimensions, times a parameter."""

    of: Value
    centred: tuple[int, ...] = ()
    gain: Tensor | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of an input of the network that was computed from values of the network.

    Attributes:
        slots: of all that it was computed from.
        entering: what of it depends on a parameter, and counts as an output if the input leads to
            one.
        cut: the call that made it; None for a function of such inputs.
        operation: the same, as the program has it.
        refusal: what a strict trace says of it.
        parameters: names of the parameters that the call took.
        outside: path of the module left outside that made it; None for anything else.
    """

    slots: tuple[int, ...]
    entering: tuple[Value, ...] = ()
    cut: Cut | None = None
    operation: Operation | None = None
    refusal: UntraceableError | None = None
    parameters: tuple[str, ...] = ()
    outside: str | None = None


@dataclass(frozen=True)
class Value:
    """Facts about one tensor of the traced forward pass.

    Attributes:
        slot: where the squared network keeps it.
        labels: scale label of every element (see ``scales``), of the tensor's own shape. For a
            parameter: the flat index of every element in the parameter.
        kind: ``"input"`` (depends on data alone), ``"buffer"``, ``"parameter"``, ``"hidden"``
            (depends on a parameter) or ``"tail"`` (a function of outputs, which no parameter may
            use any more: what a strict trace makes of a softmax, or of which it is not known where
            its examples are) or ``"indices"`` (where a maximum was, in a strict trace).
        name: the name of the parameter or buffer that it is a view of; of the operation, for a tail
            and indices.
        batch: the dimension that holds the batch, if known.
        module: for a tail and indices, the module that made them.
        state: True for the last hidden state of a recurrent layer, which is not an output of the
            network.
        memory: what it shares with other tensors.
        view: which elements of the memory it shows; None if it may be a copy of them.
        version: how many writes into the memory it has seen.
        order: True for a permutation of the examples, an input.
        refusal: for a tail, the error to raise if a parameter comes after it.
        examples: the example at every place of the dimension ``batch``; None where there is one
            each. See ``examples``.
        statistic: what it is of another value, if both may become a normalization (see
            ``rules.normalization_by_hand``).
    """

    slot: int
    labels: Tensor
    kind: str = "hidden"
    name: str = ""
    batch: int | None = None
    state: bool = False
    module: str = ""
    memory: Memory = field(default_factory=Memory)
    view: View | None = identity
    version: int = 0
    order: bool = False
    refusal: Exception | None = None
    examples: Tensor | None = None
    statistic: Statistic | Mean | Numerator | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor, for one example."""
        return self.labels.shape


def apart(value: Value) -> Value:
    """Return the same value in memory of its own."""
    return replace(value, memory=Memory(), view=identity, version=0, statistic=None)


def common_kind(values: Sequence[Value]) -> str:
    """Return the kind of a result: hidden as soon as a parameter takes part in it."""
    kinds = {v.kind for v in values}
    if kinds == {"buffer"}:
        return "buffer"
    return "input" if kinds <= {"input", "buffer"} else "hidden"


def put(elements: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that replaces some elements of a tensor."""

    def replaced(old: Tensor, new: Tensor) -> Tensor:
        result = old.reshape(-1).clone()
        result[elements.to(old.device)] = new
        return result.reshape(old.shape)

    return replaced
