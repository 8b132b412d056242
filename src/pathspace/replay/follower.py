"""Follows a forward pass on data, operation by operation, along the traced one.

Every operation that depends on a parameter is matched with the one that was traced; a pass that takes another way is
refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.registered import registration_of
from pathspace.network.rules import MOVEMENTS, RULED
from pathspace.network.rules.scale_free import SIGNS
from pathspace.network.trace.functions import METADATA, SHAPED_FACTORIES, by_position, short_name, tensors_in
from pathspace.network.trace.values import whole
from pathspace.network.written_out import written_out
from pathspace.replay import taken_apart
from pathspace.replay.matched import UNGRADED, Matched

_PACKED = (
    "sequences are packed by their lengths, so a batch has other steps than the traced ones; for quantities on data "
    "pad them, and multiply by a mask or pick the last step, h[torch.arange(len(h)), lengths - 1]"
)

_SCALINGS = ("mul", "__mul__", "__rmul__")
_DETACHES = ("detach", "data.__get__")


class Follower(Matched, TorchFunctionMode):
    """Matches operations with the traced ones; see :class:`Matched`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._blank: dict[int, Tensor] = {}  # new tensors, made of nothing or in the form of another
        self._cut: dict[int, Tensor] = {}  # detached from the graph
        self._attached: dict[int, Tensor] = {}  # what a detached tensor was before
        self._tails: dict[int, Tensor] = {}  # what was traced as a function of outputs
        self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        saving = _top_saved_tensors_default_hooks(True)
        # to compute a part once more would not be followed
        if saving is not None and getattr(saving[0], "__module__", "") == "torch.utils.checkpoint":
            with saved_tensors_hooks(whole, whole), self:
                return func(*args, **kwargs)
        name, registered = short_name(func), registration_of(func)
        if self._paused or name in METADATA:
            return func(*args, **kwargs)
        if registered is not None and (self.expected is None or self.expected.name != name):  # not cut there
            name = registered.like or name
        if name in ("register_hook", "retain_grad"):  # on gradients: the user's own, and left out
            return RemovableHandle(OrderedDict())
        if kwargs and name in RULED:
            args, kwargs = by_position(name, args, kwargs)
        tensors = tensors_in(args, kwargs)
        depends = any(t.requires_grad for t in tensors)
        self.ungraded |= depends and not torch.is_grad_enabled()
        if self.is_cut(name, tensors):
            return self.cut(name, func, args, kwargs, tensors)
        if registered is not None and registered.like is None:
            in_parts = registered.decomposition
        else:
            in_parts = written_out(name, args, kwargs, self._rank)
        if in_parts is not None and depends:
            with self:
                return in_parts(*args, **kwargs)
        if name in taken_apart.NORMALIZATIONS and depends:
            return taken_apart.normalization(self, name, func, args, kwargs)
        if name in taken_apart.OTHERS and depends:
            return taken_apart.OTHERS[name](self, name, *args, **kwargs)
        args = taken_apart.written(self, name, self._with_statistics_held(name, args))
        result = self._exposed(name, tensors, func(*args, **kwargs))
        self.note(name, func, args, kwargs, tensors_in(args, kwargs), result)
        return result

    def _rank(self, tensor: Tensor) -> int:
        """Return 0 for an activation, 1 for what depends on no parameter, 2 for a parameter."""
        return 2 if self.is_weight(tensor) else int(not tensor.requires_grad)

    def note(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        result: Any,
    ) -> None:
        """Match an operation that was done with the traced one, and remember what it shows."""
        if name == "_pack_padded_sequence":
            raise UnmatchedForwardError(_PACKED)
        created = tensors_in((args[:1] if result is None else result,), {})
        if not created:
            return
        if name in SIGNS:  # its gradient is zero
            self.data.update((id(t), t) for t in created)
            return
        self._note_blank(name, tensors, created)
        if name in _SCALINGS and self._of_zeros(tensors):  # d * h at the start of a recurrence is no edge
            self.data[id(created[0])] = created[0]
            return
        data = any(id(t) in self.data for t in tensors)
        if name in _DETACHES and tensors[0].requires_grad and not created[0].requires_grad:
            self.next(name)
            self._cut[id(created[0])] = created[0]
            self._attached[id(created[0])] = tensors[0]
            return
        if any(id(t) in self._cut for t in tensors):
            raise UnmatchedForwardError(
                f"'{name}' uses an activation that was detached: the path through it carries values but no gradients, "
                "so what it adds on data is not known; detach only what the model returns"
            )
        call = self.next(name) if created[0].requires_grad else None
        if call is not None and call.kind == "tail":
            self._tails.update((id(t), t) for t in created)
        if call is not None and call.kind != "parameter":
            data = True
            written = bool(tensors) and created[0] is tensors[0]
            if written and not self.was_weight(created[0]):  # a constant
                self.data[id(created[0])] = created[0]
            weights = [t for t in tensors if self.is_weight(t)]
            if weights and written and (created[0]._is_view() or "mul" in name or name == "__setitem__"):
                raise UnmatchedForwardError(
                    f"'{name}' in '{call.module}' writes a parameter into a tensor; what its edges carry on data "
                    "shows in y = x + p or y = x * p"
                )
            if weights:
                self.note_use(call, name, func, args, kwargs, tensors, weights, created[0])
            self.note_nodes(call, created)
        self._note_created(name, tensors, created, data=data)

    def _note_blank(self, name: str, tensors: list[Tensor], created: list[Tensor]) -> None:
        """Remember which tensors nothing was written to yet."""
        moved = name in MOVEMENTS and all(id(t) in self._blank for t in tensors)
        if name in SHAPED_FACTORIES or moved or not tensors:
            self._blank.update((id(t), t) for t in created)
        elif id(created[0]) in self._blank:  # written to
            del self._blank[id(created[0])]

    def _note_created(self, name: str, tensors: list[Tensor], created: list[Tensor], *, data: bool) -> None:
        """Remember which results depend on data, and which are weights."""
        for t in created:
            if data:
                self.data[id(t)] = t
            elif t.requires_grad:
                self.weights.append(t)
                if name in MOVEMENTS and id(tensors[0]) in self.views:
                    self.views.add(id(t))

    def is_cut(self, name: str, tensors: list[Tensor]) -> bool:
        """Whether the network is cut at an operation on these tensors."""
        call = self.expected
        known = call is not None and call.kind == "cut" and call.name == name
        return known and any(t.requires_grad or id(t) in self._cut for t in tensors)

    def enter_cut(self, name: str, tensors: list[Tensor]) -> None:
        """What enters a cut is an output of the network."""
        call = self.next(name)
        for slot, tensor in zip(call.results, tensors, strict=True):
            if slot < 0:
                continue
            if not tensor.requires_grad:
                raise UnmatchedForwardError(
                    f"what enters '{name}' in '{call.module}', where the network is cut, was detached or computed with "
                    "gradients disabled, so what it adds on data is not known"
                )
            self._leaves_as(slot, tensor)

    def cut(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, tensors: list[Tensor]
    ) -> Any:
        """An operation at which the network is cut: what leaves it is an input, without a gradient."""
        self.enter_cut(name, tensors)
        before = [t._version for t in tensors]
        result = func(*args, **kwargs)
        if [t._version for t in tensors] == before:
            result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        elif result._is_view():
            raise UnmatchedForwardError(f"'{name}', where the network is cut, writes into a part of a tensor")
        else:
            result.detach_()
        self.data.update((id(t), t) for t in tensors_in((result,), {}))
        return result

    def _with_statistics_held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a product that was traced as a normalization, its root mean square cut from the graph."""
        call = self.expected
        if call is None or call.name != name or call.results[0] not in self.normalizations:
            return args
        return tuple(t.detach() if id(t) in self._tails else t for t in args)

    def _exposed(self, name: str, tensors: list[Tensor], result: Any) -> Any:
        """What the pass goes on with, where gradients at a result will be read or values of it be nodes."""
        call = self.expected
        if call is None or call.name != name or not isinstance(result, Tensor) or not result.requires_grad:
            return result
        wanted = any(s in self.program.nodes for s in call.results) or any(map(self.is_weight, tensors))
        if any(result is t for t in tensors):  # what stood for it was there before
            self._shown.pop(id(result), None)
            return result
        return self.exposed(result, call.batch, tensors) if wanted else result

    def _of_zeros(self, tensors: list[Tensor]) -> bool:
        """Whether a parameter is multiplied with a new tensor of zeros, which tracing leaves out."""
        new = [t for t in tensors if id(t) in self._blank and t.numel() > 1]
        return len(tensors) == 2 and any(map(self.is_weight, tensors)) and any(not t.any() for t in new)

    def _leaves_as(self, slot: int, tensor: Tensor) -> None:
        """An output counts as it leaves the network, after its activation if it has one."""
        node = self.nodes.pop((slot,), None)
        if node is not None:
            self.note_node((slot,), tensor, node.merged or node.batch)

    def run_outside(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module left outside: what leaves it is an input of the network."""
        if self._paused:
            return forward(*args, **kwargs)
        call = self.next("outside")
        entering = [t for t in tensors_in(args, kwargs) if t.requires_grad and not self.is_weight(t)]
        self._paused = True  # what is done here is none of the model's operations
        try:
            for slot, tensor in zip(call.results, entering, strict=True):
                self._leaves_as(slot, tensor)
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            result = pytree.tree_map_only(Tensor, Tensor.detach, forward(*args, **kwargs))
        finally:
            self._paused = False
        self.data.update((id(t), t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        return result

    def finish(self, returned: list[Tensor]) -> None:
        """Check that the forward pass came to the end of the traced one, and met all nodes."""
        if (call := self.expected) is not None:
            raise UnmatchedForwardError(
                f"the forward pass ended before '{call.name}' in '{call.module}', which was traced"
                f"{UNGRADED if self.ungraded else ''}"
            )
        missing = [s for s in self.program.nodes if s in self.live and (s,) not in self.nodes]
        if missing:
            call = next((call for call in self.program.operations if missing[0] in call.results), None)
            if call is None or call.name != "_weight_norm":
                raise UnmatchedForwardError(f"the forward pass did not show {len(missing)} nodes")
            raise UnmatchedForwardError(
                f"'{call.name}' in '{call.module}' makes a weight that enters a cut, and what it adds there is that of "
                f"no example: leave it to the plain rule with outside=['{call.module}']"
            )
        self.check_written()
        for slot, tensor in zip(self.program.outputs, returned, strict=True):
            if slot is not None:
                self._leaves_as(slot, self._attached.get(id(tensor), tensor))
