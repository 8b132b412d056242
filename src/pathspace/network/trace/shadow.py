"""Copies of a model: the one that runs without data while it is traced, and those that run on data."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from pathspace.network.call import Arguments, arguments_in, batch_in
from pathspace.network.errors import UntraceableError, WrongBatchDimension
from pathspace.network.exported import checks_inputs, evaluated, kept_in_copies, remove_guards_
from pathspace.network.trace.finite import NotFinite, not_finite
from pathspace.network.trace.interpreter import Interpreter
from pathspace.network.trace.memory import in_memory_of_parameters
from pathspace.network.trace.recorder import Recorder

Model = TypeVar("Model", bound=nn.Module)


def shadow_of(
    model: nn.Module, recorder: Recorder, memo: Mapping[int, Any] | None = None
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Copy a model without data; its parameters and floating-point buffers are bound to leaves.

    Args:
        model: any module.
        recorder: of the trace.
        memo: what stands for further parts of the model in the copy, by their identity.
    """
    parameters = dict(model.named_parameters())
    memo = dict(memo or {})
    for name, parameter in parameters.items():
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        memo[id(parameter)] = recorder.add_leaf(empty, "parameter", name)
    # those in the memory of a parameter, and those that no hook makes anew, are refused where they
    # are used
    for t in (*made_by_hooks(model), *in_memory_of_parameters(model)):
        if t.is_floating_point() or t.is_complex():
            memo[id(t)] = torch.empty_like(t, device="meta", requires_grad=True)
    for name, buffer in model.named_buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = _shadow_of_buffer(buffer, name, recorder)
    for name, held in _plain_tensors(model):  # as buffers, whose values a trace may go by
        if id(held) not in memo:
            memo[id(held)] = recorder.copy_buffer(held, name)
    special = _empty_hooks_of(model) | _optimizers_of(model) | kept_in_copies(model)
    shadow = copy.deepcopy(model, special | memo)
    remove_guards_(shadow)
    _without_writes_(shadow)
    return shadow, parameters


def _shadow_of_buffer(buffer: Tensor, name: str, recorder: Recorder) -> Tensor:
    """Return the tensor that stands for a buffer in the copy of a model."""
    if buffer.layout is not torch.strided:  # a constant, which nothing traced may meet
        return buffer.detach().clone()
    if not buffer.is_floating_point() and not buffer.is_meta:
        return recorder.copy_buffer(buffer, name)
    empty = torch.empty_like(buffer, device="meta")
    leaf = recorder.add_leaf(empty, "buffer", name)
    if not buffer.is_meta:
        recorder.real[id(empty)] = recorder.copy_buffer(buffer, name)
    return leaf


def _without_writes_(shadow: nn.Module) -> None:
    """Keep modules that in training write into their buffers, whatever they return, from doing so."""
    for module in shadow.modules():
        if isinstance(module, _SpectralNorm):
            module.eval()


def put_into_form_(shadow: nn.Module, training: Mapping[str, bool]) -> None:
    """Put the copy of a model that was traced before into the form that the model had then, by path of the modules."""
    for path, module in shadow.named_modules():
        module.training = training.get(path, module.training)
    _without_writes_(shadow)


def known_hooks(model: nn.Module, outside: set[str]) -> dict[int, OrderedDict[int, Any]]:
    """Return dictionaries of hooks without those that a trace would refuse, by the identity of the whole ones.

    Args:
        model: the model, which is not changed.
        outside: paths of the modules left outside, whose hooks stay.
    """
    result = {}
    for path, module in model.named_modules():
        if any(path == one or path.startswith(f"{one}.") for one in outside):
            continue
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            kept = [(key, hook) for key, hook in hooks.items() if not may_change_results(hook)]
            result[id(hooks)] = OrderedDict(kept)
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            result[id(hooks)] = OrderedDict()
    return result


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after the forward pass of a module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def may_change_results(hook: Callable[..., Any]) -> bool:
    """Return whether a hook may change what its module computes, in a way that a trace does not see."""
    only_looks = getattr(hook, "only_looks", False) or checks_inputs(hook)
    return not only_looks and not isinstance(hook, WeightNorm)


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return tensors that are attributes of modules and neither parameters nor buffers, with their names."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
                continue
            if value.is_leaf and not value.requires_grad:
                yield f"{path}.{key}".lstrip("."), value


def made_by_hooks(model: nn.Module) -> list[Tensor]:
    """Return attributes that hooks compute from parameters before every call: pruning, weight normalization.

    They cannot be copied, and need not be: a call makes them anew.
    """
    own = vars(nn.Module()).keys() - {"_parameters", "_buffers"}  # torch's, of modules and hooks
    held: list[Any] = []
    for module in model.modules():
        held += [value for key, value in vars(module).items() if key not in own]
    return [t for t in pytree.tree_leaves(held) if isinstance(t, Tensor) and not t.is_leaf]


def _attributes_of(model: nn.Module) -> Iterator[Any]:
    """Return the values of all attributes of all modules."""
    for module in model.modules():
        yield from vars(module).values()


def _optimizers_of(model: nn.Module) -> dict[int, Any]:
    """Return optimizers that modules hold, by identity. No forward pass needs copies of them and of their states."""
    held = _attributes_of(model)
    return {id(value): value for value in held if isinstance(value, torch.optim.Optimizer)}


def _empty_hooks_of(model: nn.Module) -> dict[int, Any]:
    """Return new dictionaries for empty ones of hooks: deepcopy would copy eleven of them for every module."""
    held = _attributes_of(model)
    return {id(value): OrderedDict() for value in held if type(value) is OrderedDict and not value}


def copy_of(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """Copy a model deeply; attributes made by hooks are made again.

    Args:
        model: any module; it is not changed.
        memo: what stands for parts of it in the copy, by their identity.
    """
    made = {id(t): t.detach() for t in made_by_hooks(model)}
    special = made | _empty_hooks_of(model) | kept_in_copies(model)
    copied = copy.deepcopy(model, special | (memo or {}))
    remove_guards_(copied)
    return copied


def evaluation_form_of(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """Copy a model in evaluation form, without hooks on gradients, which belong to the user. See :func:`copy_of`."""
    copied = evaluated(copy_of(model, _optimizers_of(model) | (memo or {})))
    for module in copied.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return copied


def arguments_for(
    recorder: Recorder,
    example_input: Any,
    batch_dim: int | None,
    size: int,
    states: frozenset[int | str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments without data, with ``size`` examples, bound to leaves."""
    if not isinstance(example_input, (dict, tuple, list, Tensor, Arguments)):
        raise ValueError(
            f"example_input is a {type(example_input).__name__}; give a tensor, a tuple of arguments or a dict of them "
            "(a model that takes another structure: wrap it in a module that takes the tensors)"
        )
    args, kwargs = arguments_in(example_input)
    held = (args, kwargs) if isinstance(example_input, Arguments) else example_input
    leaves = pytree.tree_leaves(held, is_leaf=lambda part: isinstance(part, PackedSequence))
    for leaf in leaves:
        _check_leaf(leaf)
    first = next((t for t in leaves if isinstance(t, Tensor)), None)
    if first is None:
        raise ValueError(
            "example_input holds no tensor: give what the model is called with, not its shape"
        )
    if batch_dim is not None and batch_dim >= first.dim():
        raise ValueError(
            f"batch_dim={batch_dim}, but the first tensor of the example input has {first.dim()} dimensions"
        )
    places = [*range(len(args)), *kwargs]
    if not states.issubset(places):
        raise ValueError(
            f"states={sorted(states, key=str)} names no argument of the example input; its arguments are {places}"
        )

    def empty(tensor: Tensor) -> tuple[Tensor, int | None]:
        shape = list(tensor.shape)
        batch = batch_in(tensor, first, batch_dim)
        if batch is not None:
            shape[batch] = size
        return torch.empty(shape, dtype=tensor.dtype, device="meta"), batch

    def prepare(tensor: Tensor) -> Tensor:
        created, batch = empty(tensor)
        recorder.add_leaf(created, "input", batch=batch)
        if not_finite(recorder, tensor):
            recorder.not_finite[recorder.value(created).slot] = NotFinite("")
        return created

    def carried(tensor: Tensor) -> Tensor:
        return torch.zeros(empty(tensor)[0].shape, dtype=tensor.dtype)  # a zero fits every scale

    def argument(key: int | str, value: Any) -> Any:
        return pytree.tree_map_only(Tensor, carried if key in states else prepare, value)

    by_position = tuple(argument(i, value) for i, value in enumerate(args))
    return by_position, {key: argument(key, value) for key, value in kwargs.items()}


def _check_leaf(leaf: Any) -> None:
    """Refuse objects with tensors inside, which would be constants of the trace."""
    if isinstance(leaf, (Tensor, nn.Module, type)):
        return
    held = leaf if isinstance(leaf, PackedSequence) else getattr(leaf, "__dict__", {}).values()
    if any(isinstance(value, Tensor) for value in held):
        raise ValueError(
            f"example_input holds a {type(leaf).__name__}, whose tensors a trace does not see: wrap the model in a "
            "module that takes the tensors, and makes it of them"
        )


def with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Return the whole call of a copied module with its hooks, and remove the hooks from the module."""
    inner = object.__new__(type(module))  # copy.copy refuses parametrized modules
    inner.__dict__.update(module.__dict__)
    module._forward_pre_hooks = OrderedDict()
    module._forward_hooks = OrderedDict()
    return inner


@contextmanager
def observed(shadow: nn.Module, interpreter: Interpreter, outside: set[str]) -> Iterator[None]:
    """Let the recorder know which module is running, and run those left outside without a trace.

    The copy gets its own forward methods back at the end: those of here hold the module that they
    are in, which would keep the weights alive until garbage is collected.
    """
    recorder = interpreter.recorder
    modules = dict(shadow.named_modules())
    own = {name: module.__dict__.get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        forward = with_hooks(module) if name in outside else module.forward

        def run_forward(
            *args: Any, _name: str = name, _forward: Callable[..., Any] = forward, **kwargs: Any
        ) -> Any:
            recorder.module_path.append(_name)
            try:
                if _name in outside and not interpreter.paused:
                    return interpreter.run_outside(_forward, args, kwargs)
                return _forward(*args, **kwargs)
            except (UntraceableError, WrongBatchDimension) as error:
                recorder.note_refusal(error)
                raise
            finally:
                recorder.module_path.pop()

        module.forward = run_forward
    try:
        yield
    finally:
        for name, module in modules.items():
            module.__dict__.pop("forward", None)
            if own[name] is not None:
                module.__dict__["forward"] = own[name]
