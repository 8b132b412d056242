"""Operations that a user registers, by what they are in functions that tracing knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from pathspace.network import aten
from pathspace.network.rules import RULED
from pathspace.network.trace.functions import changes, short_name


@dataclass(frozen=True)
class Registration:
    """The meaning of a registered operation.

    Attributes:
        decomposition: a function of the same arguments, made of functions that tracing knows.
        like: the name of the only one of these; the operation itself may then give other values.
    """

    decomposition: Callable[..., Any]
    like: str | None


_REGISTERED: dict[Any, Registration] = {
    op: Registration(function, None) for op, function in aten.DECOMPOSITIONS.items()
}


def register(
    op: Callable[..., Any],
    *,
    like: Callable[..., Any] | None = None,
    decomposition: Callable[..., Any] | None = None,
) -> None:
    """Say what an operation is that tracing has no rule for, for all models and for good.

    Without it the network is cut there, which is never wrong. With it units before the operation
    can be rescaled.

    Args:
        op: an operation of ``torch.library`` (all of its overloads), or a function that torch
            functions dispatch, such as one of ``torch.overrides.wrap_torch_function``. Other Python
            functions are traced as they are written.
        like: a function that tracing knows, which behaves to scales and in the squared network as
            ``op`` does with the same arguments: ``torch.relu`` for any elementwise f with f(s x) =
            s f(x). On data ``op`` itself runs.
        decomposition: a Python function that computes what ``op`` does, from functions that tracing
            knows. On data it runs in the place of ``op``.

    Raises:
        TypeError: if ``op``, ``like`` or ``decomposition`` cannot be called, or not one of the
            latter two is given, or ``op`` is the ``apply`` of an ``autograd.Function``.
        ValueError: if ``op`` was registered before, is one of torch's own that has a rule, or
            writes into its arguments where ``like`` does not; or if tracing has no rule for
            ``like``.

    Example:
        >>> import torch, pathspace as ps
        >>> @torch.library.custom_op("mine::ramp", mutates_args=())
        ... def ramp(x: torch.Tensor) -> torch.Tensor:
        ...     return x.clamp(min=0)
        >>> ps.network.register(ramp, like=torch.relu)
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        ...     def forward(self, x):
        ...         return self.b(ramp(self.a(x)))
        >>> ps.trace(Model(), torch.zeros(1, 4))
        Network(58 weights in 4 parameters, 8 unit classes)
    """
    if (like is None) == (decomposition is None):
        raise TypeError(
            "give either like= (a function that tracing knows) or decomposition=, and not both"
        )
    for given, what in ((op, "op"), (like, "like"), (decomposition, "decomposition")):
        if given is not None and not callable(given):
            raise TypeError(f"{what} must be a function or an operation, got {given!r}")
    key = _key(op)
    _expect_unknown(op, key)
    if like is None:
        assert decomposition is not None
        _REGISTERED[key] = Registration(decomposition, None)
        return
    known = short_name(like)
    _expect_like(key, known)
    _REGISTERED[key] = Registration(like, known)


def _expect_unknown(op: Callable[..., Any], key: Any) -> None:
    """Refuse an operation that is registered, has a rule, or is traced as it is written.

    Raises:
        TypeError: if it is the ``apply`` of an ``autograd.Function``.
        ValueError: if it was registered before, or is one of torch's own that has a rule.
    """
    owner = getattr(op, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        raise TypeError(
            f"{owner.__name__}.apply is no operation that tracing sees, because its forward is traced as it is "
            "written: make it a torch.library.custom_op to register it"
        )
    name = short_name(key)
    if key in _REGISTERED:
        raise ValueError(
            f"'{name}' is registered already: register an operation once, beside its definition"
        )
    is_of_torch = isinstance(key, OpOverloadPacket) or torch.overrides.resolve_name(key) is not None
    if name in RULED and is_of_torch:
        raise ValueError(
            f"'{name}' has a rule already: only operations that torch does not have are registered"
        )


def _expect_like(key: Any, known: str) -> None:
    """Refuse a function that an operation cannot be like.

    Raises:
        ValueError: if tracing has no rule for it, or only the operation writes into its arguments.
    """
    if known not in RULED:
        raise ValueError(
            f"tracing has no rule for '{known}', so nothing can be like it: name a function such as torch.relu, or "
            "write a decomposition= of functions that are on docs/network.md"
        )
    if _writes(key) and not changes(known):
        raise ValueError(
            f"'{short_name(key)}' writes into its arguments, and '{known}' does not: give a function that does, "
            "such as torch.relu_"
        )


def registration_of(func: Callable[..., Any]) -> Registration | None:
    """Return what is known of the operation that a function belongs to; None if it is not registered."""
    return _REGISTERED.get(_key(func))


def _key(op: Any) -> Any:
    """Return the operation that a function belongs to, whatever its overload; the function itself elsewhere."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    return op.overloadpacket if isinstance(op, OpOverload) else op


def _writes(key: Any) -> bool:
    """Return whether an operation says that it writes into its arguments."""
    if not isinstance(key, OpOverloadPacket):
        return False
    return any(getattr(key, overload)._schema.is_mutable for overload in key.overloads())
