"""Whether a model is still the one that was traced: its modules, shared parameters, attributes, masks and functions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from pathspace.network.attributes import Attributes, runs, wraps
from pathspace.network.sharded import WHAT_TO_DO, flattened, follow, shards
from pathspace.squared.parts import is_split

# what makes no difference to the network, in whatever way it is switched
_NEUTRAL = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StalenessCheck:
    """A record of a traced model, to compare with what it is later.

    Args:
        model: the model.
        parameters: name -> parameter of the network.
        outside: paths of modules that the network leaves out; what they are made of may change.
        constants: name -> values of the buffers that decided the network.
        tied: second names of shared parameters, each with the first.
        attributes: plain attributes that the forward pass may have read.
        forwards: the function that each module ran, by its path.
        of_classes: what the forward pass may have read of the modules' classes, with the class that defines it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        outside: frozenset[str],
        constants: Mapping[str, Tensor],
        tied: Sequence[tuple[str, str]] = (),
        attributes: Attributes | None = None,
        forwards: Mapping[str, Any] | None = None,
        of_classes: Attributes | None = None,
    ) -> None:
        self._model = model
        # Every step of an optimizer asks, so the dictionaries of the modules are looked into without a detour.
        self._children: list[tuple[Mapping[str, nn.Module | None], str, nn.Module, str]] = []
        self._lengths: list[tuple[Mapping[str, nn.Module | None], int, str]] = []
        self._leaves: list[tuple[Mapping[str, nn.Parameter | None], str, nn.Parameter, torch.Size, str]] = []
        for path, module in model.named_modules():
            if any(path == one or path.startswith(f"{one}.") for one in outside):
                continue
            if isinstance(module, nn.Sequential):
                self._lengths.append((module._modules, len(module._modules), path))
            for name, child in module._modules.items():
                if child is not None and not isinstance(child, _NEUTRAL):
                    self._children.append((module._modules, name, child, f"{path}.{name}".lstrip(".")))
        for name, parameter in parameters.items():
            path, _, leaf = name.rpartition(".")
            self._leaves.append(
                (model.get_submodule(path)._parameters, leaf, parameter, parameter.shape, name)
            )

        self._tied = [(second, first) for second, first in tied if first in parameters]
        modules = dict(model.named_modules())
        self._attributes = [
            (vars(modules[path]), key, value, f"{path}.{key}".lstrip("."))
            for (path, key), value in (attributes or {}).items()
            if path in modules
        ]
        self._forwards = [
            (modules[path], type(modules[path]), function, path)
            for path, function in (forwards or {}).items()
            if path in modules
        ]
        self._of_classes = [
            (modules[path], owner, key, value, f"{path}.{key}".lstrip("."))
            for (path, key), (owner, value) in (of_classes or {}).items()
            if path in modules
        ]
        self._global_hooks = _global_hooks()
        self._constants = constants
        self._seen: dict[str, tuple[Tensor, int]] = {}  # buffers that had these values, and their version

    def check(self) -> dict[str, nn.Parameter]:
        """Raise RuntimeError if a part was replaced; by name, the parameters that were split over processes since."""
        split: dict[str, nn.Parameter] = {}
        for siblings, name, child, path in self._children:
            result = siblings.get(name)
            if result is not child and not _wraps(result, child):
                now = "removed" if result is None else "replaced"
                by = "" if result is None else f", by {type(result).__name__}"
                raise RuntimeError(
                    f"the module '{path}' ({type(child).__name__}) was {now} after tracing{by}: trace the model again, "
                    "and make a new optimizer"
                )
        for modules, count, path in self._lengths:
            if len(modules) != count:
                where = f"'{path}'" if path else "the model"
                raise RuntimeError(
                    f"{where} had {count} modules in a row when it was traced and has {len(modules)} now: trace the "
                    "model again, and make a new optimizer"
                )
        for owned, leaf, parameter, shape, name in self._leaves:
            if parameter.shape != shape or (
                owned.get(leaf) is not parameter and self._parameter(name) is not parameter
            ):
                if flattened(self._model):
                    raise RuntimeError(
                        f"the model's parameter '{name}' was flattened by FullyShardedDataParallel (the older FSDP) "
                        f"after tracing. {WHAT_TO_DO}"
                    )
                now = self._parameter(name)
                if is_split(now) or is_split(parameter):
                    follow(name, parameter, now, split)
                    assert now is not None
                    split[name] = now
                    continue
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
        for second, first in self._tied:
            self._check_tie(second, first)
        self._check_attributes()
        self._check_forwards()
        self._warn_of_global_hooks()
        for name, values in self._constants.items():
            self._check_constant(name, values)
        return split

    def _check_attributes(self) -> None:
        """Raise RuntimeError if an attribute that the forward pass may read has another value."""
        for held, key, value, name in self._attributes:
            now = held.get(key, _MISSING)
            if now is not value and not _equal(now, value):
                raise RuntimeError(_changed(name, value, now))

        for module, owner, key, value, name in self._of_classes:
            now = module.__dict__.get(key, owner.__dict__.get(key, _MISSING))
            if now is not value and not wraps(now, value):
                raise RuntimeError(_changed(name, value, now))

    def _check_forwards(self) -> None:
        """Raise RuntimeError if a module runs another function as its forward."""
        for module, kind, function, path in self._forwards:
            as_it_was = type(module) is kind and "forward" not in module.__dict__ and kind.forward is function
            if not as_it_was and not runs(module, function):
                raise RuntimeError(
                    f"the forward of {_named(path)} is another function than when the model was traced: trace the "
                    "model again, and make a new optimizer"
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
    """Whether a module has another one inside, as what torch.compile returns."""
    return found is not None and any(one is child for one in found.modules())


_MISSING = object()


def _global_hooks() -> frozenset[int]:
    """Return the numbers of the forward hooks on all modules."""
    before = global_hooks._global_forward_pre_hooks
    after = global_hooks._global_forward_hooks
    return frozenset([*before, *after]) if before or after else frozenset()


def _equal(now: Any, value: Any) -> bool:
    """Return whether an attribute has the value that it had; a bound method is compared by its function."""
    if type(now) is not type(value):
        return False
    return getattr(now, "__func__", now) == getattr(value, "__func__", value) or (
        now != now and value != value
    )


def _changed(name: str, value: Any, now: Any) -> str:
    is_now = "is gone" if now is _MISSING else f"is {now!r} now"
    return (
        f"the attribute '{name}' was {value!r} when the model was traced and {is_now}, and the forward pass may read "
        "it: trace the model again, and make a new optimizer. Keep a number that a schedule changes in a buffer "
        "(register_buffer), whose numbers may change"
    )


def _named(path: str) -> str:
    return f"the module '{path}'" if path else "the model"
