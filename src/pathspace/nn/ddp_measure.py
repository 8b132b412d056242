"""D, the path measure of what enters each layer that is to be normalized, from the traced network.

A normalized node has gamma_v^2 = 1, whatever its weights; inputs and the bias node have 1 too. What lies between
layers (pooling, sums of branches, dropout, reshaping) is followed in the squared network: a maximum sums its
window, an average of n divides by n^2, a sum adds. For a convolution the measure of a tap is the mean over the
positions of the output, as its other statistics are, so taps that fall into zero padding weigh less.

Letters: D measure, h value in the squared network (gamma^2), q squared weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.squared.tape import Instruction


@dataclass(frozen=True)
class Place:
    """Where a layer stands in the traced network."""

    path: str
    instruction: Instruction


def path_measures(network: Network, places: Mapping[str, Place]) -> dict[str, Tensor | str]:
    """D of each layer to be normalized.

    Args:
        network: a traced network.
        places: layers by path; all of them count as normalized.

    Returns:
        Path -> D, float64, broadcastable to the weight, without the dimensions in which it is constant; or, where
        D would depend on parameters, the name of one.
    """
    slots: dict[int, Tensor] = {}
    depends: dict[int, str] = {}
    like = torch.ones((), dtype=torch.float64)
    for leaf in network.tape.leaves:
        if leaf.kind == "parameter":
            slots[leaf.slot] = torch.ones(leaf.shape, dtype=torch.float64)
            depends[leaf.slot] = leaf.name
        elif leaf.kind == "input":
            slots[leaf.slot] = like.expand(leaf.shape)
        else:
            data = network.live(leaf.name) if leaf.data is None else leaf.data
            slots[leaf.slot] = data.to("cpu", torch.float64).square()
    by_instruction = {id(place.instruction): place for place in places.values()}
    measures: dict[str, Tensor | str] = {}
    for instruction in network.tape.instructions:
        place = by_instruction.get(id(instruction))
        if place is not None:
            x, w = instruction.inputs[:2]
            out, measure = _measure(instruction, slots[x], slots[w])
            measures[place.path] = depends.get(x, measure)
            slots[instruction.outputs[0]] = torch.ones_like(out)
            continue
        with torch.no_grad():
            result = instruction.function(*(slots[i] for i in instruction.inputs))
        results = (result,) if isinstance(result, Tensor) else result
        slots.update(zip(instruction.outputs, results, strict=True))
        names = [depends[i] for i in instruction.inputs if i in depends]
        if names:
            depends.update(dict.fromkeys(instruction.outputs, names[0]))
    return measures


def _measure(instruction: Instruction, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's squared output and D = d/dq of its mean over positions, summed over channels."""
    with torch.inference_mode(False), torch.enable_grad():
        q = w.clone().requires_grad_()
        out = instruction.function(h, q)
        assert isinstance(out, Tensor)
        positions = out.numel() // w.shape[0]
        (measure,) = torch.autograd.grad(out.sum() / positions, q)
    for d in range(measure.dim()):
        first = measure.narrow(d, 0, 1)
        if bool(torch.isclose(measure, first, rtol=1e-12, atol=0).all()):
            measure = first
    return out.detach(), measure.contiguous()
