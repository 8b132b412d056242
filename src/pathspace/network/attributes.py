"""Plain attributes of modules that a forward pass may read, and the functions that it runs.

A trace holds for the stride, the slope or the flag that it met. Which attributes a forward pass
reads is told from its code: the names that occur in ``forward``, and in the methods and functions
that it calls. Strings there count too, for ``getattr``. These may be too many names, but the code
writes out all that it reads.
"""

from __future__ import annotations

import ast
import copy
import dis
import enum
import functools
import inspect
import linecache
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

Attributes = Mapping[tuple[str, str], Any]
"""(Path of a module, name of its attribute) -> value."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    slice,
    enum.Enum,
    torch.dtype,
    torch.device,
)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_NEVER = (torch.dtype, torch.device)
"""Values that no scale depends on."""
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_BY_NAME = {"setattr", "__setattr__", "__dict__"}
"""With these, code assigns attributes by a string."""
_STORES = {"STORE_SUBSCR", "DELETE_SUBSCR"}
_FILLS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
"""Methods by which code writes into a container."""
_WRAPPING_LIBRARIES = {"torch", "accelerate"}
"""Their wrappers of a forward pass (autocast, types of outputs) leave scales alone."""
_LIBRARIES = {"torch", *sys.stdlib_module_names}
"""Libraries whose functions read no attributes of a model's own."""
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", "momentum"}
"""Torch's own attributes of modules; the momentum of running statistics has no part in what training computes."""


def watched(model: nn.Module, outside: Iterable[str]) -> dict[tuple[str, str], Any]:
    """Return the plain attributes that the forward pass of a model may read.

    Dropout probabilities are left out, because all paths count, dropped or not. Types and devices
    are left out, and containers into which the forward pass writes.

    Args:
        model: any module.
        outside: paths of modules whose attributes do not matter.

    Returns:
        Copies of the values, by the path of the module and the name of the attribute.
    """
    modules = dict(_inside(model, outside))
    read_names: set[str] = set()
    # names that some forward reads without filling the container that has the name
    read_only_names: set[str] = set()
    for module in modules.values():
        read = _read_by(type(module), forward_of(module))
        read_names |= read.names
        read_only_names |= read.names - read.filled
    result = {}
    for path, module in modules.items():
        for key, value in vars(module).items():
            names = read_only_names if isinstance(value, _CONTAINERS) else read_names
            if key not in names or key in _OF_TORCH:
                continue
            if _matters(type(module), key, value) and is_plain(value):
                result[path, key] = _copied(value)
    return result


def of_classes(model: nn.Module, outside: Iterable[str]) -> dict[tuple[str, str], tuple[type, Any]]:
    """Return what the forward pass may read of the classes of modules: methods, and plain attributes.

    Torch's own classes are left out.

    Args:
        model: any module.
        outside: paths of modules that do not matter.

    Returns:
        The class that defines each, and the value that stands there, by the path of the module and
        the name.
    """
    result = {}
    for path, module in _inside(model, outside):
        read = _read_by(type(module), forward_of(module))
        for key in read.names - _OF_TORCH - vars(module).keys():
            owner = _owner_of(type(module), key)
            if owner is None or not _matters(type(module), key, vars(owner)[key]):
                continue
            value = vars(owner)[key]
            if is_plain(value) or isinstance(value, (staticmethod, classmethod, property)):
                result[path, key] = owner, value
    return result


def _matters(kind: type, key: str, value: Any) -> bool:
    """Return whether scales may depend on an attribute; they depend on no type, device or dropout probability."""
    if isinstance(value, _NEVER):
        return False
    if key in ("p", "prob") and _drops(kind):
        return type(value) not in (float, int)
    return "drop" not in key or type(value) is not float


def _drops(kind: type) -> bool:
    """Return whether a class of modules is one of dropout or stochastic depth."""
    names = (base.__name__ for base in kind.__mro__)
    return issubclass(kind, _DropoutNd) or any(
        "Drop" in name or "StochasticDepth" in name for name in names
    )


def _owner_of(kind: type, key: str) -> type | None:
    """Return the class, of a class and its bases, that defines a name; None for torch's classes and Python's."""
    found = next((base for base in kind.__mro__ if key in vars(base)), None)
    if found is None or _library_of(found) in ("torch", "builtins"):
        return None
    return found


def _library_of(defined: FunctionType | type) -> str:
    """Return the library that defines a function or class; empty for generated code, which has no module."""
    return (defined.__module__ or "").partition(".")[0]


def unchanged(before: Attributes, after: Attributes) -> set[tuple[str, str]]:
    """Return the places of attributes that a call left as they were; those that it changed are not watched."""
    return {
        place for place, value in before.items() if place in after and _same(after[place], value)
    }


def present(model: nn.Module, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Return the attributes at some places, as they are now."""
    modules = dict(model.named_modules())
    held = ((place, vars(modules[place[0]])) for place in places if place[0] in modules)
    return {place: _copied(values[place[1]]) for place, values in held if place[1] in values}


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)


def forwards(model: nn.Module, outside: Iterable[str]) -> dict[str, Any]:
    """Return the function that each module runs as its ``forward``, by path."""
    return {path: forward_of(module) for path, module in _inside(model, outside)}


def forward_of(module: nn.Module) -> Any:
    """Return the function behind ``module.forward``, an attribute of the module or of its class."""
    found = vars(module).get("forward", type(module).forward)
    return getattr(found, "__func__", found)


def runs(module: nn.Module, function: Any) -> bool:
    """Return whether a module's forward is a function, or wraps it (autocast, ``torch.compile``)."""
    return wraps(forward_of(module), function)


def wraps(found: Any, function: Any) -> bool:
    """Return whether something is a function, or a library's wrapper of it; of other values, whether they are equal."""
    if not callable(found):
        return _same(found, function)
    found = getattr(found, "__func__", found)
    for _ in range(10):
        if found is function or found is None:
            return found is function
        inner = getattr(found, "_torchdynamo_orig_callable", None)
        if inner is None and _is_of_library(found):
            inner = getattr(found, "__wrapped__", None)
        found = getattr(inner, "__func__", inner)
    return False


def _is_of_library(wrapper: Any) -> bool:
    """Return whether a wrapper comes from a library whose wrappers leave what a forward pass computes."""
    module = getattr(wrapper, "__globals__", {}).get("__name__") or type(wrapper).__module__
    return module.partition(".")[0] in _WRAPPING_LIBRARIES


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string or a function, or a container of such."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(is_plain, value))
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def entries(value: Any) -> int:
    """Return how many values a container holds, those of containers in it included; 1 for anything else."""
    if isinstance(value, dict):
        return sum(map(entries, value.values()))
    return sum(map(entries, value)) if isinstance(value, _CONTAINERS) else 1


def _inside(model: nn.Module, outside: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    left = tuple(outside)
    for path, module in model.named_modules():
        if not any(path == one or path.startswith(f"{one}.") for one in left):
            yield path, module


def _copied(value: Any) -> Any:
    """Return a value whose containers are new ones, which nobody changes."""
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, one in value.items():
            result[key] = _copied(one)
        return result
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = map(_copied, value)
        return result
    if type(value) is tuple:
        parts = tuple(map(_copied, value))
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    return copy.copy(value) if isinstance(value, set) else value


@dataclass(frozen=True)
class _Read:
    """Attributes of modules that code reads.

    Attributes:
        names: names in it that it does not assign.
        filled: attributes that are containers into which it writes.
    """

    names: frozenset[str]
    filled: frozenset[str]


@functools.lru_cache(maxsize=1000)
def _read_by(kind: type, forward: Any) -> _Read:
    """Return what the code of a class of modules reads: of ``forward`` and what it calls.

    What a forward pass assigns itself, such as a counter or the length of a cache, may change from
    call to call.
    """
    names = set[str]()
    assigned = set[str]()
    filled = set[str]()
    left = [forward, *_methods(kind, "forward")]
    seen = set[CodeType]()
    while left:
        function = left.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        found = _names_in(code)
        names |= found
        assigned |= _assigned_in(code)
        filled |= _filled_in(code)
        for name in found:
            left += _methods(kind, name)
            called = getattr(function, "__globals__", {}).get(name)
            called = getattr(called, "__wrapped__", called)
            if isinstance(called, FunctionType) and _library_of(called) not in _LIBRARIES:
                left.append(called)
    return _Read(frozenset(names - assigned), frozenset(filled))


def _methods(kind: type, name: str) -> list[Callable[..., Any]]:
    """Return the functions behind a name in a class and its bases; of a property, its getter."""
    found = [
        vars(base)[name]
        for base in kind.__mro__[:-1]
        if base is not nn.Module and name in vars(base)
    ]
    plain = [getattr(one, "fget", None) or getattr(one, "func", None) or one for one in found]
    return [getattr(one, "__wrapped__", None) or getattr(one, "__func__", one) for one in plain]


def _names_in(code: CodeType) -> set[str]:
    """Return the names and strings in code, and in the functions that it defines."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, CodeType):
            found |= _names_in(constant)
    return found


def _assigned_in(code: CodeType) -> set[str]:
    """Return the names of attributes that code assigns or deletes, and functions that it defines."""
    found = {
        i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")
    }
    if _BY_NAME & {*code.co_names}:
        found |= {constant for constant in code.co_consts if isinstance(constant, str)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _assigned_in(constant)
    return found


@functools.lru_cache(maxsize=1000)
def _filled_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that hold containers into which code writes, as far as its source says so."""
    stores = any(i.opname in _STORES for i in dis.get_instructions(code))
    if not stores and not _FILLS & _names_in(code):
        return frozenset()
    # not inspect.getsource, which looks through all modules that were ever imported
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, tokenize.TokenError):  # a lambda inside an expression
        return frozenset()
    nodes = list(ast.walk(tree))
    written = [container for container in map(_written_by, nodes) if container is not None]
    written += _named_again(nodes, written)
    return frozenset().union(*map(_attributes_in, written))


def _named_again(nodes: Sequence[ast.AST], written: Sequence[ast.AST]) -> list[ast.expr]:
    """Return the containers that have another name, into which code writes."""
    names = {node.id for node in written if isinstance(node, ast.Name)}
    containers = []
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not targets.isdisjoint(names):
            containers.append(node.value)
    return containers


def _written_by(node: ast.AST) -> ast.expr | None:
    """Return the container into which a piece of code writes."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return _container_of(node.value)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _FILLS
    ):
        return _container_of(node.func.value)
    return None


def _container_of(node: ast.expr) -> ast.expr:
    """Return the outermost container that an expression takes entries of: ``a.b`` of ``a.b[0][1]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _attributes_in(node: ast.expr) -> set[str]:
    """Return the attribute that a container is, or is an entry of."""
    node = _container_of(node)
    return {node.attr} if isinstance(node, ast.Attribute) else set()
