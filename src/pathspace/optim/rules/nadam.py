"""NAdam in half as many passes over its tensors as torch's own takes.

    m = beta1 m' + (1 - beta1) g;   v = beta2 v' + (1 - beta2) g^2
    p = p - eta (a g + b m) / (sqrt(v / (1 - beta2^t)) + eps)

where a and b are numbers that depend on the step t alone, and m' and v' are m and v before it. The
numerator is a mean of m' and g, times a number:

    a g + b m = (a + b) (c m' + (1 - c) g),   c = b beta1 / (a + b)

That is Adam's mean of gradients with c in the place of beta1, and torch has a kernel for Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from pathspace.optim.rules.few_passes import FewPasses
from pathspace.rescaling.optimizer_states import Group
from pathspace.torch_private import foreach_add_, foreach_lerp_, foreach_mul_, fused_adam_


class _Entry(NamedTuple):
    """A parameter with its gradient and what torch's NAdam keeps of it."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    mu_product: Tensor
    step: Tensor


class NAdam(FewPasses, optim.NAdam):
    """``torch.optim.NAdam``, its options and its state."""

    torch_only = ("weight_decay", "maximize", "foreach", "capturable", "differentiable")

    def _take(self, group: Group) -> None:
        columns: list[list[Tensor]] = [[] for _ in _Entry._fields]
        self._init_group(group, *columns)
        # parameters may have joined later, or have been without a gradient
        alike: dict[tuple[float, float], list[_Entry]] = {}
        for entry in map(_Entry, *columns):
            count = entry.step.item(), entry.mu_product.item()
            alike.setdefault(count, []).append(entry)
        for (steps, _), entries in alike.items():
            _step(entries, steps + 1, group)


def _step(entries: Sequence[_Entry], t: float, group: Mapping[str, Any]) -> None:
    """Take step t of some parameters."""
    beta1, beta2 = group["betas"]
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"]))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * group["momentum_decay"]))
    foreach_add_([entry.step for entry in entries], 1)
    foreach_mul_([entry.mu_product for entry in entries], mu)
    product = entries[0].mu_product.item()
    a = (1 - mu) / (1 - product)
    b = mu_next / (1 - product * mu_next)
    c = b * beta1 / (a + b)
    gradients = [entry.g for entry in entries]
    numerators = [entry.m.clone() for entry in entries]
    fused_adam_(
        [entry.p for entry in entries],
        gradients,
        numerators,  # over a + b
        [entry.v for entry in entries],
        [],
        [torch.tensor(t, dtype=torch.float32, device="cpu")] * len(entries),
        amsgrad=False,
        # the kernel divides by 1 - c^t, as Adam's first steps need it
        lr=float(group["lr"]) * (a + b) * (1 - c**t),
        beta1=c,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        maximize=False,
    )
    foreach_lerp_([entry.m for entry in entries], gradients, 1 - beta1)
