"""Tensors of a model that share memory, so that rescaling one would silently change the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pathspace.network.trace.functions import PLAIN


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
        if _is_plain(p) and _repeats_elements(p):
            raise ValueError(
                f"parameter '{name}' has one element at several places, which cannot be changed in place: clone() it"
            )
    for (name, t), (other, its) in _pairs(model):
        are_parameters = isinstance(t, nn.Parameter) and isinstance(its, nn.Parameter)
        if are_parameters and (name in inside or other in inside):
            raise ValueError(
                f"parameters '{name}' and '{other}' lie in the same memory, so to rescale one would change the other: "
                "tie them as one parameter (b.weight = a.weight, or a.weight.t() in forward), not by .data"
            )


def _repeats_elements(t: Tensor) -> bool:
    """Return whether a tensor has one element at several places."""
    return any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True))


def in_memory_of_parameters(model: nn.Module) -> list[Tensor]:
    """Return buffers and attributes that share memory with a parameter, and change unnoticed when it is rescaled."""
    found = []
    for (_, first), (_, second) in _pairs(model):
        others = [t for t in (first, second) if not isinstance(t, nn.Parameter)]
        if len(others) == 1:
            found += others
    return found


def _pairs(model: nn.Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yield pairs of tensors that have an element in common, with their names."""
    before: list[tuple[str, Tensor]] = []
    for name, t in sorted(_held(model), key=lambda held: held[1].data_ptr()):
        before = [(other, its) for other, its in before if _end(its) > t.data_ptr()]
        for other, its in before:
            if t.device == its.device and _overlap(t, its):
                yield (other, its), (name, t)
        before.append((name, t))


def _end(t: Tensor) -> int:
    """Return the address after the last element of a tensor."""
    return t.data_ptr() + _size(t) * t.element_size()


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters, buffers and other tensors of all modules, each once, by their names."""
    seen: set[int] = set()
    for name, t in (*model.named_parameters(), *model.named_buffers(), *_in_attributes(model)):
        if _is_plain(t) and id(t) not in seen:
            seen.add(id(t))
            yield name, t


def _in_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors in the attributes of all modules, by names."""
    own = vars(nn.Module()).keys()  # torch's, of parameters, buffers, modules and hooks
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            # what an RNN's parameters were
            if key in own or key == "_flat_weights" or isinstance(value, PLAIN):
                continue
            name = f"{path}.{key}".lstrip(".")
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield name, leaf


def _is_plain(t: Tensor) -> bool:
    """Return whether a tensor has elements, each at a place of its own in memory."""
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided:
        return False
    return not t.is_meta and t.numel() > 0


def _size(t: Tensor) -> int:
    """Return the number of elements from the first of a tensor to its last, with those between them."""
    return 1 + sum(step * (n - 1) for step, n in zip(t.stride(), t.shape, strict=True))


def _overlap(t: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element in common, if the first begins no earlier than the other."""
    distance = t.data_ptr() - other.data_ptr()
    offset, rest = divmod(distance, t.element_size())
    if rest or t.dtype != other.dtype:  # read in another way
        return True
    end = max(offset + _size(t), _size(other))
    memory = torch.zeros(end, dtype=torch.bool)
    memory.as_strided(t.shape, t.stride(), offset).fill_(True)
    return bool(memory.as_strided(other.shape, other.stride()).any())
