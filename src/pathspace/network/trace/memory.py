"""Tensors of a model that share memory, so that rescaling one would silently change the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def check_memory(model: nn.Module, left: tuple[str, ...]) -> None:
    """Refuse parameters that share memory with one another.

    Args:
        model: the model.
        left: how the names of parameters begin that take the plain rule.

    Raises:
        ValueError: a parameter that is not left does, or has one element at several places.
    """
    inside = {name: p for name, p in model.named_parameters() if not name.startswith(left)}
    for name, p in inside.items():
        repeated = _is_plain(p) and any(
            s == 0 and n > 1 for s, n in zip(p.stride(), p.shape, strict=True)
        )
        if repeated:
            raise ValueError(
                f"parameter '{name}' has one element at several places, which cannot be changed in place: clone() it"
            )
    for (name, t), (other, its) in _pairs(model):
        if (
            {name, other} & inside.keys()
            and isinstance(t, nn.Parameter)
            and isinstance(its, nn.Parameter)
        ):
            raise ValueError(
                f"parameters '{name}' and '{other}' lie in the same memory, so to rescale one would change the other: "
                "tie them as one parameter (b.weight = a.weight, or a.weight.t() in forward), not by .data"
            )


def in_memory_of_parameters(model: nn.Module) -> list[Tensor]:
    """Return buffers and attributes that share memory with a parameter, and change unnoticed when it is rescaled."""
    pairs = ([t for _, t in pair if not isinstance(t, nn.Parameter)] for pair in _pairs(model))
    return [others[0] for others in pairs if len(others) == 1]


def _pairs(model: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yield pairs of tensors that have an element in common, with their names."""
    before = list[tuple[str, Tensor]]()
    for name, t in sorted(_held(model), key=lambda held: held[1].data_ptr()):
        before = [
            (o, b) for o, b in before if b.data_ptr() + _size(b) * b.element_size() > t.data_ptr()
        ]
        for other, its in before:
            if t.device == its.device and _overlap(t, its):
                yield (other, its), (name, t)
        before.append((name, t))


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters, buffers and other tensors of all modules, each once, by their names."""
    seen = set[int]()
    named = [*model.named_parameters(), *model.named_buffers()]
    for path, module in model.named_modules():
        # what an RNN's parameters were
        own = {k: v for k, v in vars(module).items() if k != "_flat_weights"}
        of_module = ((key, t) for key, value in own.items() for t in pytree.tree_leaves(value))
        named += [(f"{path}.{key}".lstrip("."), t) for key, t in of_module if isinstance(t, Tensor)]
    for name, t in named:
        if _is_plain(t) and id(t) not in seen:
            seen.add(id(t))
            yield name, t


def _is_plain(t: Tensor) -> bool:
    """Return whether a tensor has elements, each at a place of its own in memory."""
    return (
        type(t) in (Tensor, nn.Parameter)
        and t.layout is torch.strided
        and not t.is_meta
        and t.numel() > 0
    )


def _size(t: Tensor) -> int:
    """Return the number of elements from the first of a tensor to its last, with those between them."""
    return 1 + sum(step * (n - 1) for step, n in zip(t.stride(), t.shape, strict=True))


def _overlap(t: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element in common, if the first begins no earlier than the other."""
    offset, rest = divmod(t.data_ptr() - other.data_ptr(), t.element_size())
    if rest or t.dtype != other.dtype:  # read in another way
        return True
    memory = torch.zeros(max(offset + _size(t), _size(other)), dtype=torch.bool)
    memory.as_strided(t.shape, t.stride(), offset).fill_(True)
    return bool(memory.as_strided(other.shape, other.stride()).any())
