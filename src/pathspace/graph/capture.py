"""Captures a forward pass as a list of ATen operations: no views that are written to, no writes, no methods.

Torch's functionalization makes the operations pure, and a dispatch mode records each with its
values. ``make_fx`` would record the same, at fifty times the cost of a long loop. What must stay
whole is caught at the torch function.

All private names of torch that this needs are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# torch's own functionalization, on which AOTAutograd and torch.export rest: a name that is gone
# fails at this line
_enable = torch.__dict__["_enable_functionalization"]
_disable = torch.__dict__["_disable_functionalization"]
_to_functional = torch.__dict__["_to_functional_tensor"]
_from_functional = torch.__dict__["_from_functional_tensor"]
_is_functional = torch.__dict__["_is_functional_tensor"]
_sync = torch.__dict__["_sync"]
# torch's own vmap
_add_batch_dim = functorch.__dict__["_add_batch_dim"]
_batch_dim = functorch.__dict__["maybe_get_bdim"]
_is_batched = functorch.__dict__["is_batchedtensor"]
_level = functorch.__dict__["maybe_get_level"]
_set_fallback_warning = functorch.__dict__["_set_vmap_fallback_warning_enabled"]
_unwrapped = functorch.__dict__["get_unwrapped"]


_UNFILLED = frozenset(
    ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"]
)
"""Operations that leave in memory what lies there."""


@dataclass(frozen=True)
class Step:
    """One operation of a captured pass.

    Attributes:
        name: of the operation, such as ``addmm``, or of what was kept whole.
        function: the operation; it writes into none of its arguments.
        args: its arguments; tensors among them are inputs, constants, or results of steps before
            it.
        kwargs: those by name.
        result: what it returned.
        whole: a note for the reader of the capture about a function that was recorded as one step;
            None for an ATen operation.
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


def unseen() -> AbstractContextManager[Any]:
    """Keep torch functions from the modes that look at them."""
    return torch._C.DisableTorchFunction()


class Capture(TorchDispatchMode):
    """A recording of the operations that run inside ``with capture.running():``."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        # ids of the tensors that depend on inputs of the pass, and of those that depend on parameters
        self.derived: set[int] = set()
        self.learned: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _UNFILLED:
            result.zero_()  # what lies there may be no number
        self._record(Step(name, func, args, kwargs, result))
        return result

    def _record(self, step: Step) -> None:
        """Append a step, and note which of its results depend on inputs or on parameters."""
        self.steps.append(step)
        results = [id(t) for t in pytree.tree_leaves(step.result) if isinstance(t, Tensor)]
        # the results of a function that is one step count as inputs
        if step.whole is not None:
            self.derived.update(results)
            return
        given = {id(t) for t in step.tensors}
        for ids in (self.derived, self.learned):
            if not ids.isdisjoint(given):
                ids.update(results)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a model on tensors of :meth:`wrapped`, and record what it does."""
        with torch.no_grad(), self, _functional():
            yield

    def whole(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any, what: Any
    ) -> Any:
        """Run a function and record it as one step, without the operations inside.

        Args:
            name: of the step.
            function: what to run.
            args: its arguments; tensors are those of the model that is captured.
            kwargs: those by name.
            what: the step's note, see :class:`Step`.

        Returns:
            The function's result, for the model that is captured.
        """
        _disable()
        try:
            args, kwargs = pytree.tree_map_only(Tensor, plain, (args, kwargs))
            with _disable_current_modes():
                # the function may write into its arguments, or return them
                own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
                result = function(*own_args, **own_kwargs)
        finally:
            _enable(reapply_views=True)
        self._record(Step(name, function, args, kwargs, result, what))
        return pytree.tree_map_only(Tensor, wrapped, result)

    def current(self, tensor: Tensor) -> Tensor:
        """Return the current value of a tensor of the running model; after a write a view is taken anew, as a step."""
        with torch.no_grad(), self:
            return plain(tensor)

    def live(self, outputs: Iterable[Tensor]) -> list[Step]:
        """Return the steps on which some tensors depend, and all functions that were recorded as one step."""
        needed = {id(t) for t in outputs}
        kept = []
        for step in reversed(self.steps):
            results = [id(t) for t in pytree.tree_leaves(step.result)]
            if step.whole is not None or not needed.isdisjoint(results):
                kept.append(step)
                needed.update(id(t) for t in step.tensors)
        return kept[::-1]

    def depends_on_inputs_alone(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the running model depends on inputs of the pass, and on no parameter."""
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


def with_examples_first(tensor: Tensor) -> tuple[Tensor, bool]:
    """Unwrap a tensor of ``vmap``.

    Returns:
        The values for all examples, ``[n, ...]``, and True. For a tensor that all examples share:
        the tensor, and False.
    """
    if not _is_batched(tensor):
        return tensor, False
    values = _unwrapped(tensor)
    dim = _batch_dim(tensor)
    if dim != 0:
        values = values.movedim(dim, 0)
    return values, True


def batched_along_first(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor of ``vmap`` whose batch dimension is the first one.

    Args:
        tensor: any tensor.
        like: a tensor that differs between examples. If it is given, a tensor that all examples
            share is repeated for each of them; else it is returned as it is.
    """
    if _is_batched(tensor):
        if _batch_dim(tensor) == 0:
            return tensor
        values, _ = with_examples_first(tensor)
        return _add_batch_dim(values, 0, _level(tensor))
    if like is None:
        return tensor
    values, _ = with_examples_first(like)
    copies = tensor.expand(len(values), *tensor.shape)
    return _add_batch_dim(copies, 0, _level(like))


def one_by_one(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function for each example separately inside ``vmap``; outside it, simply call it.

    Raises:
        Exception: the function's own.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    batched = [t for t in leaves if isinstance(t, Tensor) and _is_batched(t)]
    if not batched:
        return function(*args, **kwargs)
    values, _ = with_examples_first(batched[0])
    level = _level(batched[0])
    results = []
    for i in range(len(values)):
        of_example = [_of_example(leaf, i) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(of_example, form)
        results.append(function(*args, **kwargs))
    # the k-th result of all examples, for each k
    by_result = zip(*map(pytree.tree_leaves, results), strict=True)
    stacked = [_add_batch_dim(torch.stack(parts), 0, level) for parts in by_result]
    return pytree.tree_unflatten(stacked, pytree.tree_structure(results[0]))


def _of_example(leaf: Any, i: int) -> Any:
    """Return the part of an argument that belongs to one example."""
    if not isinstance(leaf, Tensor) or not _is_batched(leaf):
        return leaf
    values, _ = with_examples_first(leaf)
    return values[i]


class OnBatch:
    """A function without gradients that inside ``vmap`` runs once, on the batch, as a model calls it.

    If an argument has no known dimension for the examples, the function runs under ``vmap``, or for
    each example by itself.

    Args:
        function: what to call.
        places: for each tensor among the arguments, the dimension of size 1 that holds the example;
            None if there is none.
        results: likewise for the results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        places: Sequence[int | None],
        results: Sequence[int | None],
    ) -> None:
        self._function = function
        self._places = places
        self._results = results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on one example or, inside ``vmap``, on all."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        batched = [t for t in tensors if _is_batched(t)]
        with torch.no_grad():
            if not batched:
                return self._function(*args, **kwargs)
            if self._has_all_places(tensors):
                places = iter(self._places)
                merged = [_merged(t, next(places)) if isinstance(t, Tensor) else t for t in leaves]
                args, kwargs = pytree.tree_unflatten(merged, form)
                return self._split(self._function(*args, **kwargs), batched[0])
            return self._under_vmap(args, kwargs)

    def _under_vmap(self, args: Any, kwargs: Any) -> Any:
        """Call the function on tensors of ``vmap``; one example after the other if ``vmap`` cannot run it."""
        # the function may write into its arguments
        own_args, own_kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        try:
            return self._function(*own_args, **own_kwargs)
        except RuntimeError:
            return one_by_one(self._function, args, kwargs)

    def _has_all_places(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether each tensor that differs between examples has a dimension for them."""
        pairs = zip(tensors, self._places, strict=True)
        return all(not _is_batched(t) or _holds_one_example(t, place) for t, place in pairs)

    def _split(self, result: Any, like: Tensor) -> Any:
        """Split results for the batch into those of the examples of ``like``, a tensor of ``vmap``."""
        values, _ = with_examples_first(like)
        count = len(values)
        places = iter(self._results)

        def split(t: Tensor) -> Tensor:
            place = next(places)
            if place is None or t.dim() <= place or t.shape[place] != count:
                return t
            # [..., n, ...] -> [n, ..., 1, ...]
            examples = t.unsqueeze(place + 1).movedim(place, 0)
            return _add_batch_dim(examples, 0, _level(like))

        return pytree.tree_map_only(Tensor, split, result)


def _holds_one_example(tensor: Tensor, place: int | None) -> bool:
    return place is not None and tensor.dim() > place and tensor.shape[place] == 1


def _merged(tensor: Tensor, place: int | None) -> Tensor:
    """Return a tensor of ``vmap`` as a batch, a copy: the dimension ``place`` holds all examples instead of one."""
    values, differs = with_examples_first(tensor)
    if not differs or place is None:
        return values.clone()
    return values.movedim(0, place).flatten(place, place + 1).clone()


@contextmanager
def slow_examples_allowed() -> Iterator[None]:
    """Let operations that ``vmap`` runs one example after the other do so without a warning."""
    _set_fallback_warning(False)
    try:
        yield
    finally:
        _set_fallback_warning(True)


class KeepsWhole(TorchFunctionMode):
    """A mode that gives torch functions to a handler, which may keep some whole.

    Args:
        handler: from the function, its arguments and those by name to a result; NotImplemented if
            it leaves the function as it is.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        super().__init__()
        self.handler = handler

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self.handler(self, func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result
