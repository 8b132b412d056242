"""From a model and an example input to a :class:`Network`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError, WrongBatchDimension
from pathspace.network.network import Network, NodeLabels
from pathspace.network.recorder import Recorder
from pathspace.network.rules import RULES
from pathspace.network.scales import FIXED, WILD, Scales
from pathspace.network.tape import Tape
from pathspace.network.units import EdgeLabels
from pathspace.network.values import Value


def trace(
    model: nn.Module,
    example_input: Any,
    *,
    outside: Iterable[nn.Module | str] = (),
    batch_dim: int | str | None = "auto",
    output: Callable[[Any], Any] | None = None,
) -> Network:
    """Trace a model into a graph of unit classes.

    The model runs once, without data, on a copy; neither it nor its gradients, buffers or random state change.

    Args:
        model: any module whose operations are positively homogeneous, linear, or only move values. ReLU, LeakyReLU,
            PReLU, linear and convolutional layers, pooling, residual sums, BatchNorm, embeddings and ReLU
            recurrences are known, in modules and in functional form.
        example_input: what the model is called with: a tensor, a tuple or list of positional arguments, or a dict
            of keyword arguments. Only shapes and types are read.
        outside: modules of the model, or their paths, to leave to the plain rule of an optimizer. What enters them
            counts as an output of the network, what leaves them as an input.
        batch_dim: the dimension of the inputs that holds the batch; None for inputs without one; ``"auto"`` finds it.
        output: picks the outputs from what the model returns. By default all returned tensors are outputs but
            the last states of recurrent layers.

    Returns:
        The network.

    Raises:
        UntraceableError: an operation has no place in path geometry; the message names it, its module and the reason.
        ValueError: a name in ``outside`` is no module of the model, or a parameter has not been initialised.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> ps.trace(model, torch.zeros(1, 4))
        Network(58 weights in 4 parameters, 8 unit classes)
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    names = _outside_names(model, outside)
    _check_model(model, names)
    candidates = (0, 1, None) if batch_dim == "auto" else (batch_dim,)
    problem: WrongBatchDimension | None = None
    for candidate in candidates:
        try:
            return _trace_once(model, example_input, names, candidate, output)
        except WrongBatchDimension as error:
            problem = problem or error
    raise UntraceableError(
        "batch",
        "",
        f"no dimension of the example input can be the batch (tried {candidates}): {problem} uses it otherwise",
        "Say which one holds the batch with batch_dim=, or batch_dim=None if the input is a single example",
    )


def _trace_once(
    model: nn.Module,
    example_input: Any,
    outside: set[str],
    batch_dim: Any,
    output: Callable[[Any], Any] | None,
) -> Network:
    recorder = Recorder(RULES)
    shadow, parameters = _shadow(model, recorder)
    args, kwargs = _arguments(recorder, example_input, batch_dim)
    with _paths(shadow, recorder, outside), torch.no_grad(), recorder:
        result = shadow(*args, **kwargs)
        if output is not None:
            result = output(result)
    outputs = _outputs(recorder, result)
    for value in outputs:
        recorder.scales.unify(value.labels, torch.where(value.labels == WILD, WILD, FIXED))
    return _network(model, recorder, parameters, outputs)


def _outside_names(model: nn.Module, outside: Iterable[nn.Module | str]) -> set[str]:
    if isinstance(outside, (str, nn.Module)):
        outside = [outside]
    by_module = {module: name for name, module in model.named_modules()}
    names = set()
    for item in outside:
        name = item if isinstance(item, str) else by_module.get(item)
        if name is None or name not in by_module.values():
            known = ", ".join(f"'{n}'" for n in list(by_module.values())[1:9])
            raise ValueError(f"outside={item!r} is no module of the model; its modules are {known}, ...")
        names.add(name)
    return names


def _check_model(model: nn.Module, outside: set[str]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' has no shape yet: call the model once before tracing it")
    for name, module in model.named_modules():
        if any(name == o or name.startswith(o + ".") for o in outside):
            continue
        if module._forward_hooks or module._forward_pre_hooks:
            raise UntraceableError(
                "forward hook",
                name,
                "a hook can change what the module computes, and tracing does not see it",
                "Remove the hook before tracing and register it again afterwards",
            )


def _shadow(model: nn.Module, recorder: Recorder) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy of the model without data, its parameters and floating-point buffers bound to leaves."""
    parameters = dict(model.named_parameters())
    memo: dict[int, Any] = {}
    leaves: list[tuple[Tensor, str, str, Tensor]] = []
    for name, parameter in parameters.items():
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        memo[id(parameter)] = empty
        leaves.append((empty, "parameter", name, parameter.detach()))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
            leaves.append((memo[id(buffer)], "buffer", name, buffer))
        else:
            memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    shadow = copy.deepcopy(model, memo)
    for tensor, kind, name, data in leaves:
        recorder.numeric[name] = data
        recorder.add_leaf(tensor, kind, name)
    return shadow, parameters


def _arguments(
    recorder: Recorder, example_input: Any, batch_dim: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def prepare(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        batch = batch_dim if batch_dim is not None and batch_dim < len(shape) else None
        if batch is not None:
            shape[batch] = 1
        empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return recorder.add_leaf(empty, "input", batch=batch)

    if isinstance(example_input, dict):
        return (), {k: pytree.tree_map_only(Tensor, prepare, v) for k, v in example_input.items()}
    if isinstance(example_input, (tuple, list)):
        return tuple(pytree.tree_map_only(Tensor, prepare, v) for v in example_input), {}
    if not isinstance(example_input, Tensor):
        raise ValueError(
            f"example_input is a {type(example_input).__name__}; give a tensor, a tuple of arguments or a dict of them"
        )
    return (prepare(example_input),), {}


@contextmanager
def _paths(shadow: nn.Module, recorder: Recorder, outside: set[str]) -> Iterator[None]:
    """Let the recorder know which module is running, and run those left outside without a trace."""
    for name, module in shadow.named_modules():
        forward = module.forward

        def run(*args: Any, _name: str = name, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            recorder.module_path.append(_name)
            try:
                if _name in outside and not recorder.paused:
                    return recorder.run_outside(_forward, args, kwargs)
                return _forward(*args, **kwargs)
            finally:
                recorder.module_path.pop()

        module.forward = run
    yield


def _outputs(recorder: Recorder, result: Any) -> list[Value]:
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    values = []
    for tensor in leaves:
        value = recorder.known(tensor)
        if value is None and tensor.is_meta:
            raise UntraceableError(
                "output", "", "a returned tensor was made by code that tracing does not see"
            )
        if value is not None and value.kind in ("hidden", "tail"):
            values.append(value)
    chosen = [v for v in values if not v.state] or values
    chosen = [v for v in chosen if v.kind == "hidden"] + recorder.extra_outputs
    if not chosen:
        raise UntraceableError("output", "", "nothing that the model returns depends on its parameters")
    return list({v.slot: v for v in chosen}.values())


def _network(
    model: nn.Module, recorder: Recorder, parameters: dict[str, nn.Parameter], outputs: Sequence[Value]
) -> Network:
    scales = recorder.scales
    tape = Tape.of(recorder.leaves, recorder.instructions, [v.slot for v in outputs])
    used = {leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    inside = {name: p for name, p in parameters.items() if name in recorder.uses.of and name in used}
    for name, uses in recorder.uses.of.items():
        if name in inside:
            continue
        for labels in (labels for use in uses for labels in (use.target, use.source)):
            # on no path to an output: the plain rule trains it, so the units at its ends keep their scale
            scales.unify(labels, torch.zeros_like(labels))
    resolved = {name: _edge_labels(recorder, name, p.shape) for name, p in inside.items()}
    parts = [t.abs().flatten() for pair in resolved.values() for t in pair]
    roots = torch.cat(parts).unique() if parts else torch.zeros(0, dtype=torch.long)
    roots = roots[roots > WILD]
    number = torch.zeros(int(roots.max()) + 1 if roots.numel() else 2, dtype=torch.long)
    number[roots] = torch.arange(1, roots.numel() + 1)

    def renumber(labels: Tensor) -> Tensor:
        labels = scales.resolve(labels)
        labels = torch.where(labels.abs() < len(number), labels, FIXED)
        return number[labels.abs()] * labels.sign()

    live = {slot for instruction in tape.instructions for slot in instruction.outputs}
    edges = {
        name: EdgeLabels(renumber(t), renumber(s), any(use.bias for use in recorder.uses.of[name]))
        for name, (t, s) in resolved.items()
    }
    names = tuple(f"{where}[{i}]" for where, i in (scales.origin[r] for r in roots.tolist()))
    return Network(
        model=model,
        parameters=MappingProxyType(inside),
        outside=tuple(name for name in parameters if name not in inside),
        edges=MappingProxyType(edges),
        num_classes=len(names),
        class_names=names,
        tape=tape,
        nodes=_nodes(recorder, renumber, live, len(names)),
    )


def _edge_labels(recorder: Recorder, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Target and source labels of a parameter, compact where all its uses are of the parameter as it is."""
    scales: Scales = recorder.scales
    uses = recorder.uses.of[name]
    if len(uses) == 1 and uses[0].index.shape == shape:
        index = uses[0].index
        if bool((index.flatten() == torch.arange(index.numel())).all()):
            return scales.resolve(uses[0].target), scales.resolve(uses[0].source)
    labels = []
    for end in ("target", "source"):
        flat = torch.full((shape.numel(),), WILD)
        for use in uses:
            flat[use.index.reshape(-1)] = (
                scales.resolve(getattr(use, end)).expand(use.index.shape).reshape(-1)
            )
        labels.append(flat.reshape(shape))
    return labels[0], labels[1]


def _nodes(
    recorder: Recorder, renumber: Callable[[Tensor], Tensor], live: set[int], num_classes: int
) -> tuple[NodeLabels, ...]:
    """Values of units after their ReLU; for classes without one, the values of linear maps."""
    nodes: dict[int, NodeLabels] = {}
    covered = torch.zeros(num_classes + 1, dtype=torch.bool)
    for values in (recorder.unit_values, recorder.linear_values):
        seen = covered.clone()
        for value in values:
            if value.slot in live and value.slot not in nodes:
                labels = renumber(value.labels)
                missing = (labels != 0) & ~seen[labels.abs()]
                if bool(missing.any()):
                    nodes[value.slot] = NodeLabels(value.slot, torch.where(missing, labels, 0))
                    covered[labels.abs().unique()] = True
    return tuple(nodes.values())
