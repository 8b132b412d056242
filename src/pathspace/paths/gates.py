"""Operations that open and close edges depending on the data: ReLU and its kin, and maxima.

A gate g is 0 or 1, or the slope of a leaky ReLU: the output is g times the input (for a maximum, the sum over the
window, with ties shared). So an output of the network is a sum over paths of input, gates, fixed factors and weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from pathspace.paths.probing import each

_UNARY = frozenset(["relu", "relu_", "leaky_relu", "leaky_relu_", "abs", "absolute", "prelu"])
_CLAMPS = frozenset(["clamp", "clamp_", "clamp_min", "clamp_min_"])
_POOLS = re.compile(r"_?(adaptive_)?max_pool[123]d|amax")


@dataclass(frozen=True)
class Gated:
    """A gated operation as a function of its operands."""

    operands: tuple[Tensor, ...]
    edges: Callable[[], tuple[Tensor, Tensor, Tensor]]
    """(o, i, g): elements of the result and of the operands, one after the other, and the gates between them."""


def gated(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gated | None:
    """What is gated in a call of a torch function; None for a function that is affine."""
    if not args and "input" not in kwargs:
        return None
    x = args[0] if args else kwargs["input"]

    def on(value: Tensor) -> Tensor:
        if args:
            return func(value, *args[1:], **kwargs)
        return func(**{**kwargs, "input": value})

    if name in _UNARY or name in _CLAMPS:
        return Gated((x,), lambda: _slopes(on, x))
    if _POOLS.fullmatch(name):
        return Gated((x,), lambda: _windows(on, x))
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if name in ("maximum", "max") and isinstance(other, Tensor):
        return Gated((x, other), lambda: _larger(x, other))
    return None


def _slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = function(x.detach().clone())
    place = torch.arange(x.numel())
    return place, place, torch.where(x != 0, y / torch.where(x != 0, x, 1.0), 0.0).flatten().detach()


def _larger(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    place = torch.arange(shape.numel())
    first = torch.arange(x.numel()).reshape(x.shape).expand(shape).flatten()
    second = torch.arange(y.numel()).reshape(y.shape).expand(shape).flatten() + x.numel()
    wins = ((x > y).double() + 0.5 * (x == y).double()).expand(shape).flatten().detach()
    return torch.cat([place, place]), torch.cat([first, second]), torch.cat([wins, 1 - wins])


def _windows(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def flat(v: Tensor) -> Tensor:
        return function(v.reshape(x.shape)).reshape(-1)

    # one at element i and zero elsewhere: the largest of a window is one if i is in it
    member = each(flat, torch.eye(x.numel(), dtype=torch.float64)) > 0
    i, o = member.nonzero(as_tuple=True)
    chosen = jacrev(flat)(x.detach().reshape(-1))
    return o, i, chosen[o, i]  # type: ignore[index]
