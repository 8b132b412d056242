"""What a model was last called with, and what was found while it ran.

A forward pre-hook looks at calls with gradients enabled. When an optimizer is about to need quantities on the batch,
the call itself is followed, and they are computed from its graph at its end, before the loss's backward pass frees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from pathspace.network import Network
from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.trace.functions import tensors_in
from pathspace.replay.arguments import Arguments, examples_in
from pathspace.replay.chain import ChainPass, ChainWitness
from pathspace.replay.matched import Summary
from pathspace.replay.replay import Replay
from pathspace.replay.witness import Witness, can_witness

Found = Replay | ChainPass
"""A call that was followed."""

Short = Callable[[int, int], ChainWitness]
"""What follows a call of a network whose form is known beforehand, from its number of examples and how many of them,
the first ones, are to be looked at."""


class LatestBatch:
    """Remembers the latest call of a network's model; a copy of the model carries a hook that does nothing.

    A copy of the batch is kept until the next one.

    Args:
        network: the traced network.
        wanted: a bound method: whether the call that begins is to be followed.
        few: a bound method: of how many examples, the first ones, from their number.
        prepare: a bound method: what is made of a call that was followed.
        summary: what ``prepare`` needs of the values of a node.
        short: what follows calls of this network, if its form is known; they need no gradients then.
        look: whether to look at all; if not, batches come by :meth:`give`.

    Attributes:
        inputs: what the model was last called with.
        prepared: what ``prepare`` returned for that call; None if it was not followed.
    """

    def __init__(
        self,
        network: Network,
        wanted: Callable[[], bool],
        few: Callable[[int], int],
        prepare: Callable[[Found], Any],
        summary: Summary,
        short: Short | None = None,
        *,
        look: bool,
    ) -> None:
        self.inputs: Arguments | None = None
        self.prepared: Any = None
        self._network, self._summary = network, summary
        self._wanted, self._prepare = weakref.WeakMethod(wanted), weakref.WeakMethod(prepare)
        self._few = weakref.WeakMethod(few)
        self._short = short
        self._witness: Witness | ChainWitness | None = None
        self._end: Any = None  # the hook at the end of a call that is followed
        self._handle = None
        if look:
            hook = _Look(weakref.ref(self))
            self._handle = network.model.register_forward_pre_hook(hook, with_kwargs=True)
            weakref.finalize(self, self._handle.remove)

    @property
    def looks(self) -> bool:
        """Whether it still looks."""
        return self._handle is not None

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a batch as if the model had been called with it."""
        self.inputs, self.prepared = Arguments(args, kwargs), None

    def remove(self) -> None:
        """Stop looking, and forget the batch."""
        self.inputs = self.prepared = None
        self._leave()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins."""
        # copies: the model may write into them
        self.give(*pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))
        self._leave()  # a call that was interrupted, or that this one is inside
        wanted = self._wanted()
        if wanted is None or not wanted():
            return
        inputs = tensors_in(args, kwargs)
        if not can_witness(self._network, inputs, backwards=self._short is None):
            return
        try:
            self._witness = self._new_witness(inputs)
        except (ValueError, UnmatchedForwardError):
            return
        if self._witness is None:
            return
        # until the end of the call this is kept alive: who follows it must leave, even if the optimizer goes meanwhile
        self._end = model.register_forward_hook(_End(lambda: self), always_call=True)
        self._witness.__enter__()

    def _new_witness(self, inputs: list[Tensor]) -> Witness | ChainWitness | None:
        count, few = examples_in(self._network, inputs), self._few()
        some = count if few is None else few(count)
        if self._short is not None:
            return self._short(count, some)
        if some < count:  # gradients are those of all
            return None
        return Witness(self._network, inputs, self._summary)

    def end(self, result: Any) -> None:
        """It ends; with None if it raised."""
        witness, self._witness = self._witness, None
        if witness is None:
            return
        _pop(witness)
        if result is None:
            return  # torch goes through the hooks now: the next call removes this one
        self._leave()
        prepare = self._prepare()
        try:
            values = witness.finish(result)
        except Exception:  # of the user's choice of outputs, on what another call returned
            values = None
        if values is None:
            self._short = None  # the model does more than that: later calls are followed as any other's
        if values is None or prepare is None:
            return
        try:
            self.prepared = prepare(values)
        except (ValueError, RuntimeError):
            self.prepared = None  # the step will run the model once more, and say what is wrong

    def _leave(self) -> None:
        witness, self._witness = self._witness, None
        if witness is not None:
            _pop(witness)
        if self._end is not None:
            self._end.remove()
            self._end = None


def _pop(witness: TorchFunctionMode) -> None:
    """Take it off the stack of modes, from under those of other optimizers that watch the same model."""
    if not any(mode is witness for mode in _get_current_function_mode_stack()):
        return
    above = []
    while (mode := _pop_mode()) is not witness:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)


class _Look:
    """The hook itself; it keeps nothing alive."""

    only_looks = True

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = self._target()
        if target is None or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            target.give(args, kwargs)
        elif not torch._C._are_functorch_transforms_active():  # in vmap the inputs are no batch
            target.begin(model, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Look:
        return type(self)(_nothing)

    def __reduce__(self) -> Any:
        return type(self), (_nothing,)


class _End(_Look):
    """The hook at the end of a call."""

    def __call__(self, _model: nn.Module, _args: Any, result: Any) -> None:  # type: ignore[override]
        target = self._target()
        if target is not None:
            target.end(result)


def _nothing() -> None:
    return None
