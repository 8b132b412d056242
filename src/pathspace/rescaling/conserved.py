"""Quantities that gradient flow conserves because the loss does not change under rescaling.

Rescaling class c by s multiplies a weight w_e by s^k, where k = k_ce is 1 for what enters a unit of
the class and -1 for what leaves it. The loss is the same for every s, so its slope along log s is
zero, sum_e g_e k_ce w_e = 0. Along gradient flow, dw/dt = -g, this says that

    C_c = sum_e k_ce w_e^2

stands still: for a unit of a perceptron, the squared weights into it and its bias, minus those out
of it (Du, Hu, Lee, "Algorithmic Regularization in Learning Deep Homogeneous Models: Layers are
Automatically Balanced", 2018).

Letters: c unit class, e element of a parameter, w weight, g gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values


def conserved(network: Network, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Compute what gradient flow conserves: incoming minus outgoing squared weights of every unit class.

    It holds for infinitely small steps of plain gradient descent, without weight decay. How far the
    numbers drift tells how far a training is from that: a step of SGD moves them by lr^2 times what
    the formula gives of the gradient, momentum and decay by more, and rules such as Adam at once.
    Rescaling changes them.

    Args:
        network: a traced network.
        parameters: values to use instead of the model's own, by name.

    Returns:
        C_c by class, float64, shape ``[num_classes]``; names are ``network.class_names``.

    Raises:
        KeyError: ``parameters`` lacks a parameter of the network.
        ValueError: one of ``parameters`` has another shape than the network's.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> first, last = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(first.weight, 3.0), torch.nn.init.constant_(last.weight, 2.0)
        >>> model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
        >>> ps.rescaling.conserved(ps.trace(model, torch.zeros(1, 2)))
        tensor([14.], dtype=torch.float64)
    """
    values = current_values(network, parameters)
    device = next(iter(values.values())).device
    with torch.inference_mode(False), torch.enable_grad():
        log_scales = torch.zeros(
            network.num_classes, dtype=torch.float64, device=device, requires_grad=True
        )
        total = log_scales.sum() * 0.0
        for name in network.parameters:
            # k_ce is the derivative of the log of an element's factor
            log_factors = network.edge_factors(name, log_scales.exp()).log()
            total = total + (values[name].detach().double().square() * log_factors).sum()
        (result,) = torch.autograd.grad(total, [log_scales])
    return result
