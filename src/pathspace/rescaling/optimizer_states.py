"""Rescale the moments of optimizers together with a network.

Rescaling multiplies a weight by s and its gradient by 1 / s. So an average of gradients is
multiplied by 1 / s, one of their squares by 1 / s^2, and a point or a length of weights by s: as if
the rule had always seen the rescaled network.

Letters: w parameter, s what rescaling multiplies it by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from pathspace.network import Network

_ADAM = {"step": 0, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_RMSPROP = {"step": 0, "square_avg": 2, "grad_avg": 1, "momentum_buffer": 0}
POWERS: dict[type[Optimizer], dict[str, int]] = {
    optim.SGD: {"momentum_buffer": 1},
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.NAdam: {**_ADAM, "mu_product": 0},
    optim.RAdam: _ADAM,
    optim.Adamax: {"step": 0, "exp_avg": 1, "exp_inf": 1},
    optim.Adagrad: {"step": 0, "sum": 2},
    optim.Adadelta: {"step": 0, "square_avg": 2, "acc_delta": -2},
    # its momentum is one of g / sqrt(v), which has no unit
    optim.RMSprop: _RMSPROP,
    optim.Rprop: {"step": 0, "prev": 1, "step_size": -1},
    optim.ASGD: {"step": 0, "eta": 0, "mu": 0, "ax": -1},
    optim.Muon: {"momentum_buffer": 1},
}
"""Rule of torch -> entry of its state -> power of the unit of a gradient that the entry has."""

State = dict[str, Any]
"""What an optimizer keeps of one parameter, by name."""
Group = dict[str, Any]
"""A param group of an optimizer: parameters, and their options."""
Optimizers = Optimizer | Sequence[Optimizer]


@runtime_checkable
class FollowsRescaling(Protocol):
    """An optimizer of the library, which knows itself how what it keeps follows a rescaling."""

    def expect_movable(self, network: Network, names: Iterable[str]) -> None:
        """Raise unless what is kept can follow; ``names`` are the parameters of all optimizers that do."""
        ...

    def follow_rescaling(self, network: Network, factors: Tensor) -> None:
        """Move what is kept to weights that were just rescaled."""
        ...


def held_by(groups: Iterable[Group]) -> list[Any]:
    """Return the parameters of some groups in their order, or the indices that saved groups have for them."""
    return [held for group in groups for held in group["params"]]


class MovedStates:
    """Optimizers whose states, and gradients that wait for a step, follow a rescaling.

    Args:
        network: a traced network.
        optimizers: of its parameters: one, several, or None for none.

    Raises:
        TypeError: one is no optimizer.
        ValueError: one has no parameter of the network, or keeps something of which it is not known
            how it follows.
    """

    def __init__(self, network: Network, optimizers: Optimizers | None) -> None:
        self._network = network
        self._optimizers: tuple[Optimizer, ...]
        if optimizers is None:
            self._optimizers = ()
        elif isinstance(optimizers, Sequence):
            self._optimizers = tuple(optimizers)
        else:
            self._optimizers = (optimizers,)
        names = {name for one in self._optimizers for name, _ in self._parameters(one)}
        for optimizer in self._optimizers:
            if isinstance(optimizer, FollowsRescaling):
                optimizer.expect_movable(network, names)
            else:
                _powers_of(optimizer, network)

    def _parameters(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """Return the parameters of the network that an optimizer has, with their names."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer as optimizer, or several, got {type(optimizer).__name__}: of a "
                "wrapper give the optimizer inside"
            )
        found = _of_network(optimizer, self._network)
        if not found:
            raise ValueError(
                f"the {type(optimizer).__name__} has no parameter of this network: give the optimizer that trains the "
                "model that was traced"
            )
        return found

    @torch.no_grad()
    def follow(self, factors: Tensor) -> None:
        """Move all states after the weights were rescaled by factors s ``[num_classes]``."""
        if not self._optimizers:
            return
        for optimizer in self._optimizers:
            if isinstance(optimizer, FollowsRescaling):
                optimizer.follow_rescaling(self._network, factors)
            else:
                _follow(optimizer, self._network, factors)
        for name, p in self._network.parameters.items():
            if p.grad is not None:
                times_(p.grad, self._network.edge_factors(name, factors), -1)


def _of_network(optimizer: Optimizer, network: Network) -> list[tuple[str, Tensor]]:
    names = network.names_by_id
    parameters = held_by(optimizer.param_groups)
    return [(names[id(p)], p) for p in parameters if id(p) in names]


def _powers_of(optimizer: Optimizer, network: Network) -> Mapping[str, int]:
    """Return the powers of what a plain rule keeps.

    Raises:
        ValueError: it keeps something else.
    """
    kind = type(optimizer).__name__
    powers = next((POWERS[c] for c in type(optimizer).__mro__ if c in POWERS), {})
    for name, p in _of_network(optimizer, network):
        unknown = [
            key
            for key, value in optimizer.state.get(p, {}).items()
            if value is not None and key not in powers
        ]
        if unknown:
            raise ValueError(
                f"{kind} keeps '{unknown[0]}' of '{name}', and it is not known how that follows a rescaling: rescale "
                f"without optimizer= and make a new {kind}, or use a rule of torch.optim other than LBFGS and Adafactor"
            )
    return powers


def _follow(optimizer: Optimizer, network: Network, factors: Tensor) -> None:
    """Move the states of a plain rule."""
    powers = _powers_of(optimizer, network)
    for name, p in _of_network(optimizer, network):
        follow_state_(optimizer.state.get(p, {}), powers, network.edge_factors(name, factors))


def follow_state_(state: State, powers: Mapping[str, int], scale: Tensor) -> None:
    """Move what a plain rule keeps of a parameter that was multiplied by ``scale``."""
    for key, power in powers.items():
        value = state.get(key)
        if power and isinstance(value, Tensor):
            times_(value, scale, -power)


def times_(value: Tensor, scale: Tensor, power: int) -> None:
    """Multiply a tensor by an integer power of a scale that is broadcast to its shape, in place."""
    scale = scale.to(value.device, torch.float64)
    factor = scale if power > 0 else scale.reciprocal()
    # one after the other: the square of a factor alone may leave the type
    for _ in range(abs(power)):
        value.copy_(value.double() * factor)
