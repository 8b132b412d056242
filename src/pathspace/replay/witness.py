"""Follows a forward pass that the user makes, so that quantities on its data need no second one.

The pass is followed only where it is what a replay would run: float32 or float64 without autocast, all parameters of
the network in the graph, nothing drawn at random, no BatchNorm that mixes the examples and no layer of torch's whose
steps do not show. Everything else is left to
:func:`pathspace.replay.replay.replay`, which also says what is wrong if the pass is not the traced one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.network import Network
from pathspace.network.rules import RULED
from pathspace.network.trace.functions import METADATA, RANDOM, by_position, short_name, tensors_in
from pathspace.replay.arguments import examples_in
from pathspace.replay.follower import Follower
from pathspace.replay.matched import Summary
from pathspace.replay.replay import Replay
from pathspace.replay.taken_apart import OTHERS, is_fixed_batch_norm, normalization

# in training, or taken apart
_OTHERWISE = frozenset(["batch_norm", "instance_norm", "rrelu", "rrelu_", *OTHERS])
# a second pass runs them
_HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad"])
_TYPES = (torch.float32, torch.float64)


class Witness(TorchFunctionMode):
    """Looks on while a model runs; entered before the forward pass and left after it.

    Args:
        network: a traced network; its model is the one that runs.
        inputs: the tensors it is called with.
        summary: what is wanted of the values of a node.
    """

    def __init__(self, network: Network, inputs: list[Tensor], summary: Summary) -> None:
        super().__init__()
        self.network = network
        count = examples_in(network, inputs)
        self._follower: Follower | None = Follower(
            network, dict(network.parameters), count, False, inputs, summary
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._follower is None:
            return result
        name = short_name(func)
        if name in METADATA:
            return result
        if kwargs and name in RULED:
            args, kwargs = by_position(args, kwargs)
        tensors = tensors_in(args, kwargs)
        if self._follower.is_cut(name, tensors):
            self._attempt(lambda follower: follower.end_at_cut(name, tensors, result))
            return result
        if is_fixed_batch_norm(name, args, kwargs) and any(t.requires_grad for t in tensors):
            self._attempt(lambda follower: normalization(follower, name, func, args, kwargs, result))
            return result
        if name in _OTHERWISE or name in _HOOKS or _draws(name, args, kwargs):
            self._follower = None
            return result
        self._attempt(lambda follower: follower.note(name, func, args, kwargs, tensors, result))
        return result

    def _attempt(self, note: Callable[[Follower], Any]) -> None:
        """Note an operation, or give up."""
        assert self._follower is not None
        try:
            note(self._follower)
        except UnmatchedForwardError:
            self._follower = None

    def finish(self, result: Any) -> Replay | None:
        """What was seen, given what the model returned; None if the pass cannot stand for a replay."""
        follower, self._follower = self._follower, None
        if follower is None:
            return None
        try:
            follower.finish(self.network.returned(result))
        except UnmatchedForwardError:
            return None
        return Replay(
            follower.nodes, follower.uses, dict(self.network.parameters), follower.count, follower.views
        )


def can_witness(network: Network, inputs: list[Tensor], *, backwards: bool = True) -> bool:
    """Whether a call of the model may stand for a replay, as far as can be said before it.

    Args:
        network: a traced network.
        inputs: the tensors that its model is called with.
        backwards: whether gradients will be pulled back through the graph of the call.
    """
    parameters, traced = network.parameters.values(), network.call
    device = next(iter(parameters)).device.type
    if not inputs or traced.outside or traced.states:
        return False
    # the graph of the call leads through their statistics, which a replay holds
    if network.tape.normalizations:
        return False
    if torch.is_autocast_enabled(device) or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if torch.compiler.is_compiling():
        return False
    for t in inputs:
        if t.requires_grad or t.is_inference():
            return False
    for p in parameters:
        if not p.requires_grad or p.dtype not in _TYPES:
            return False
    # a second backward pass would run these hooks once more
    if backwards and any(m._backward_hooks or m._backward_pre_hooks for m in network.model.modules()):
        return False
    try:
        network.check_current()
    except RuntimeError:
        return False
    return True


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation takes part in training only, as dropout does, or draws random numbers."""
    if "dropout" not in name:
        return name in RANDOM
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training)
