"""Exported programs (``torch.export``) as modules that can be traced.

``ExportedProgram.module()`` is a module of one graph of ATen operations. Hooks and a module of
guards check the shapes of its inputs. A copy that is traced, or that runs on other numbers of
examples, goes without these checks.

All private names of ``torch.export`` are in this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec

from pathspace.network.errors import UntraceableError

Model = TypeVar("Model", bound=nn.Module)
_MODULE = "torch.export._unlift"


def module_of(model: Any) -> Any:
    """Return the module of an exported program, with the program's own parameters; anything else as it is."""
    exported = sys.modules.get("torch.export")
    if exported is not None and isinstance(model, exported.ExportedProgram):
        return model.module()
    return model


def is_exported(model: nn.Module) -> TypeGuard[torch.fx.GraphModule]:
    """Return whether a module is one of an exported program."""
    unlift = _unlift()
    return unlift is not None and isinstance(model, unlift._StatefulGraphModule)


def checks_inputs(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one by which an exported program checks its inputs."""
    return getattr(hook, "__module__", None) == _MODULE


def remove_guards_(model: nn.Module) -> None:
    """Keep a copy of an exported program from refusing inputs of other shapes than it was exported with."""
    unlift = _unlift()
    if unlift is None:
        return
    for module in model.modules():
        if isinstance(module, unlift.GuardsFn):
            module.forward = _unchecked


def kept_in_copies(model: nn.Module) -> dict[int, Any]:
    """Return what a copy of a model holds in place of parts of exported programs, by the identity of the parts.

    A copy has graphs of its own. The structures of arguments and results never change, and it
    shares them: torch warns when they are copied.
    """
    kept: dict[int, Any] = {}
    for module in model.modules():
        if not is_exported(module):
            continue
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph.set_codegen(module.graph._codegen)
        kept[id(module.graph)] = graph
        specs = (v for v in vars(module).values() if isinstance(v, TreeSpec))
        kept.update((id(spec), spec) for spec in specs)
    return kept


def expect_evaluation_form(model: nn.Module) -> None:
    """Refuse an exported program, which has one form, if that is the one for training.

    Raises:
        UntraceableError: it is.
    """
    operation = _trains(model) if is_exported(model) else None
    if operation is not None:
        raise UntraceableError(
            operation,
            "",
            "quantities on data are those of the evaluation form, and this program was exported in training form",
            "Export model.eval()",
        )


def evaluated(model: Model) -> Model:
    """Put a copy of a model into evaluation form, and return it.

    Raises:
        UntraceableError: see :func:`expect_evaluation_form`.
    """
    if not is_exported(model):
        return model.eval()
    expect_evaluation_form(model)
    for module in model.modules():
        module.training = False
    return model


def _trains(model: torch.fx.GraphModule) -> str | None:
    """Return the first operation that an exported program runs in training form; None if there is none."""
    for node in model.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        packet = node.target.overloadpacket
        place = _TRAINING.get(packet)
        if place is not None and node.args[place : place + 1] == (True,):
            return str(packet)
    return None


def _unchecked(*args: Any) -> None:
    """Check nothing."""


def _unlift() -> ModuleType | None:
    """Return torch's module of exported modules, if anything was exported or loaded in this process."""
    return sys.modules.get(_MODULE)


# the argument that says whether an operation is in training form
_TRAINING = {
    torch.ops.aten.batch_norm: 5,
    torch.ops.aten.dropout: 2,
    torch.ops.aten.feature_dropout: 2,
    torch.ops.aten.alpha_dropout: 2,
    torch.ops.aten.rrelu: 3,
}
