"""The arguments with which a traced model is called on data, and the number of examples in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.call import Arguments, arguments_in, batch_in
from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.network import Network
from pathspace.network.trace.functions import PLAIN, tensors_in


def mapped(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply a function to every tensor among arguments."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        return value if isinstance(value, PLAIN) else pytree.tree_map_only(Tensor, function, value)

    return tuple(map(of, args)), {name: of(value) for name, value in kwargs.items()}


def examples_in(network: Network, tensors: Sequence[Tensor]) -> int:
    """Count the examples in the inputs.

    Raises:
        ValueError: they hold no example, or have no dimension for them.
    """
    place = network.call.batch_dim
    if place is None:
        return 1
    shape = tuple(tensors[0].shape)
    if len(shape) <= place:
        raise ValueError(
            f"the first input has the shape {shape}, without the dimension {place} that held the examples when the "
            "model was traced"
        )
    if shape[place] == 0:
        raise ValueError(
            f"the batch is empty: the first input has the shape {shape}, whose dimension {place} holds the examples. "
            "Quantities on data, and the steps of optimizers that use them, need an example at least: skip such a batch"
        )
    return shape[place]


@dataclass(frozen=True)
class Given:
    """The arguments of a call of a model on data.

    Attributes:
        call: the arguments, with copies of the tensors.
        tensors: these copies, in their order.
        types: what they were before.
        dims: where each holds the examples; None for what they share.
        count: the number of examples n.
    """

    call: Arguments
    tensors: list[Tensor]
    types: list[torch.dtype]
    dims: list[int | None]
    count: int

    @staticmethod
    def of(network: Network, inputs: Any, cast: Callable[[Tensor], Tensor]) -> Given:
        """Return the arguments of a network's model, with tensors in the type that ``cast`` gives them."""
        args, kwargs = arguments_in(inputs)
        tensors = tensors_in(args, kwargs)
        if not tensors:
            raise ValueError("the inputs hold no tensor: give what the model is called with")
        if network.call.states:
            raise UnmatchedForwardError(
                "the network was traced with a carried hidden state (states=...), which depends on earlier data; "
                "quantities that depend on data are not defined for it"
            )
        count = examples_in(network, tensors)
        types = [t.dtype for t in tensors]
        # copies: no graph may hold what was made in inference mode
        call = Arguments(*mapped(lambda t: cast(t.detach()).clone(), args, kwargs))
        tensors = tensors_in(call.args, call.kwargs)
        dims = [batch_in(t, tensors[0], network.call.batch_dim) for t in tensors]
        return Given(call, tensors, types, dims, count)

    @property
    def options(self) -> list[Any]:
        """The arguments that are no tensors."""
        leaves = pytree.tree_leaves((self.call.args, self.call.kwargs))
        return [option for option in leaves if not isinstance(option, Tensor)]

    def example(self) -> list[Tensor]:
        """Return the first example, a batch of one."""
        pairs = zip(self.tensors, self.dims, strict=True)
        return [t if d is None else t.narrow(d, 0, 1) for t, d in pairs]

    def without_data(self) -> Arguments:
        """Return the arguments of one example without values, in their own types."""
        example = iter(zip(self.example(), self.types, strict=True))

        def empty(_: Tensor) -> Tensor:
            like, dtype = next(example)
            return torch.empty(like.shape, dtype=dtype, device="meta")

        return Arguments(*mapped(empty, self.call.args, self.call.kwargs))

    def for_vmap(self) -> tuple[list[Tensor], list[int | None]]:
        """Return tensors whose examples are batches of one, and the dimension of the examples."""
        if not any(d is not None for d in self.dims):  # there are none: the batch itself is one
            return [t.unsqueeze(0) for t in self.tensors], [0] * len(self.tensors)
        pairs = zip(self.tensors, self.dims, strict=True)
        return [t if d is None else t.unsqueeze(d + 1) for t, d in pairs], self.dims


def misfit(network: Network, inputs: Any) -> str:
    """Say how the form of inputs differs from that of the example input of the trace; return "" if it does not."""
    batch = network.call.batch_dim
    args, kwargs = arguments_in(inputs)
    inputs = (*args, *kwargs.values())

    def form(values: Any) -> list[str]:
        tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        shapes = [["n" if d == batch else str(n) for d, n in enumerate(t.shape)] for t in tensors]
        kinds = [
            "numbers" if t.is_floating_point() else str(t.dtype).removeprefix("torch.")
            for t in tensors
        ]
        return [
            f"({', '.join(shape)}) of {kind}" for shape, kind in zip(shapes, kinds, strict=True)
        ]

    traced = form(network.call.arguments)
    here = form(inputs)
    if traced == here:
        return ""
    return (
        f"the data are not of the form that the model was traced with: tensors {', '.join(here)} in the place of "
        f"{', '.join(traced)}. Give a batch as the model is called with it; only the number n of examples may differ"
    )


def first_examples(network: Network, call: Arguments, count: float | None) -> Arguments:
    """Return arguments for the first ``count`` examples of a batch, or a share of them if below 1; all if None."""
    place = network.call.batch_dim
    first = next(iter(tensors_in(call.args, call.kwargs)), None)
    if count is None or place is None or first is None or first.dim() <= place:
        return call
    size = first.shape[place]
    many = math.ceil(count * size) if count < 1 else int(count)
    if many >= size:
        return call

    def shorter(t: Tensor) -> Tensor:
        result = batch_in(t, first, place)
        return t if result is None else t.narrow(result, 0, many)

    return Arguments(*mapped(shorter, call.args, call.kwargs))
