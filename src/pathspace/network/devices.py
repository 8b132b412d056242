"""Tables of labels and numbers lie on the CPU, whatever device ``torch.set_default_device`` makes tensors on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def cpu_by_default() -> AbstractContextManager[Any]:
    """A context in which tensors made without a device lie on the CPU."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def with_tables_on_the_cpu(function: Function) -> Function:
    """Run a function in :func:`cpu_by_default`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with cpu_by_default():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]
