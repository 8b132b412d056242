"""Random signs at the nodes, by which one backward pass estimates a sum over nodes.

A seed eps_o^i sqrt(psi_o) at every node o of every example i gives J^i = sum_o eps_o^i sqrt(psi_o)
J_o^i, and

    E[(J^i)^2] = sum_o psi_o (J_o^i)^2                                 R = M: the mean over the examples
    E[1/2 (J^i - J^j)^2] = sum_o psi_o 1/2 (J_o^i - J_o^j)^2           R = C: i and j have the same signs

The second, averaged over random pairs of examples, is the variance, but for the factor (n - 1) / n.
Signs that differ from pair to pair make it far better than signs that all examples share.

The signs of two examples need to be uncorrelated, not independent: eps^i = a^(i div k) o b^(i mod
k) with a few random rows a and b costs a tenth of n random rows, and the estimate has the same
variance.

In data parallelism every process draws a and b for the whole batch and makes the rows of its own
examples: the mean over the processes is then what one process would have computed.

Letters: n examples, m pairs, o node, D units of all nodes together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.paths.data.node_measure import Statistic
from pathspace.replay.observed import Key
from pathspace.replay.replay import Replay

MANY = 64
"""The number of examples in a batch from which on the products of one half of them are taken. The other half would tell
less than its time is worth, as the averages over refreshes in docs/data-dependent.md show."""

Place = tuple[int, int]
"""The number of a process that has a part of a batch, and how many there are, with parts of the same size."""
ALONE: Place = (0, 1)


@dataclass(frozen=True)
class Pairs:
    """Disjoint pairs of examples, first[k] with second[k]; the others are left out."""

    first: Tensor  # [m]
    second: Tensor  # [m]
    left_out: Tensor  # [n - 2 m]
    count: int  # n

    @property
    def weight(self) -> float:
        """Factor that makes the sum of (J^i - J^j)^2 over the pairs a variance."""
        half = len(self.first)
        n = self.count
        return (n - 1) / n / (2 * half) if half else 0.0


def random_pairs(
    count: int, generator: torch.Generator, device: torch.device, *, part: bool = False
) -> Pairs:
    """Draw a random matching of n examples, all equally likely; with ``part`` of half of them if there are many."""
    order = torch.randperm(count, generator=generator, device=generator.device).to(device)
    half = size_of_part(count, part) // 2
    return Pairs(order[:half], order[half : 2 * half], order[2 * half :], count)


def random_part(
    count: int, generator: torch.Generator, device: torch.device, place: Place = ALONE
) -> Tensor | None:
    """Draw half of n examples, all equally likely; return their numbers, or None for all if the batch is small.

    One of two neighbours is drawn, so that processes with even parts of a batch draw what one
    process would.
    """
    half = size_of_part(count, place=place)
    if half == count:
        return None
    number, processes = place
    drawn = torch.randint(2, (processes * half,), generator=generator, device=generator.device)
    chosen = drawn[number * half : (number + 1) * half] + 2 * torch.arange(
        half, device=generator.device
    )
    if count % 2:  # the last has no neighbour: let it be any of them
        chosen += torch.randint(count, (1,), generator=generator, device=generator.device)
        chosen %= count
    return chosen.to(device)


def size_of_part(count: int, part: bool = True, place: Place = ALONE) -> int:
    """Return the number of examples over which a mean square is taken, if a part of n is enough."""
    return count // 2 if part and count * place[1] >= MANY else count


def sign_seeds(
    replayed: Replay,
    psi: Mapping[Key, Tensor],
    statistic: Statistic,
    generator: torch.Generator,
    *,
    part: bool = False,
    place: Place = ALONE,
) -> tuple[dict[Key, Tensor], Pairs | None]:
    """Draw seeds eps_o sqrt(psi_o) at every node o of every example, and for R = C the pairs that share their signs.

    An example that is in no pair has zeros; ``part`` leaves out a part of a large batch.
    """
    nodes = {key: replayed.nodes[key] for key in psi}
    if not nodes:
        return {}, None
    value = next(iter(nodes.values())).value
    device = value.device
    dtype = value.dtype
    pairs = None
    rows = replayed.count
    row_of = None
    if statistic == "covariance":
        pairs = random_pairs(replayed.count, generator, device, part=part)
        rows = len(pairs.first)
        # the row of signs of each example
        row_of = torch.zeros(replayed.count, dtype=torch.long, device=device)
        row_of[pairs.first] = row_of[pairs.second] = torch.arange(rows, device=device)
    flat = [p.reshape(-1).to(dtype) for p in psi.values()]
    sizes = [len(p) for p in flat]
    # all nodes side by side: one row of seeds for every example
    seed = seed_rows(torch.cat(flat).sqrt_(), rows, generator, place)
    if pairs is not None and row_of is not None:
        seed = seed.index_select(0, row_of) if rows else seed.new_zeros(replayed.count, sum(sizes))
        if len(pairs.left_out):
            seed[pairs.left_out] = 0
    seeds: dict[Key, Tensor] = {}
    for (key, node), signs in zip(nodes.items(), seed.split(sizes, 1), strict=True):
        seeds[key] = signs.to(node.value.dtype).reshape(node.value.shape)
    return seeds, pairs


def seed_rows(sizes: Tensor, rows: int, generator: torch.Generator, place: Place = ALONE) -> Tensor:
    """Draw rows of uncorrelated random signs, ``[rows, D]``, times the sizes ``[D]`` of the seeds.

    Of the rows of all processes, those at the place of this one.
    """
    first = place[0] * rows
    whole = place[1] * rows
    wide = math.isqrt(max(0, whole - 1)) + 1
    tall = -(-whole // wide)
    begin = first // wide
    end = -(-(first + rows) // wide)
    signs = random_signs((tall + wide, len(sizes)), generator, sizes.dtype).to(sizes.device)
    a = signs[begin:end].mul_(sizes)
    b = signs[tall:]
    # row i of all processes is the product of row i // wide of a and row i % wide of b
    every = (a[:, None] * b).flatten(0, 1)
    skipped = first - begin * wide
    return every[skipped : skipped + rows]


def random_signs(
    shape: tuple[int, int], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw independent signs +-1, eight from each random byte."""
    count = shape[0] * shape[1]
    count_of_bytes = math.ceil(count / 8)
    device = generator.device
    # the first sign in the lowest bit
    drawn = torch.randint(0, 256, (count_of_bytes,), generator=generator, device=device)
    signs = _signs_of_bytes(dtype, device).index_select(0, drawn)
    return signs.view(-1)[:count].view(shape)


@functools.cache
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the eight signs of each value of a byte, ``[256, 8]``."""
    with torch.inference_mode(False):
        byte = torch.arange(256, device="cpu")
        place = torch.arange(8, device="cpu")
        bits = byte[:, None].bitwise_right_shift(place).bitwise_and(1)
        return bits.mul(2).sub(1).to(dtype).to(device)
