"""Captured steps that run again, on one example of another batch or on all of its examples at once.

The steps are those of one example. ``torch.func.vmap`` runs them on all examples. No step sees the
other examples, so no step can mix two of them. Each value is one that all examples share, or ``[n,
...]`` for n examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import (
    Step,
    batched_along_first,
    one_by_one,
    slow_examples_allowed,
    with_examples_first,
)


@dataclass(frozen=True)
class Ref:
    """The place of a tensor of a program: an input, or the result of a step."""

    number: int


@dataclass(frozen=True)
class _Line:
    """One step: the places of its results, and its arguments with places for tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    del non_blocking
    return source.to(target.dtype).expand_as(target)


def _slice_scattered(
    target: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    size = target.shape[dim]
    stop = size if end is None else min(end, size)
    return torch.slice_scatter(target, source, dim, start, stop, step)


def _select_scattered(target: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    first = index % target.shape[dim]
    return torch.slice_scatter(target, source.unsqueeze(dim), dim, first, first + 1)


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy.default: _copied,
    torch.ops.aten.slice_scatter.default: _slice_scattered,
    torch.ops.aten.select_scatter.default: _select_scattered,
    torch.ops.aten.view.default: torch.reshape,
}
"""Operations of functionalization that torch does not differentiate, or wrongly under ``vmap`` (``select_scatter``), or
which ``vmap`` does not take for a slice without end, or for a batch that lies otherwise in memory (``view``)."""


_OF_LITERALS = frozenset(["lift_fresh", "lift_fresh_copy"])
"""Operations that ``torch.tensor`` records for Python numbers."""


class Program:
    """Steps that can be run again.

    Args:
        steps: captured ones, in their order.
        inputs: tensors that are given anew for each run.
        constants: those that stay.
        wanted: tensors that a run is to show.
        own: those of them of which each example is to have its own, though all may be the same.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        inputs: Sequence[Tensor],
        constants: Sequence[Tensor],
        wanted: Sequence[Tensor],
        own: Sequence[Tensor] = (),
    ) -> None:
        self._refs: dict[int, Ref] = {}
        self._kept: list[Tensor] = []  # ids stay unique while the program is made
        self._constants = {id(t) for t in constants}
        for tensor in inputs:
            self._place(tensor)
        self.inputs = [self._refs[id(t)] for t in inputs]
        self._lines = [self._line(step) for step in _live(steps, wanted)]
        self._wanted = self._numbers(wanted)
        self._own = self._numbers(own)

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the places of those tensors that the program makes or takes."""
        return {self._refs[id(t)].number for t in tensors if id(t) in self._refs}

    def _place(self, tensor: Tensor) -> Ref:
        self._kept.append(tensor)
        return self._refs.setdefault(id(tensor), Ref(len(self._refs)))

    def _line(self, step: Step) -> _Line:
        """Return a step with places in the place of tensors."""
        if step.name not in _OF_LITERALS and not all(map(self._is_known, step.tensors)):
            # the values of one example would stand for all
            raise RuntimeError(f"'{step.name}' takes a tensor that no captured step made")
        args, kwargs = self.refer((step.args, step.kwargs))
        results = pytree.tree_leaves(step.result)
        places = [self._place(t).number if isinstance(t, Tensor) else None for t in results]
        function = _REPLACED.get(step.function, step.function)
        return _Line(function, args, kwargs, tuple(places))

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an input, a constant or the result of a step."""
        return id(tensor) in self._refs or id(tensor) in self._constants

    def refer(self, tree: Any) -> Any:
        """Replace tensors among arguments by references; constants stay."""
        return pytree.tree_map_only(Tensor, lambda t: self._refs.get(id(t), t), tree)

    def seal(self) -> None:
        """Let go of the values of the captured pass: nothing is referred to any more."""
        self._refs = {}
        self._kept = []
        self._constants = set()

    def run(self, values: Sequence[Tensor]) -> Values:
        """Run the steps on the values of the inputs, which may be those of one example inside ``vmap``."""
        env: dict[int, Any] = {ref.number: t for ref, t in zip(self.inputs, values, strict=True)}
        first = next(iter(values))

        def value(ref: Ref) -> Any:
            return env[ref.number]

        for line in self._lines:
            args, kwargs = pytree.tree_map_only(Ref, value, (line.args, line.kwargs))
            try:
                made = pytree.tree_leaves(line.function(*args, **kwargs))
            except RuntimeError:  # vmap does not know it, or not so
                made = pytree.tree_leaves(one_by_one(line.function, args, kwargs))
            for place, result in zip(line.results, made, strict=True):
                if place is not None:
                    # whatever comes after it has its gradients there
                    like = first if place in self._own else None
                    env[place] = (
                        batched_along_first(result, like) if place in self._wanted else result
                    )
        return Values({place: with_examples_first(env[place]) for place in self._wanted})


@dataclass(frozen=True)
class Values:
    """The values of a run.

    Attributes:
        of: by place, the value for all examples ``[n, ...]`` and True, or one that they share, and
            False.
    """

    of: Mapping[int, tuple[Tensor, bool]]

    def __getitem__(self, ref: Ref) -> Tensor:
        return self.of[ref.number][0]

    def differs(self, ref: Ref) -> bool:
        """Return whether each example has a value of its own."""
        return self.of[ref.number][1]


def on_examples(program: Program, values: Sequence[Tensor], dims: Sequence[int | None]) -> Values:
    """Run a program on all examples of a batch.

    Args:
        program: of one example.
        values: of its inputs.
        dims: for each the dimension that holds the examples, or None if they share it; at least one
            does not.
    """
    found: list[Values] = []

    def one(*given: Tensor) -> Tensor:
        found.append(program.run(given))
        return given[0]

    # functions without a rule for batches run example by example, and say so
    with slow_examples_allowed():
        torch.func.vmap(one, in_dims=tuple(dims), randomness="different")(*values)
    return found[0]


def _live(steps: Iterable[Step], wanted: Iterable[Tensor]) -> list[Step]:
    """Return the steps on which some tensors depend."""
    needed = {id(t) for t in wanted}
    kept = []
    for step in reversed(list(steps)):
        if not needed.isdisjoint(id(t) for t in pytree.tree_leaves(step.result)):
            kept.append(step)
            needed.update(id(t) for t in step.tensors)
    return kept[::-1]
