"""Random signs at the nodes, by which one backward pass estimates a sum over nodes.

A seed eps_o^i sqrt(psi_o) at every node o of every example i gives J^i = sum_o eps_o^i sqrt(psi_o) J_o^i, and

    E[(J^i)^2] = sum_o psi_o (J_o^i)^2                                 R = M: the mean over the examples
    E[1/2 (J^i - J^j)^2] = sum_o psi_o 1/2 (J_o^i - J_o^j)^2           R = C: i and j have the same signs

The second, averaged over random pairs of examples, is the variance, but for the factor (n - 1) / n. Signs that differ
from pair to pair make it far better than signs that all examples share.

The signs of two examples need to be uncorrelated, not independent: eps^i = a^(i div k) o b^(i mod k) with a few random
rows a and b costs a tenth of n random rows, and the estimate has the same variance.

Letters: n examples, m pairs, o node, D units of all nodes together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.network.observed import Key
from pathspace.network.replay import Replay
from pathspace.paths.node_measure import Statistic


@dataclass(frozen=True)
class Pairs:
    """Disjoint pairs of examples, first[k] with second[k]; one example of an odd number is left out."""

    first: Tensor  # [m]
    second: Tensor  # [m]
    left_out: Tensor  # [n - 2 m]
    count: int  # n

    @property
    def weight(self) -> float:
        """What the sum of (J^i - J^j)^2 over the pairs is multiplied with to become a variance."""
        return (self.count - 1) / self.count / (2 * len(self.first)) if len(self.first) else 0.0


def random_pairs(count: int, generator: torch.Generator, device: torch.device) -> Pairs:
    """A random matching of n examples, each equally likely."""
    order = torch.randperm(count, generator=generator, device=generator.device).to(device)
    half = count // 2
    return Pairs(order[:half], order[half : 2 * half], order[2 * half :], count)


def sign_seeds(
    found: Replay, psi: Mapping[Key, Tensor], statistic: Statistic, generator: torch.Generator
) -> tuple[dict[Key, Tensor], Pairs | None]:
    """Seeds eps_o sqrt(psi_o) at every node o of every example, and for R = C the pairs that share their signs.

    An example that is in no pair has zeros.
    """
    nodes = {key: found.nodes[key] for key in psi}
    if not nodes:
        return {}, None
    device = next(iter(nodes.values())).value.device
    pairs, rows, row_of = None, found.count, None
    if statistic == "covariance":
        pairs = random_pairs(found.count, generator, device)
        rows = len(pairs.first)
        # the row of signs of each example
        row_of = torch.zeros(found.count, dtype=torch.long, device=device)
        row_of[pairs.first] = row_of[pairs.second] = torch.arange(rows, device=device)
    wide = max(1, math.isqrt(max(0, rows - 1)) + 1)
    tall = -(-rows // wide)
    sizes = [p.numel() for p in psi.values()]
    drawn = random_signs((tall + wide, sum(sizes)), generator).to(device)
    seeds: dict[Key, Tensor] = {}
    of_dtype: dict[torch.dtype, Tensor] = {}
    start = 0
    for (key, node), size in zip(nodes.items(), sizes, strict=True):
        dtype = node.value.dtype
        if dtype not in of_dtype:
            of_dtype[dtype] = drawn.to(dtype)
        signs = of_dtype[dtype][:, start : start + size]
        start += size
        root = psi[key].reshape(-1).to(dtype).sqrt()
        a, b = signs[:tall] * root, signs[tall:]
        seed = (a[:, None] * b[None]).reshape(-1, size)[:rows]
        if pairs is not None and row_of is not None:
            seed = seed[row_of] if rows else seed.new_zeros(found.count, size)
            seed[pairs.left_out] = 0
        if node.batch is None:
            seeds[key] = seed.reshape(node.value.shape)
            continue
        shape = list(node.value.shape)
        del shape[node.batch]
        seed = seed.reshape(-1, *shape)
        seeds[key] = seed.movedim(0, node.batch) if node.batch else seed
    return seeds, pairs


def random_signs(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Independent signs +-1, int8; a random byte makes eight of them."""
    count = shape[0] * shape[1]
    drawn = torch.randint(
        0, 256, (-(-count // 8), 1), dtype=torch.uint8, generator=generator, device=generator.device
    )
    bits = drawn.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=drawn.device)).bitwise_and_(1)
    return bits.to(torch.int8).mul_(2).sub_(1).reshape(-1)[:count].reshape(shape)
