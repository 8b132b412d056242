"""Path geometry keeps its precision where a model is run in less: squares of weights need the range and the digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.torch_private import pytree

_CASTS = frozenset(["float", "half", "bfloat16", "to", "type", "type_as"])
_OF_NUMBERS = frozenset(
    [
        "tensor",
        "as_tensor",
        "asarray",
        "scalar_tensor",
        "full",
        "arange",
        "linspace",
        "logspace",
        "bartlett_window",
        "blackman_window",
        "hamming_window",
        "hann_window",
        "kaiser_window",
    ]
)
"""What makes tensors of Python's numbers: 0.1 is rounded to the type that they are made in."""


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which ``torch.autocast`` rounds nothing on the device of ``tensor``."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in float32, any other as it is: 1e-4^2 is zero in float16."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def wide_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, in float64 if it holds real numbers."""
    dtype = torch.float64 if tensor.is_floating_point() else None
    return tensor.detach().to("cpu", dtype, copy=True)


def all_widened(source: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return some parameters, :func:`widened` and of one type: float64 if a model mixes it with others."""
    wide = {name: widened(source[name]) for name in names}
    if len({p.dtype for p in wide.values()}) > 1:
        return {name: p.double() for name, p in wide.items()}
    return wide


def squared_leaves(source: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the squares of some parameters, :func:`all_widened`, as variables of derivatives."""
    wide = all_widened(source, names)
    return {name: p.detach().square().requires_grad_() for name, p in wide.items()}


class AtLeast(TorchFunctionMode):
    """Results of less precision than ``dtype`` take that type, in this thread alone.

    A copy of a model that runs in a wider type than it was written for holds casts (``x.float()``),
    types that it asks for (``sum(dtype=torch.float32)``) and constants of the narrower one; they
    would not fit its parameters.

    Args:
        dtype: a floating-point type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def of(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a torch function with such results, outside of the context too."""
        return lambda *args, **kwargs: self.__torch_function__(func, (), args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._without_narrow_types(args, kwargs or {})
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            # a tensor that no torch function made (torch.Tensor(2, 3)), beside wider ones
            wide = pytree.tree_map_only(
                Tensor, lambda t: self._widened(t, func, ()), (args, kwargs)
            )
            if _same_leaves(wide, (args, kwargs)):
                raise
            result = func(*wide[0], **wide[1])
        if isinstance(result, Tensor):
            if self._is_narrow(result.dtype) and func.__name__ in _OF_NUMBERS:
                return func(*args, **kwargs, dtype=self.dtype)
            return self._widened(result, func, args)
        if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
            return pytree.tree_map_only(Tensor, lambda t: self._widened(t, func, args), result)
        return result

    def _without_narrow_types(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments in which types of less precision are replaced."""
        if not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            return args, kwargs

        def wide(value: Any) -> Any:
            return self.dtype if self._is_narrow(value) else value

        return tuple(map(wide, args)), {key: wide(value) for key, value in kwargs.items()}

    def _is_narrow(self, dtype: Any) -> bool:
        """Return whether something is a floating-point type of less precision."""
        real = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        return real and dtype.itemsize < self.dtype.itemsize

    def _widened(self, tensor: Tensor, func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
        if not self._is_narrow(tensor.dtype):
            return tensor
        first = args[0] if args and getattr(func, "__name__", "") in _CASTS else None
        if isinstance(first, Tensor) and first.dtype == self.dtype:
            return first  # as it was before it lost digits
        return tensor.to(self.dtype)


def _same_leaves(tree: Any, other: Any) -> bool:
    """Return whether two trees of one form hold the same objects."""
    pairs = zip(pytree.tree_leaves(tree), pytree.tree_leaves(other), strict=True)
    return all(a is b for a, b in pairs)
