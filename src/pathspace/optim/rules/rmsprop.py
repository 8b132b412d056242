"""RMSprop in one pass over its tensors, where torch's own takes five calls for each.

It is Adam without a mean of gradients and long after its start, for which torch has a kernel:

    v = alpha v + (1 - alpha) g^2;   p = p - eta g / (sqrt(v) + eps)

On an MLP of two million weights it brought a training step with PathRMSprop from 1.16 to 1.09 of
one with RMSprop.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, optim

from pathspace.optim.rules.few_passes import FewPasses
from pathspace.rescaling.optimizer_states import Group
from pathspace.torch_private import fused_adam_

_LONG_AFTER = torch.tensor(math.inf, device="cpu")  # steps, after which Adam corrects no bias


class RMSprop(FewPasses, optim.RMSprop):
    """``torch.optim.RMSprop``, its options and its state; signs of the gradients may be others after a step."""

    torch_only = (
        "momentum",
        "centered",
        "weight_decay",
        "foreach",
        "capturable",
        "differentiable",
    )

    def _is_plain(self, group: Group) -> bool:
        return group["alpha"] < 1 and super()._is_plain(group)

    def _take(self, group: Group) -> None:
        params: list[Tensor] = []
        gradients: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, params, gradients, squares, [], [], steps)
        if not params:
            return
        for count in steps:
            count += 1
        fused_adam_(
            params,
            gradients,
            gradients,  # their mean with beta1 = 0
            squares,
            [],
            [_LONG_AFTER] * len(params),
            amsgrad=False,
            lr=float(group["lr"]),
            beta1=0.0,
            beta2=group["alpha"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=group["maximize"],
        )
