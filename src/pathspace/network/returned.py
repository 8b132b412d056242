"""The tensors in a model's result, a nested structure of any kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import UnmatchedForwardError


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and dataclasses, in order."""
    values: list[Tensor] = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            values.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values += tensors_in(
                [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            )
    return values


@dataclass(frozen=True)
class Returned:
    """The tensors, among all that the model returns, that rescaling leaves alone."""

    output: Callable[[Any], Any] | None
    places: tuple[int, ...]

    def __call__(self, result: Any) -> list[Tensor]:
        """Pick them out.

        Raises:
            UnmatchedForwardError: there are fewer than when the model was traced.
        """
        leaves = tensors_in(result if self.output is None else self.output(result))
        if self.places and len(leaves) <= self.places[-1]:
            raise UnmatchedForwardError(
                f"the model returned {len(leaves)} tensors, and {self.places[-1] + 1} or more when it was traced: call "
                "it with the same options, or trace it with these"
            )
        return [leaves[place] for place in self.places]
