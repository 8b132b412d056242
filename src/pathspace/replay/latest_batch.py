"""The latest batch of a model, which a forward pre-hook takes from calls with gradients enabled."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pathspace.network import Network
from pathspace.network.call import Arguments


class LatestBatch:
    """Remembers the latest call of a network's model; a copy of the model carries a hook that does nothing.

    A copy of the batch is kept until the next one.

    Args:
        network: the traced network.
        look: whether to look at all; if not, batches come by :meth:`give`.

    Attributes:
        inputs: what the model was last called with.
    """

    def __init__(self, network: Network, *, look: bool) -> None:
        self.inputs: Arguments | None = None
        self._handle = None
        if look:
            hook = _Look(weakref.ref(self))
            self._handle = network.model.register_forward_pre_hook(hook, with_kwargs=True)
            weakref.finalize(self, self._handle.remove)

    @property
    def looks(self) -> bool:
        """True while batches are still observed."""
        return self._handle is not None

    def for_copy(self, network: Network, memo: dict[int, Any]) -> LatestBatch:
        """Return another one for the copy of a network that ``memo`` belongs to."""
        copied = copy.deepcopy(network, memo)
        # of a model that has the optimizer as an attribute, and is copied up to here
        for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            vars(copied.model)[hooks] = copy.deepcopy(vars(network.model)[hooks], memo)
        return LatestBatch(copied, look=self.looks)

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a batch as if the model had been called with it."""
        self.inputs = Arguments(args, kwargs)

    def remove(self) -> None:
        """Stop looking, and forget the batch."""
        self.inputs = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Look:
    """The hook itself; it keeps nothing alive."""

    only_looks = True

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = self._target()
        # in vmap the inputs are no batch
        if (
            target is None
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        ):
            return
        if not torch.compiler.is_compiling():  # copies: the model may write into them
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda t: t.detach().clone(), (args, kwargs)
            )
        target.give(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Look:
        return type(self)(_nothing)

    def __reduce__(self) -> Any:
        return type(self), (_nothing,)


def _nothing() -> None:
    return None
