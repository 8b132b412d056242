"""How a model was called while it was traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pathspace.network.attributes import Attributes
from pathspace.network.program import Program


@dataclass(frozen=True)
class Call:
    """How the model was called while it was traced: enough to call it again on data of the same form.

    Attributes:
        arguments: the example input, its tensors on the ``meta`` device.
        batch_dim: the dimension of the inputs that holds the batch.
        states: positions or names of arguments that carry a hidden state.
        outside: paths of the modules left to the plain rule.
        constants: name -> values of the buffers that decided the network: masks and indices, on the CPU.
        unused: names of the parameters that it did not use, or not as a whole, but for those of the modules outside.
        tied: second names of shared parameters, each with the first.
        attributes: plain attributes of modules that the forward pass may have read.
        forwards: the function that each module ran, by its path.
        of_classes: what the forward pass may have read of the modules' classes, with the class that defines it.
        again: of the network, traces its model in the same way and in the form in which it was traced, without an
            effect on it; returns the program and the call if that finds the same network, else None.
    """

    arguments: Any
    batch_dim: int | None
    states: frozenset[int | str]
    outside: frozenset[str]
    constants: Mapping[str, Tensor]
    unused: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    attributes: Attributes = field(default_factory=dict)
    forwards: Mapping[str, Any] = field(default_factory=dict)
    of_classes: Attributes = field(default_factory=dict)
    again: Callable[[Any], tuple[Program, Call] | None] | None = None


def arguments_in(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by position and by name.

    Args:
        data: a mapping of names, a tuple or list of arguments, or a single argument.
    """
    if isinstance(data, Mapping):  # a dict, or another as transformers' tokenizers return
        return (), {**data}
    return tuple(data) if isinstance(data, (tuple, list)) else (data,), {}


def batch_in(argument: Tensor, first: Tensor, batch_dim: int | None) -> int | None:
    """Return the dimension in which an argument has the batch of the first argument.

    That is ``batch_dim`` if its size fits there, else the first one that fits (states of nn.RNN have another one), else
    None.
    """
    if batch_dim is None:
        return None
    places = (d for d in (batch_dim, *range(argument.dim())) if d < argument.dim())
    return next((d for d in places if argument.shape[d] == first.shape[batch_dim]), None)
