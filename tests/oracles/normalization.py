"""Networks that normalize, and their squared networks written out by hand.

gamma_y^2 = g^2 z / m + b^2,   z what enters, m its mean over what is normalized together, held in derivatives
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import NormalizedBlocks, NormalizedResidual, RootMeanSquare

TIGHT = {"rtol": 1e-11, "atol": 1e-13}


def shaken(model):
    """In float64, with gains and biases away from one and zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) / max(1, p[0].numel() if p.dim() else 1) ** 0.5 + 0.1)
    return model.double().train()


def over_mean(z, dims):
    """The rule: what enters over its mean, held."""
    return z / z.mean(dims, keepdim=True).detach()


def blocks(q, over):
    """The squared network of `NormalizedBlocks` by hand: gamma^2 at the inner nodes, and at the outputs."""

    def normalized(z, layer):
        y = over_mean(z, over) * q[f"{layer}.weight"]
        return y + q[f"{layer}.bias"] if f"{layer}.bias" in q else y

    one = q["embed.weight"].new_ones(1, 3)
    h = normalized(one @ q["embed.weight"].T, "first")
    r = normalized(h @ q["inner.weight"].T, "second")
    return [h, r], (h + r) @ q["head.weight"].T + q["head.bias"]


def images(q, normalize):
    """The squared network of `NormalizedResidual` by hand."""
    one = q["stem.weight"].new_ones(1, 1, 4, 4)
    h = normalize(functional.conv2d(one, q["stem.weight"], padding=1), q, "first")
    r = normalize(functional.conv2d(h, q["conv.weight"], padding=1), q, "second")
    y = normalize(functional.conv2d(h + r, q["down.weight"], stride=2, padding=1), q, "third")
    return [h, r, y], y.flatten(1) @ q["head.weight"].T + q["head.bias"]


def by_channel(z, q, layer):
    n = over_mean(z, (0, 2, 3))
    return n * q[f"{layer}.weight"].view(1, -1, 1, 1) + q[f"{layer}.bias"].view(1, -1, 1, 1)


def by_group(z, q, layer):
    n = over_mean(z.view(1, 2, -1), 2).view(z.shape)
    return n * q[f"{layer}.weight"].view(1, -1, 1, 1) + q[f"{layer}.bias"].view(1, -1, 1, 1)


NETWORKS = {
    "layer norm": (lambda: NormalizedBlocks(nn.LayerNorm), (3,), lambda q: blocks(q, 1)),
    "layer norm without a bias": (
        lambda: NormalizedBlocks(lambda n: nn.LayerNorm(n, bias=False)),
        (3,),
        lambda q: blocks(q, 1),
    ),
    "rms norm": (lambda: NormalizedBlocks(nn.RMSNorm), (3,), lambda q: blocks(q, 1)),
    "rms norm by hand": (lambda: NormalizedBlocks(RootMeanSquare), (3,), lambda q: blocks(q, 1)),
    "group norm of images": (
        lambda: NormalizedResidual(lambda n: nn.GroupNorm(2, n)),
        (1, 4, 4),
        lambda q: images(q, by_group),
    ),
    "instance norm of images": (
        lambda: NormalizedResidual(lambda n: nn.InstanceNorm2d(n, affine=True)),
        (1, 4, 4),
        lambda q: images(q, by_channel),
    ),
    "batch norm": (lambda: NormalizedBlocks(nn.BatchNorm1d), (3,), lambda q: blocks(q, 0)),
    "batch norm of images": (
        lambda: NormalizedResidual(nn.BatchNorm2d),
        (1, 4, 4),
        lambda q: images(q, by_channel),
    ),
}


def network_of(name):
    build, shape, hand = NETWORKS[name]
    model = shaken(build())
    return model, ps.trace(model, torch.zeros(1, *shape).double()), hand


def by_hand(network, hand):
    """Squared path norm, kappa, and gamma^2 and dG/dgamma^2 of the inner nodes."""
    q = {name: p.detach().square().requires_grad_() for name, p in network.parameters.items()}
    nodes, outputs = hand(q)
    total = outputs.sum()
    grads = torch.autograd.grad(total, [*q.values(), *nodes])
    masses = [(h.detach(), d) for h, d in zip(nodes, grads[len(q) :], strict=True)]
    return total.item(), dict(zip(q, grads[: len(q)], strict=True)), masses
