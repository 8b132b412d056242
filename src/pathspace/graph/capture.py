"""Captures a forward pass as a list of ATen operations: no views that are written to, no writes, no methods.

Torch's functionalization makes the operations pure, and a dispatch mode records each with its values. ``make_fx`` would
record the same, at fifty times the cost of a long loop. What must stay whole is caught at the torch function.

All private names of torch that this needs are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# torch's own functionalization, on which AOTAutograd and torch.export rest: a name that is gone fails at this line
_enable = torch.__dict__["_enable_functionalization"]
_disable = torch.__dict__["_disable_functionalization"]
_to_functional = torch.__dict__["_to_functional_tensor"]
_from_functional = torch.__dict__["_from_functional_tensor"]
_is_functional = torch.__dict__["_is_functional_tensor"]
_sync = torch.__dict__["_sync"]


@dataclass(frozen=True)
class Step:
    """One operation of a captured pass.

    Attributes:
        name: of the operation, such as ``addmm``, or of what was kept whole.
        function: the operation; it writes into none of its arguments.
        args: its arguments; tensors among them are inputs, constants, or results of steps before it.
        kwargs: those by name.
        result: what it returned.
        whole: what a whole step is, for whoever reads it; None for an ATen operation.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    whole: Any = None

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]


class Capture(TorchDispatchMode):
    """Records the operations that run inside ``with capture.running():``."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.derived: set[int] = set()  # ids of tensors that depend on the inputs of the pass
        self.learned: set[int] = set()  # of those that depend on its parameters

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self._record(Step(name, func, args, kwargs, result))
        return result

    def _record(self, step: Step) -> None:
        self.steps.append(step)
        given = {id(t) for t in step.tensors}
        results = [id(t) for t in pytree.tree_leaves(step.result) if isinstance(t, Tensor)]
        if step.whole is not None:  # inputs for what comes after it
            self.derived.update(results)
            return
        for ids in (self.derived, self.learned):
            if not ids.isdisjoint(given):
                ids.update(results)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a model on tensors of :meth:`wrapped`, and record what it does."""
        with torch.no_grad(), self, _functional():
            yield

    def whole(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, what: Any) -> Any:
        """Run a function without a look inside, record it as one step, and return what it returns."""
        _disable()
        try:
            args, kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
            with _disable_current_modes():
                # it may write into its arguments, or return them
                copies = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
                result = function(*copies[0], **copies[1])
        finally:
            _enable(reapply_views=True)
        self._record(Step(name, function, args, kwargs, result, what))
        return pytree.tree_map_only(Tensor, wrapped, result)

    def live(self, outputs: Iterable[Tensor]) -> list[Step]:
        """The steps on which some tensors depend, and those that were kept whole for a reason of the reader's."""
        needed = {id(t) for t in outputs}
        kept = []
        for step in reversed(self.steps):
            results = [id(t) for t in pytree.tree_leaves(step.result)]
            if step.whole is not None or not needed.isdisjoint(results):
                kept.append(step)
                needed.update(id(t) for t in step.tensors)
        return kept[::-1]

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the running model depends on the inputs alone."""
        key = id(plain(tensor))
        return key in self.derived and key not in self.learned


@contextmanager
def _functional() -> Iterator[None]:
    _enable(reapply_views=True)
    try:
        yield
    finally:
        _disable()


def wrapped(tensor: Tensor) -> Tensor:
    """Return a tensor for a model that is captured."""
    return _to_functional(tensor)


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor behind one of the model that is captured, as it is now."""
    if not _is_functional(tensor):
        return tensor
    _sync(tensor)
    return _from_functional(tensor)


class KeepsWhole(TorchFunctionMode):
    """Hands torch functions to a handler, which may keep some whole.

    Args:
        handler: from the function, its arguments and those by name to a result; NotImplemented if it leaves the
            function as it is.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        super().__init__()
        self.handler = handler

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self.handler(self, func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result
