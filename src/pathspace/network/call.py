"""The call by which a model was traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from pathspace.network.attributes import Attributes
from pathspace.network.program import Program


@dataclass(frozen=True)
class Arguments:
    """Both kinds of arguments of a model at once, ``model(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Retraces(Protocol):
    """Traces a network's model in the same way and in the form in which it was traced, without an effect on it."""

    def __call__(self, network: Any) -> tuple[Program, Call] | None:
        """Return the program and the call if that finds the same network, else None."""
        ...

    def with_data(self, network: Any, interpreter: Callable[[Any], Any], example: Arguments) -> Any:
        """Return the network that another interpreter finds, which may run the model on data meanwhile."""
        ...

    def in_evaluation_form(self, network: Any, example: Arguments) -> Any:
        """Return the network of the evaluation form, or None if it was traced so."""
        ...


@dataclass(frozen=True)
class Call:
    """The call of the model in the trace, with all that is needed to call it again on data of the same form.

    Attributes:
        arguments: the example input, its tensors on the ``meta`` device.
        batch_dim: the dimension of the inputs that holds the batch.
        states: positions or names of arguments that carry a hidden state.
        outside: paths of the modules left to the plain rule.
        constants: name -> values of the buffers that decided the network: masks and indices, on the
            CPU.
        unused: names of the parameters that it did not use, or not as a whole, but for those of the
            modules outside.
        tied: second names of shared parameters, each with the first.
        attributes: plain attributes of modules that the forward pass may have read.
        forwards: the function that each module ran, by its path.
        of_classes: what the forward pass may have read of the modules' classes, with the class that
            defines it.
        again: traces the model once more.
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
    again: Retraces | None = None


def arguments_in(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call by position and by name.

    Args:
        data: a mapping of names, a tuple or list of arguments, a single argument, or
            :class:`Arguments`.
    """
    if isinstance(data, Arguments):
        return data.args, data.kwargs
    if isinstance(data, Mapping):  # a dict, or another as transformers' tokenizers return
        return (), {**data}
    return tuple(data) if isinstance(data, (tuple, list)) else (data,), {}


def batch_in(argument: Tensor, first: Tensor, batch_dim: int | None) -> int | None:
    """Return the dimension in which an argument has the batch of the first argument.

    That is ``batch_dim`` if its size fits there, else the first one that fits (states of nn.RNN
    have another one), else None.
    """
    if batch_dim is None:
        return None
    places = (d for d in (batch_dim, *range(argument.dim())) if d < argument.dim())
    return next((d for d in places if argument.shape[d] == first.shape[batch_dim]), None)
