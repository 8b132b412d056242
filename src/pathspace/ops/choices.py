"""Choices between two values that data make, and products of an activation with data, such as masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Step
from pathspace.ops.family import GatedFamily, Gates, gates_of_linear
from pathspace.ops.listing import Listing

_NO_PATH = (0, torch.inf, -torch.inf)
"""Numbers at which no path starts."""


class Choice(GatedFamily):
    """``where``, ``masked_fill``, and a write at a mask, with a condition that is data."""

    names = frozenset(["where", "masked_fill", "index_put"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether the condition is data."""
        if len(step.args) < 3:
            return False
        condition = step.args[0] if step.name == "where" else step.args[1]
        if step.name == "index_put":
            condition = condition[0]
        return listing.is_data(condition)

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return an edge from both values, of which the condition opens one."""
        del listing
        if step.name == "where":
            condition, x, y = step.args
        elif step.name == "masked_fill":
            y, condition, x = step.args
        else:
            y, (mask, *_), x = step.args[:3]
            condition = mask.reshape(*mask.shape, *[1] * (y.dim() - mask.dim()))
        return _chosen(condition, (x, y))


def _chosen(condition: Tensor, branches: Sequence[Any]) -> tuple[tuple[Tensor, ...], Gates]:
    """Return two values as tensors, and the edges of a choice of the first where the condition holds."""
    operands = tuple(_as_tensor(branch) for branch in branches)
    shape = torch.broadcast_shapes(condition.shape, *(t.shape for t in operands))
    first = condition.detach().double().expand(shape).flatten()
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    opened: list[Tensor] = []
    before = 0
    for branch, operand, gate in zip(branches, operands, (first, 1 - first), strict=True):
        members = torch.arange(before, before + operand.numel()).reshape(operand.shape)
        before += operand.numel()
        if not isinstance(branch, Tensor) and branch in _NO_PATH:
            continue
        targets.append(torch.arange(shape.numel()))
        sources.append(members.expand(shape).flatten())
        opened.append(gate)
    return operands, Gates(torch.cat(targets), torch.cat(sources), torch.cat(opened))


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


class ByData(GatedFamily):
    """Products of an activation with data."""

    names = frozenset(["mul", "div", "mm", "mv", "bmm"])

    def has_gates(self, step: Step, listing: Listing) -> bool:
        """Return whether one factor is an activation and the other one data."""
        # an input that was read before has nodes, and is both
        units = [t for t in step.tensors if listing.is_unit(t)]
        data = [t for t in step.tensors if listing.is_data(t)]
        return len(units) == len(data) == 1 and not listing.has_weight(step.tensors)

    def gated(self, step: Step, listing: Listing) -> tuple[tuple[Tensor, ...], Gates]:
        """Return the edges of the product with ones; the data are their gates."""
        leaves, form = pytree.tree_flatten((step.args, step.kwargs))
        unit_at = next(i for i, leaf in enumerate(leaves) if listing.is_unit(leaf))
        data_at = next(i for i, leaf in enumerate(leaves) if listing.is_data(leaf))
        unit = leaves[unit_at]
        data = leaves[data_at].detach().double()
        ones = torch.ones_like(data)

        def product(vector: Tensor, factor: Tensor) -> Tensor:
            new = list(leaves)
            new[unit_at] = vector.reshape(unit.shape)
            new[data_at] = factor
            args, kwargs = pytree.tree_unflatten(new, form)
            return step.function(*args, **kwargs)

        gates = gates_of_linear(
            lambda vector: product(vector, ones), lambda vector: product(vector, data), unit.numel()
        )
        return (unit,), gates
