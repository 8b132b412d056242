"""The registry of training methods: what happens to the start once, and which optimizer takes the steps.

A new optimizer is one entry in `METHODS`. Every method gets the same budget, the same batches, the same grid
of learning rates, the same momentum and the same clipping norm; what a method clips is its own choice (see
`Method.clips_itself`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import unknown_name

if TYPE_CHECKING:
    from torch import nn, optim


@dataclass(frozen=True)
class Hyperparameters:
    """What all methods are given alike.

    Attributes:
        learning_rate: From the grid.
        momentum: For the methods that have one in this sense; Adam keeps its own two decay rates.
        clip_norm: Largest norm of a step's gradient; None does not clip.
    """

    learning_rate: float
    momentum: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables and figures call it.
        build: (model, traced network, hyper-parameters) -> the optimizer.
        balances_first: Whether the start is balanced once, function unchanged, before the first step.
        clips_itself: Whether the optimizer clips its own, invariant norm. Otherwise the engine clips the norm
            of the plain gradient.
        invariant: Whether a rescaled start must give exactly the same curve.
        learning_rate: What `pathspace train` takes when none is given.
    """

    label: str
    build: Callable[[nn.Module, Any, Hyperparameters], optim.Optimizer]
    balances_first: bool = False
    clips_itself: bool = False
    invariant: bool = False
    learning_rate: float = 0.1


def _sgd(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from torch import optim

    return optim.SGD(model.parameters(), lr=hyper.learning_rate, momentum=hyper.momentum)


def _adam(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from torch import optim

    return optim.Adam(model.parameters(), lr=hyper.learning_rate)


def _path_sgd(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:
    from pathspace.optim import PathSGD

    return PathSGD(
        model.parameters(),
        network,
        lr=hyper.learning_rate,
        momentum=hyper.momentum,
        clip_norm=hyper.clip_norm,
    )


def _path_adam(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:
    from pathspace.optim import PathAdam

    return PathAdam(model.parameters(), network, lr=hyper.learning_rate, clip_norm=hyper.clip_norm)


METHODS = {
    "sgd": Method("SGD", _sgd),
    "adam": Method("Adam", _adam, learning_rate=0.003),
    "path-sgd": Method("Path-SGD", _path_sgd, clips_itself=True, invariant=True),
    "path-adam": Method("Path-Adam", _path_adam, clips_itself=True, invariant=True, learning_rate=0.003),
    "balanced-sgd": Method("balanced once, then SGD", _sgd, balances_first=True),
    "balanced-adam": Method("balanced once, then Adam", _adam, balances_first=True, learning_rate=0.003),
}

MAIN_METHODS = (
    "sgd",
    "adam",
    "path-sgd",
    "balanced-sgd",
    "balanced-adam",
)  # what a comparison shows by default


def method(name: str, where: str = "--methods") -> Method:
    """Return the method called `name`.

    Raises:
        ConfigurationError: There is none, with the names there are; `where` is the option that asked for it.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, where)
    return METHODS[name]
