"""Path geometry keeps its precision where a model is run in less: squares of weights need the range and the digits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_CASTS = frozenset(["float", "half", "bfloat16", "to", "type", "type_as"])


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which ``torch.autocast`` rounds nothing on the device of ``tensor``."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class AtLeast(TorchFunctionMode):
    """Results of less precision than ``dtype`` take that type.

    A copy of a model that runs in a wider type than it was written for holds casts (``x.float()``) and constants of the
    narrower one; they would not fit its parameters.

    Args:
        dtype: a floating-point type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self._bits = dtype, torch.finfo(dtype).bits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            return self._widened(result, func, args)
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            return pytree.tree_map_only(Tensor, lambda t: self._widened(t, func, args), result)
        return result

    def _widened(self, tensor: Tensor, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits >= self._bits:
            return tensor
        given = args[0] if args else None
        if (
            getattr(func, "__name__", "") in _CASTS
            and isinstance(given, Tensor)
            and given.dtype == self.dtype
        ):
            return given  # as it was before it lost digits
        return tensor.to(self.dtype)
