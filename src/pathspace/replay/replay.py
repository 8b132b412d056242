"""Runs a traced model once more, on real data, and notes where its nodes and its parameters' edges are.

What runs is a copy of the model in its evaluation form (no dropout, BatchNorm with its running statistics) whose
parameters share their memory with the model's, unless others are given. It is followed along the traced forward pass
(see ``follower``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pathspace.network.eager import uncompiled
from pathspace.network.network import Network, current_values
from pathspace.network.trace.shadow import evaluation_form_of, with_hooks
from pathspace.replay.arguments import arguments_of, misfit
from pathspace.replay.follower import Follower
from pathspace.replay.observed import Key, Node, Use
from pathspace.squared.precision import AtLeast, widened


@dataclass
class Replay:
    """A forward pass on data.

    Attributes:
        nodes: the network's nodes.
        uses: where parameters are used.
        leaves: the parameters that ran, by name; they share the model's memory.
        count: the number of examples n.
        views: ids of tensors that are rearranged parameters.
    """

    nodes: dict[Key, Node]
    uses: list[Use]
    leaves: dict[str, Tensor]
    count: int
    views: set[int]


def replay(
    network: Network,
    inputs: Any,
    *,
    differentiable: bool = False,
    wide: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> Replay:
    """Run the traced model on a batch.

    Args:
        network: a traced network.
        inputs: what the model is called with: a tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments, or :class:`Arguments`; of the traced shapes, but for the number of examples.
        differentiable: nodes keep their part of the graph, which leads to the model's own parameters.
        wide: run in float64.
        parameters: values to run with instead of the model's own, by name.

    Returns:
        What was found.

    Raises:
        UnmatchedForwardError: the forward pass is not the traced one, or cannot be followed on data.
        ValueError: the inputs are of another form than the example that the network was traced with.
    """
    with evaluation(network, inputs, differentiable=differentiable, wide=wide, parameters=parameters) as form:
        given = pytree.tree_leaves((form.args, form.kwargs))
        mode = Follower(network, form.leaves, form.count, differentiable, given)
        for name in mode.outside:
            module = form.model.get_submodule(name)
            module.forward = partial(mode.run_outside, with_hooks(module))
        with mode:
            returned = network.returned(form.model(*form.args, **form.kwargs))
        mode.finish(returned)
    return Replay(mode.nodes, mode.uses, form.leaves, form.count, mode.views)


@dataclass
class Evaluation:
    """A copy of a model that is ready to run on a batch, in its evaluation form.

    Attributes:
        model: the copy.
        args: what it is called with, copied.
        kwargs: likewise.
        leaves: its parameters, by name; they share the model's memory.
        count: the number of examples n.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: dict[str, Tensor]
    count: int


@contextmanager
def evaluation(
    network: Network,
    inputs: Any,
    *,
    differentiable: bool = False,
    wide: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> Iterator[Evaluation]:
    """The model in evaluation form, while it runs on a batch; arguments and errors are those of :func:`replay`."""
    with torch.inference_mode(False), torch.enable_grad():
        current_values(network)
        cast = doubled if wide else widened
        args, kwargs, count = arguments_of(network, inputs, cast)
        shadow, leaves = _shadow(network, differentiable, cast, parameters)
        devices = sorted({p.device.index for p in leaves.values() if p.device.type == "cuda"})
        # what torch.compile wraps runs as plain Python
        compiled = any(hasattr(module, "_orig_mod") for module in shadow.modules())
        with (
            torch.random.fork_rng(devices=devices),  # the model may draw numbers of its own
            uncompiled() if compiled else nullcontext(),
            _in_type(network, leaves),
        ):
            try:
                yield Evaluation(shadow, args, kwargs, leaves, count)
            except (RuntimeError, TypeError, IndexError) as error:
                if why := misfit(network, inputs):
                    raise ValueError(f"{why} ({error})") from error
                raise


def doubled(tensor: Tensor) -> Tensor:
    """A tensor in float64, if it holds numbers that can be."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _shadow(
    network: Network,
    differentiable: bool,
    cast: Callable[[Tensor], Tensor],
    values: Mapping[str, Tensor] | None,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the model in evaluation form, on parameters that share the model's memory, and those by name."""
    leaves: dict[str, Tensor] = {}
    memo: dict[int, Any] = {}
    outside = {id(p) for name in network.call.outside for p in network.model.get_submodule(name).parameters()}
    names = network.names_by_id
    for parameter in network.model.parameters():
        inside = id(parameter) in names
        value = parameter if values is None or not inside else values[names[id(parameter)]]
        p = cast(value)  # in the graph of a parameter of half precision
        if not (differentiable and inside and parameter.requires_grad and value is parameter):
            p = nn.Parameter(p.detach(), requires_grad=id(parameter) not in outside)
        memo[id(parameter)] = p
        if inside:
            leaves[names[id(parameter)]] = p
    for buffer in network.model.buffers():
        memo[id(buffer)] = cast(buffer.detach()).clone()
    shadow = evaluation_form_of(network.model, memo)
    for path in network.program.by_batch:
        shadow.get_submodule(path).training = True
    return shadow, leaves


def _in_type(network: Network, leaves: dict[str, Tensor]) -> AbstractContextManager[Any]:
    """Casts and constants of the model fit the copy, if it is in a wider type than the model."""
    widest = max((p.dtype for p in leaves.values()), key=lambda dtype: torch.finfo(dtype).bits)
    as_traced = all(p.dtype == network.parameters[n].dtype for n, p in leaves.items())
    return nullcontext() if as_traced else AtLeast(widest)
