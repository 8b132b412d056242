"""The record of the traced forward pass: its operations, beside the squared network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Operation:
    """One traced operation whose result depends on a parameter.

    Attributes:
        name: the operation.
        module: path of the module it was called in.
        kind: kind of the result (see ``Value``), or ``"outside"`` for the call of a module left
            outside, ``"cut"`` for an operation at which the network is cut.
        results: slots of the results on the tape, and of the rows inside bags; for ``"outside"``,
            of what flows in; for ``"cut"``, of every tensor argument, -1 where that is no output of
            the network.
        shapes: of every tensor argument and of the (first) result, for one example.
    """

    name: str
    module: str
    kind: str
    results: tuple[int, ...]
    shapes: tuple[torch.Size, ...] = ()


@dataclass(frozen=True)
class Cut:
    """A call of an operation at which a network is cut: what enters is an output of it, what leaves an input.

    Attributes:
        operation: its name.
        module: path of the module that called it.
        number: how many calls of operations of that name there were before it.
        entering: for every tensor argument whether it is an activation.
        counts: whether what leaves it leads to an output, so that what enters it is one.
        holds: whether it leads to anything that the model returns, so that what enters it keeps its
            scale.
    """

    operation: str
    module: str
    number: int
    entering: tuple[bool, ...]
    counts: bool = False
    holds: bool = False


@dataclass(frozen=True)
class Crossing:
    """The origin of an input of the network, before a cut, a module left outside or a function of inputs.

    Attributes:
        entering: slots of the values that it was computed from.
        parameters: names of the parameters that the cut operation took, or that the module has.
    """

    entering: tuple[int, ...]
    parameters: tuple[str, ...] = ()


_NUMBER = re.compile(r"(\d+)")


def told(cuts: Iterable[Cut]) -> list[str]:
    """Describe each operation and place in one line; places that differ only in a number share a line."""
    places: dict[tuple[str, str], list[str]] = {}
    for cut in cuts:
        pattern = _NUMBER.sub("*", cut.module)
        places.setdefault((cut.operation, pattern), []).append(cut.module)
    lines = []
    for (operation, _), modules in places.items():
        columns = zip(*(_NUMBER.split(module) for module in modules), strict=True)
        parts = [set(column) for column in columns]
        module = "".join("*" if len(part) > 1 else next(iter(part)) for part in parts)
        place = f" in '{module}'" if module else ""
        lines.append(
            f"'{operation}'{place}" + (f", {len(modules)} times" if len(modules) > 1 else "")
        )
    return lines


@dataclass(frozen=True)
class Program:
    """The traced forward pass.

    Attributes:
        operations: in the order in which the model performs them.
        outputs: slots of the tensors that ``Network.returned`` gives; None for one that is no
            output of the network.
        nodes: slot -> class labels of the units whose values before their activation are nodes of
            the graph: what enters an activation, linear maps of unit classes that have none, and
            the outputs (as they leave).
        cuts: where the network is cut, in the order of the calls.
        by_batch: modules that normalize inputs by the batch that they see, in the evaluation form,
            too.
        crossings: slot of an input of the network -> what it was computed from, if that has a part
            in the model.
    """

    operations: tuple[Operation, ...]
    outputs: tuple[int | None, ...]
    nodes: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    cuts: tuple[Cut, ...] = ()
    by_batch: frozenset[str] = frozenset()
    crossings: Mapping[int, Crossing] = field(default_factory=dict, repr=False)
