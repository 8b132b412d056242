"""D, the path measure of what enters each layer that is to be normalized, from the traced network.

A normalized node has gamma_v^2 = 1, whatever its weights; inputs and the bias node have 1 too. What lies between
layers (pooling, sums of branches, dropout, reshaping) is followed in the squared network: a maximum sums its
window, an average of n divides by n^2, a sum adds. For a convolution the measure of a tap is the mean over the
positions of the output, as its other statistics are, so taps that fall into zero padding weigh less.

Letters: D measure, h value in the squared network (gamma^2), q squared weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.squared.tape import Instruction


def path_measures(network: Network, places: Mapping[str, Instruction]) -> dict[str, Tensor | str]:
    """D of each layer to be normalized.

    Args:
        network: a traced network.
        places: what layers do in the squared network, by path; all of them count as normalized.

    Returns:
        Path -> D, float64, broadcastable to the weight, without the dimensions in which it is constant; or, where
        D would depend on parameters, the name of one.
    """
    path_of = {instruction.outputs: path for path, instruction in places.items()}
    q = {n: torch.ones(p.shape, dtype=torch.float64, device="cpu") for n, p in network.parameters.items()}
    measures: dict[str, Tensor | str] = {}

    def normalize(slots: tuple[int, ...], h: Tensor) -> Tensor:
        path = path_of.get(slots)
        if path is None:
            return h
        own = [f"{path}.{name}".lstrip(".") for name in ("weight", "bias")]
        positions = h.numel() // len(q[own[0]])
        ends = torch.autograd.grad(h.sum() / positions, list(q.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(q, ends, strict=True) if g is not None}
        others = [name for name in gradients if name not in own]
        measures[path] = others[0] if others else _compact(gradients[own[0]])
        return torch.ones_like(h)

    with torch.enable_grad():
        network.tape.run({name: t.requires_grad_() for name, t in q.items()}, network.live, mix=normalize)
    return measures


def _compact(measure: Tensor) -> Tensor:
    """Without the dimensions in which it is constant."""
    for d in range(measure.dim()):
        first = measure.narrow(d, 0, 1)
        if bool(torch.isclose(measure, first, rtol=1e-12, atol=0).all()):
            measure = first
    return measure.contiguous()
