"""Constants of a model that share memory: a write into one of them changes the others.

As long as constants alone are written, torch itself does so. Once a model writes an activation or
an input into one of them, all of them become values of the network, views of one memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pathspace.network.trace.functions import tensors_in
from pathspace.network.trace.recorder import Recorder

_ALIASES = ("detach", "data.__get__")
"""Functions whose results share memory, and are no views to torch."""
_RESHAPED = ("reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as")
"""Functions whose results may be copies; here they are not."""


@dataclass(frozen=True)
class Views:
    """Constants that one call of a function made of others, in the memory of these.

    Attributes:
        made: the results.
        name: of the function.
        function: what was called.
        args: its arguments.
        kwargs: those by name.
    """

    made: list[Tensor]
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SharedConstants:
    """The constants of one trace that share memory."""

    def __init__(self) -> None:
        self._views: dict[int, list[Views]] = {}  # by the id of the tensor that owns the memory
        self._owners: dict[int, Tensor] = {}  # by the id of another tensor there

    def note(self, views: Views, *, writes: bool) -> None:
        """Remember what a function of constants returned, if that lies in the memory of others.

        Args:
            views: the call.
            writes: whether the function wrote into its first argument, and returned that.
        """
        in_memory = [t for t in views.made if t._is_view() or views.name in _ALIASES]
        if not in_memory:
            return
        first = in_memory[0]
        owner = self.owner(first if first._is_view() else views.args[0])
        known = self._views.setdefault(id(owner), [])
        # a function such as contiguous() may return its argument, which is known already
        given = {id(t) for t in tensors_in(views.args, views.kwargs)}
        is_new = not writes and all(id(t) not in given for t in views.made)
        if is_new:
            known.append(views)
            self._owners.update((id(t), owner) for t in in_memory)

    def owner(self, constant: Tensor) -> Tensor:
        """Return the constant that owns the memory of a constant."""
        base = constant if constant._base is None else constant._base
        return self._owners.get(id(base), base)

    def __contains__(self, constant: Tensor) -> bool:
        return constant._is_view() or id(self.owner(constant)) in self._views

    def give_values(self, recorder: Recorder, constant: Tensor) -> bool:
        """Make all constants in the memory of one of them values of the network.

        Returns:
            Whether tracing has a rule for all functions by which they were made.
        """
        owner = self.owner(constant)
        value = recorder.value(owner)
        value.memory.constant = True
        recorder.bind(owner, value)
        for views in self._views.get(id(owner), ()):
            name = views.name
            args = views.args
            if name in _RESHAPED:
                name = "view"
                args = (args[0], views.made[0].shape)
            if name not in recorder.rules:
                return False
            result = recorder.apply(name, views.function, *args, **views.kwargs)
            for tensor, created in zip(views.made, tensors_in((result,), {}), strict=True):
                recorder.bind(tensor, recorder.value(created))
        return recorder.lookup(constant) is not None
