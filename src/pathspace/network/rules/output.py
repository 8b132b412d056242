"""What may stand after the last parameter: a softmax, a sigmoid, a norm, a product of two outputs, a loss.

Whatever it does to scales, what enters it counts as an output of the network and keeps the scale 1. A parameter that
comes after it is refused, for the reason for which the function has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError
from pathspace.network.trace.functions import short_name
from pathspace.network.trace.reasons import BOUNDED
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import Value


def softmax(
    recorder: Recorder, name: str, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A softmax after the last layer turns outputs into probabilities; what enters it is the network's output."""
    value = recorder.value(input)
    if value.kind == "parameter":
        recorder.refuse(name, BOUNDED)
    refusal = UntraceableError(name, recorder.path, BOUNDED)
    return ending(recorder, func, (input, *args), kwargs, [value], refusal)


def ending(
    recorder: Recorder,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    values: Sequence[Value],
    refusal: Exception | None,
) -> Any:
    """The result of a function of outputs: it may be returned, and used by functions without parameters.

    Args:
        recorder: what is known.
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        values: what is known of the tensors among them.
        refusal: the error to raise if a parameter comes after it.
    """
    recorder.extra_outputs += [v for v in values if v.kind == "hidden"]
    batch = next((v.batch for v in values if v.batch is not None), None)
    differentiable = any(v.kind in ("hidden", "tail") for v in values)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
    try:
        result = func(*args, **kwargs)
    except NotImplementedError:  # nothing can be copied from where there is no data
        if short_name(func) not in ("to", "cpu", "cuda"):
            raise
        result = torch.empty_like(args[0])

    own_name = short_name(func)

    def bind(tensor: Tensor) -> Tensor:
        labels = torch.tensor(FIXED).expand(tensor.shape)
        kind = "tail" if differentiable and tensor.is_floating_point() else "indices"
        own = batch if batch is not None and batch < tensor.dim() else None
        name, module = getattr(refusal, "operation", own_name), getattr(refusal, "module", recorder.path)
        return recorder.bind(
            tensor, Value(recorder.new_slot(), labels, kind, name, own, module=module, refusal=refusal)
        )

    return pytree.tree_map_only(Tensor, bind, result)


RULES: dict[str, Callable[..., Any]] = dict.fromkeys(("softmax", "log_softmax"), softmax)
