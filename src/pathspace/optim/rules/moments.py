"""Adam's direction, from the moments of whatever gradient it is given.

Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; AMSGrad: Reddi, Kale and Kumar,
"On the Convergence of Adam and Beyond", 2018. Letters: g gradient, m and v its averages, t the
number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pathspace.rescaling.optimizer_states import State
from pathspace.torch_private import fused_adam_

_TENSORS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MOMENTS = ("step", *_TENSORS)
"""What Adam's rule keeps of a parameter."""


def cast_state(state: State, dtype: torch.dtype, names: Iterable[str]) -> None:
    """Convert tensors of a state to the type of the gradients, which changes when a model is converted."""
    for name in names:
        if name in state:
            state[name] = state[name].to(dtype)


def begin_moments(g: Tensor, state: State) -> None:
    """Moments of no gradient, in a state that has none."""
    if "exp_avg" not in state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(g)
        state["exp_avg_sq"] = torch.zeros_like(g)


def step_decayed_(p: Tensor, direction: Tensor, group: Mapping[str, Any]) -> None:
    """p = (1 - eta weight_decay) p - eta direction."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    p.add_(direction.to(p.dtype), alpha=-lr)


def adam_direction(
    g: Tensor, state: State, betas: tuple[float, float], eps: float, amsgrad: bool = False
) -> Tensor:
    """Take g into the moments and return the direction (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    Args:
        g: gradient; it is not kept.
        state: where the moments are kept: ``step``, ``exp_avg``, ``exp_avg_sq``,
            ``max_exp_avg_sq``.
        betas: decay rates of the two moments.
        eps: added to the root.
        amsgrad: use the largest v so far.

    Returns:
        A new tensor of g's shape.
    """
    begin_moments(g, state)
    cast_state(state, g.dtype, _TENSORS)
    m = state["exp_avg"]
    v = state["exp_avg_sq"]
    if amsgrad and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = v.clone()
    state["step"] += 1
    tensors = [g, m, v, *([state["max_exp_avg_sq"]] if amsgrad else [])]
    # the kernel reads memory in its order
    if all(t.is_cpu and t.is_contiguous() for t in tensors):
        return _direction_in_one_pass(g, state, betas, eps, amsgrad)
    beta1, beta2 = betas
    # m = beta1 m + (1 - beta1) g
    m.lerp_(g, 1 - beta1)
    # v = beta2 v + (1 - beta2) g^2
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if amsgrad:
        largest = state["max_exp_avg_sq"]
        v = torch.maximum(largest, v, out=largest)
    first = 1 - beta1 ** state["step"]
    second = 1 - beta2 ** state["step"]
    # the bias of m multiplies the denominator, which saves a pass over the tensor
    denominator = v.sqrt().mul_(first / math.sqrt(second)).add_(eps * first)
    return torch.div(m, denominator, out=denominator)


def _direction_in_one_pass(
    g: Tensor, state: State, betas: tuple[float, float], eps: float, amsgrad: bool
) -> Tensor:
    """Return the direction by torch's kernel of Adam, as the step from zero with the rate -1."""
    direction = torch.zeros_like(g)
    fused_adam_(
        [direction],
        [g],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if amsgrad else [],
        [torch.tensor(state["step"], dtype=torch.float32, device="cpu")],
        amsgrad=amsgrad,
        lr=-1.0,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return direction
