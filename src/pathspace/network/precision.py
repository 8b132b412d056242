"""Path geometry keeps its precision where a model is run in less: squares of weights need the range and the digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from pathspace.network.errors import expect_weights

Function = TypeVar("Function", bound=Callable[..., Any])


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which ``torch.autocast`` rounds nothing on the device of ``tensor``."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def in_full_precision(function: Function) -> Function:
    """Run a function of a traced network, its first argument, outside autocast."""

    @functools.wraps(function)
    def run(network: Any, *args: Any, **kwargs: Any) -> Any:
        expect_weights(network)
        with full_precision(next(iter(network.parameters.values()))):
            return function(network, *args, **kwargs)

    return run  # type: ignore[return-value]
