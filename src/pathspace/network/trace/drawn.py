"""Functions that draw random numbers, and how a trace treats them.

A trace draws no numbers. The result of ``rand`` is an input of the network, like a mask. Dropout of
a constant, and other functions that draw in training only, are read in evaluation form: path norm
and kappa are those of the network without dropout. The trace remembers that such values change from
call to call, since no scale may depend on them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "poisson",
    "binomial",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "gumbel_softmax",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "_standard_gamma",
    "_sample_dirichlet",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices",
}
"""Functions that draw random numbers in training and in evaluation mode alike."""

DRAWN = "a random draw"
"""Stands among the names of the buffers that a constant was made of, if a part of it was drawn."""

_ATTENTION = "scaled_dot_product_attention"
_PROBABILITY = 4
"""The position of the dropout probability among the arguments of attention."""

_BY_DEFAULT = ("dropout", "dropout1d", "dropout2d", "dropout3d")
_TRAINING = {
    **dict.fromkeys(_BY_DEFAULT, 2),
    **dict.fromkeys(
        ["feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"], 2
    ),
    "rrelu": 3,
}
"""The position of the argument ``training`` of each function."""


def draws_in_training(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws because the model is in training form."""
    stem = name.rstrip("_")
    if stem == _ATTENTION:
        return bool(
            kwargs.get("dropout_p", args[_PROBABILITY] if len(args) > _PROBABILITY else 0.0)
        )
    if stem not in _TRAINING:
        return False
    for key in ("training", "train"):
        if key in kwargs:
            return bool(kwargs[key])
    place = _TRAINING[stem]
    return bool(args[place]) if len(args) > place else stem in _BY_DEFAULT


def in_evaluation_form(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of such a call for evaluation."""
    if name == _ATTENTION:
        if len(args) > _PROBABILITY:
            return (*args[:_PROBABILITY], 0.0, *args[_PROBABILITY + 1 :]), kwargs
        return args, {**kwargs, "dropout_p": 0.0}
    place = _TRAINING[name.rstrip("_")]
    for key in ("training", "train"):
        if key in kwargs:
            return args, {**kwargs, key: False}
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "training": False}


def keeps_zeros(name: str) -> bool:
    """Return whether a zero stays one: alpha dropout puts another number in the place of what it drops.

    Attention mixes its values.
    """
    return "alpha" not in name and name != _ATTENTION


class EvaluationForm(TorchFunctionMode):
    """A mode in which functions that draw in training only run as in evaluation, whatever they are told."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if draws_in_training(name, args, kwargs):
            args, kwargs = in_evaluation_form(name, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leave the random states of Python, numpy and torch as they are, whatever is drawn inside."""
    of_numpy = sys.modules.get("numpy.random")
    before = random.getstate()
    numpys = None if of_numpy is None else of_numpy.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before)
        if of_numpy is not None:
            of_numpy.set_state(numpys)
