"""What may stand after the last layer: a softmax turns outputs into probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathspace.network.reasons import BOUNDED
from pathspace.network.recorder import Recorder
from pathspace.network.values import Value


def softmax(
    recorder: Recorder, name: str, func: Callable[..., Any], input: Tensor, *_: Any, **__: Any
) -> Tensor:
    """A softmax after the last layer turns outputs into probabilities; what enters it is the network's output."""
    del func
    value = recorder.value(input)
    if value.kind == "hidden":
        recorder.extra_outputs.append(value)
    elif value.kind == "parameter":
        recorder.refuse(name, BOUNDED)
    tensor = torch.empty(value.shape, dtype=input.dtype, device="meta")
    return recorder.bind(
        tensor, Value(value.slot, value.labels, "tail", name, value.batch, module=recorder.path)
    )


RULES: dict[str, Callable[..., Any]] = dict.fromkeys(("softmax", "log_softmax"), softmax)
