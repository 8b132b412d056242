"""Check that a model is still the one that was traced: modules, shared parameters, attributes, masks, functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from pathspace.network.attributes import entries, is_plain, runs, wraps
from pathspace.network.call import Call
from pathspace.network.sharded import WHAT_TO_DO, flattened, follow, shards
from pathspace.squared.sharding import is_sharded

# what makes no difference to the network, in whatever way it is switched
_NEUTRAL = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


_LONG = 100
"""Containers of more entries are compared by identity and length."""
_NEAR = 5
"""A change so many checks after the last one is that of the next step, which makes one to three."""
_TIMES = 3
"""How often in a row a part changes until its cost is told."""


class StalenessCheck:
    """A record of a traced model, to compare with what it is later.

    An attribute or a function that is another one than before leads to a second trace. If that
    finds the same network, the new value is the one that is watched from then on.

    Args:
        model: the model.
        parameters: name -> parameter of the network.
        call: how the model was called, with what is watched.
        retraced: a method that traces the model again, and returns what is watched then; None if
            the network is another one.

    Attributes:
        call: with what is watched now.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        call: Call,
        retraced: Callable[[], Call | None],
    ) -> None:
        self._model = model
        # weak, since the network that has this method holds the check
        self._retraced = WeakMethod(retraced)
        self._retracing = False
        self._checks = 0
        # part -> retraces in a row, and the last one's check
        self._in_a_row: dict[str, tuple[int, int]] = {}
        self._told = set[str]()
        outside = call.outside
        # Every step of an optimizer asks, so the dictionaries of the modules are looked into
        # without a detour.
        self._children: list[tuple[Mapping[str, nn.Module | None], str, nn.Module, str]] = []
        self._neutral: dict[str, tuple[Mapping[str, nn.Module | None], str, nn.Module | None]] = {}
        self._lengths: list[tuple[Mapping[str, nn.Module | None], int, str]] = []
        self._leaves: list[
            tuple[Mapping[str, nn.Parameter | None], str, nn.Parameter, torch.Size, str]
        ] = []
        for path, module in model.named_modules():
            if any(path == one or path.startswith(f"{one}.") for one in outside):
                continue
            if isinstance(module, nn.Sequential):
                self._lengths.append((module._modules, len(module._modules), path))
            for name, child in module._modules.items():
                place = f"{path}.{name}".lstrip(".")
                if child is None or isinstance(child, _NEUTRAL):
                    self._neutral[place] = module._modules, name, child
                else:
                    self._children.append((module._modules, name, child, place))
        for name, parameter in parameters.items():
            path, _, leaf = name.rpartition(".")
            self._leaves.append(
                (model.get_submodule(path)._parameters, leaf, parameter, parameter.shape, name)
            )

        self._tied = [(second, first) for second, first in call.tied if first in parameters]
        self._global_hooks = self._hooks_of_trace = _global_hooks()
        self._constants = call.constants
        # buffers that had these values, and their version
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._watch(call)

    def _watch(self, call: Call) -> None:
        """Watch the attributes and functions of a call."""
        self.call = call
        modules = dict(self._model.named_modules())
        self._attributes: list[tuple[dict[str, Any], str, Any, str]] = []
        self._long: list[_LongContainer] = []
        for (path, key), value in call.attributes.items():
            if path not in modules:
                continue
            held = vars(modules[path])
            name = f"{path}.{key}".lstrip(".")
            if entries(value) > _LONG:
                self._long.append(_LongContainer(held, key, value, name))
            else:
                self._attributes.append((held, key, value, name))
        self._forwards = [
            (modules[path], type(modules[path]), function, path)
            for path, function in call.forwards.items()
            if path in modules
        ]
        self._of_classes = [
            (modules[path], owner, key, value, f"{path}.{key}".lstrip("."))
            for (path, key), (owner, value) in call.of_classes.items()
            if path in modules
        ]

    def check(self) -> dict[str, nn.Parameter]:
        """Raise RuntimeError if a part was replaced; by name, the parameters that were split over processes since."""
        self._check_modules()
        split: dict[str, nn.Parameter] = {}
        for owned, leaf, parameter, shape, name in self._leaves:
            same = owned.get(leaf) is parameter or self._parameter(name) is parameter
            if not same or parameter.shape != shape:
                split[name] = self._split_since(name, parameter, split)
        for second, first in self._tied:
            self._check_tie(second, first)
        self._checks += 1
        change = self._changed_neutral() or self._changed_attribute() or self._changed_forward()
        if change is not None:
            self._retrace(*change)
        self._warn_of_global_hooks()
        for name, values in self._constants.items():
            self._check_constant(name, values)
        return split

    def _check_modules(self) -> None:
        """Raise RuntimeError if a module was replaced, removed or added."""
        for siblings, name, child, path in self._children:
            result = siblings.get(name)
            if result is child or _wraps(result, child):
                continue
            now = "removed" if result is None else "replaced"
            by = "" if result is None else f", by {type(result).__name__}"
            raise RuntimeError(
                f"the module '{path}' ({type(child).__name__}) was {now} after tracing{by}: trace the model again, "
                "and make a new optimizer"
            )
        for modules, count, path in self._lengths:
            if len(modules) == count:
                continue
            where = f"'{path}'" if path else "the model"
            raise RuntimeError(
                f"{where} had {count} modules in a row when it was traced and has {len(modules)} now: trace the "
                "model again, and make a new optimizer"
            )

    def _split_since(
        self, name: str, parameter: nn.Parameter, split: dict[str, nn.Parameter]
    ) -> nn.Parameter:
        """Return the parameter in the place of another one, which was split over processes after tracing.

        Raises:
            RuntimeError: it was replaced in another way.
        """
        if flattened(self._model):
            raise RuntimeError(
                f"the model's parameter '{name}' was flattened by FullyShardedDataParallel (the older FSDP) "
                f"after tracing. {WHAT_TO_DO}"
            )
        now = self._parameter(name)
        if is_sharded(now) or is_sharded(parameter):
            follow(name, parameter, now, split)
            assert now is not None
            return now
        if any(map(shards, self._model.modules())):
            raise RuntimeError(
                f"the model's parameter '{name}' is split over processes by FSDP, and whole at present: call "
                "reshard() of the model's FSDP modules before the network is used"
            )
        raise RuntimeError(
            f"the model's parameter '{name}' was replaced after tracing (a new layer or shape, pruning, a "
            "conversion, a move from the meta or to another kind of device, or load_state_dict with "
            "assign=True): trace the model again"
        )

    def _changed_neutral(self) -> tuple[str, str] | None:
        """Return a place of a module that made no difference, or of none, where another one stands, and what to say."""
        for path, (siblings, name, child) in self._neutral.items():
            now = siblings.get(name)
            if now is child or now is None or isinstance(now, _NEUTRAL):
                continue
            was = "None" if child is None else type(child).__name__
            return f"the module '{path}'", (
                f"the module '{path}' was {was} when the model was traced and is a "
                f"{type(now).__name__} now: trace the model again, and make a new optimizer"
            )
        return None

    def _changed_attribute(self) -> tuple[str, str] | None:
        """Return an attribute that the forward pass may read and that has another value, and what to say of it."""
        for held, key, value, name in self._attributes:
            now = held.get(key, _MISSING)
            if now is not value and not _equal(now, value):
                if now is not _MISSING and not is_plain(now):  # and could not be watched any longer
                    raise RuntimeError(_changed(name, value, now))
                return f"the attribute '{name}'", _changed(name, value, now)
        for container in self._long:
            if container.has_changed():
                return f"the attribute '{container.name}'", container.changed()
        for module, owner, key, value, name in self._of_classes:
            now = module.__dict__.get(key, owner.__dict__.get(key, _MISSING))
            if now is not value and not wraps(now, value):
                return f"the attribute '{name}'", _changed(name, value, now)
        return None

    def _changed_forward(self) -> tuple[str, str] | None:
        """Return a module that runs another function as its forward, and what to say of it."""
        for module, kind, function, path in self._forwards:
            as_it_was = (
                type(module) is kind
                and "forward" not in module.__dict__
                and kind.forward is function
            )
            if not as_it_was and not runs(module, function):
                what = f"the forward of {_named(path)}"
                return what, (
                    f"{what} is another function than when the model was traced: trace the model again, and make a new "
                    "optimizer"
                )
        return None

    def _retrace(self, what: str, message: str) -> None:
        """Go on with what is there now if the model still has the same network.

        Args:
            what: the part that has changed.
            message: what to raise otherwise.

        Raises:
            RuntimeError: the network is another one, or the model cannot be traced as it is now.
        """
        # a model that holds its own network has it checked while it is copied
        if self._retracing or _global_hooks() != self._hooks_of_trace:
            raise RuntimeError(message)
        self._retracing = True
        try:
            retraced = self._retraced()
            call = None if retraced is None else retraced()
        except Exception as error:  # the model's own, too, which may be of any kind
            raise RuntimeError(
                f"{message}. (Whether it makes a difference is not known, as a second trace failed: "
                f"{type(error).__name__}: {error})"
            ) from error
        finally:
            self._retracing = False
        if call is None:
            raise RuntimeError(message)
        self._watch(call)
        for path, (siblings, name, _) in self._neutral.items():
            self._neutral[path] = siblings, name, siblings.get(name)
        self._warn_of_cost(what)

    def _warn_of_cost(self, what: str) -> None:
        """Warn once of a part that changes at every step."""
        times, last = self._in_a_row.get(what, (0, 0))
        times = times + 1 if self._checks - last <= _NEAR else 1
        self._in_a_row[what] = times, self._checks
        if times == _TIMES and what not in self._told:
            self._told.add(what)
            warnings.warn(
                f"{what} changes at every step, and each time the model is traced again to see that its network is the "
                "same. If that takes long, keep a number that changes in a buffer (register_buffer)",
                stacklevel=2,
            )

    def _check_tie(self, second: str, first: str) -> None:
        """Raise RuntimeError if two names of one parameter are names of two by now."""
        if self._parameter(second) is not self._parameter(first):
            raise RuntimeError(
                f"'{second}' and '{first}' were one parameter when the model was traced and are two now (it was "
                "replaced after tracing, or untied): trace the model again, and make a new optimizer"
            )

    def _warn_of_global_hooks(self) -> None:
        """Warn once of forward hooks on all modules that were registered after tracing."""
        now = _global_hooks()
        if now - self._global_hooks:
            self._global_hooks = now
            warnings.warn(
                "a forward hook on all modules was registered after the model was traced. If it changes what modules "
                "return, the network is another one: trace the model with the hook in place",
                stacklevel=2,
            )

    def _check_constant(self, name: str, values: Tensor) -> None:
        """Raise RuntimeError if a mask or an index has other values; compared only where something was written."""
        path, _, leaf = name.rpartition(".")
        try:  # as an attribute: what torch.compile wraps has it, too
            now = getattr(self._model.get_submodule(path), leaf, None)
        except AttributeError:
            now = None
        if not isinstance(now, Tensor):
            return  # a cache that is made anew
        version = -1 if now.is_inference() else now._version  # which inference tensors do not count
        seen, its = self._seen.get(name, (None, -1))
        if seen is now and its == version >= 0:
            return
        # one that grew with the longest sequence keeps what it had
        block = now.detach()[tuple(map(slice, values.shape))] if now.dim() == values.dim() else now
        if block.shape != values.shape or not torch.equal(block.to(values), values):
            raise RuntimeError(
                f"the buffer '{name}' has other values than when the model was traced (load_state_dict, or a mask or "
                "an index that changes), and these decided which weights belong together: trace the model again, and "
                "make a new optimizer"
            )
        self._seen[name] = now, version

    def _parameter(self, name: str) -> nn.Parameter | None:
        try:
            return self._model.get_parameter(name)  # sees through what torch.compile wraps
        except AttributeError:
            return None


def _wraps(found: nn.Module | None, child: nn.Module) -> bool:
    """Return whether a module wraps another one, as the result of torch.compile does."""
    return found is not None and any(one is child for one in found.modules())


_MISSING = object()


class _LongContainer:
    """An attribute with so many entries that comparing them takes longer than a step may.

    Args:
        held: the attributes of its module.
        key: its name there.
        value: a copy of what it was when the model was traced.
        name: its name in the model.
    """

    def __init__(self, held: dict[str, Any], key: str, value: Any, name: str) -> None:
        self.name = name
        self._held = held
        self._key = key
        self._value = value
        self._seen: Any = _MISSING  # which had these entries

    def has_changed(self) -> bool:
        """Return whether it has another length, or is another container with other entries."""
        now = self._held.get(self._key, _MISSING)
        if now is self._seen and len(now) == len(self._value):
            return False
        if not _equal(now, self._value):
            return True
        self._seen = now
        return False

    def changed(self) -> str:
        """Return what to say of the change."""
        now = self._held.get(self._key, _MISSING)
        is_now = "is gone" if now is _MISSING else "has others now"
        return (
            f"the attribute '{self.name}' had {len(self._value)} entries when the model was traced and {is_now}, and "
            "the forward pass may read it: trace the model again, and make a new optimizer"
        )


def _global_hooks() -> frozenset[int]:
    """Return the numbers of the forward hooks on all modules."""
    before = global_hooks._global_forward_pre_hooks
    after = global_hooks._global_forward_hooks
    return frozenset([*before, *after]) if before or after else frozenset()


def _equal(now: Any, value: Any) -> bool:
    """Return whether an attribute has the value that it had; a bound method is compared by its function."""
    if type(now) is not type(value):
        return False
    try:
        same = bool(getattr(now, "__func__", now) == getattr(value, "__func__", value))
        return same or bool(now != now and value != value)
    except (RuntimeError, ValueError):  # of arrays that it holds by now
        return False


def _changed(name: str, value: Any, now: Any) -> str:
    is_now = "is gone" if now is _MISSING else f"is {now!r} now"
    return (
        f"the attribute '{name}' was {value!r} when the model was traced and {is_now}, and the forward pass may read "
        "it: trace the model again, and make a new optimizer. Keep a number that a schedule changes in a buffer "
        "(register_buffer), whose numbers may change"
    )


def _named(path: str) -> str:
    return f"the module '{path}'" if path else "the model"
