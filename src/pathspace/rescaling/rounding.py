"""The member of a rescaling class whose outputs move least when its weights are rounded.

A step of rounding is proportional to the largest weight of its tensor t, or of its row, and K_e
says how strongly the outputs react to weight e: kappa, or E[(df/dw_e)^2] on data. So the expected
squared error of the outputs is in proportion to

    J(s) = sum_t max_{e in t} (a_e w_e)^2 sum_{e in t} K_e / a_e^2        a_e = s_v / s_u for an edge u -> v

J is convex in x = log s. Its maxima are replaced by p-norms, which are smooth, and p grows from
stage to stage. A tensor that is multiplied as a whole changes J by nothing, and x stays at 0 in
these directions. x = 0 is the member of the criterion "path", so all members of a class are brought
to the same one.

Both sums are bilinear in powers of the scales at the two ends of the edges, so each costs a product
of a matrix with a vector.

What enters a layer is rounded, too, if that is asked for: J has a further summand for each layer,
with the range of each channel in the place of |w_e| and E[(df/dh)^2] in that of K_e.

Letters: e edge u -> v, w_e its weight, c unit class, s_c its factor, x_c = log s_c, C how many
classes, R rows, B places that both ends of edges depend on, T those of targets alone, S those of
sources alone, h what enters a layer, f outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.units import EdgeLabels
from pathspace.paths.data.data_dependent import data_dependent_kappa, path_share
from pathspace.paths.data.edge_statistics import Seeded
from pathspace.paths.data.example_gradients import on_batch
from pathspace.paths.data.signs import sign_seeds
from pathspace.paths.kernel.kappa import kappa_in_float64
from pathspace.replay.observed import Use
from pathspace.replay.replay import Replay, replay
from pathspace.rescaling.activations import entering, largest
from pathspace.rescaling.criteria import Scales, in_dims

Per = Literal["tensor", "row"]
PER: tuple[str, ...] = get_args(Per)

POWERS = (8.0, 64.0, 512.0)
"""The p of the p-norms that stand for maxima, stage by stage."""
STEPS = 40
"""The most steps of L-BFGS in a stage."""
LEAST = 1e-300
"""A lower bound for sums, so that their logarithm is finite."""


@dataclass(frozen=True)
class Scheme:
    """A scheme of rounding: bits, steps, and what is rounded.

    Attributes:
        bits: of a weight.
        per: whether each tensor has a step, or each row of it.
        activations: bits of what enters a layer, with one step for a tensor; None if it is not
            rounded.
        calibration: data to measure derivatives on; None for kappa.
    """

    bits: int = 8
    per: Per = "tensor"
    activations: int | None = None
    calibration: Any = None


@dataclass(frozen=True)
class Rounded:
    """Numbers that are rounded, with one step for all of them or for each of their rows.

    Attributes:
        size: |w|, ``[R, B, T, S]``.
        reaction: K of each, likewise; zero where w is, because zero is rounded to zero.
        target: labels (see ``network.units.EdgeLabels``), ``[R or 1, B or 1, T, 1]``.
        source: labels, ``[R or 1, B or 1, 1, S]``.
        step: of numbers up to 1.
    """

    size: Tensor
    reaction: Tensor
    target: Tensor
    source: Tensor
    step: float

    def log_reaction(self, logs: Tensor) -> Tensor:
        """Compute log sum_e K_e / a_e^2 of each row from log s, a table by label (see :class:`Scales`)."""
        return _log_bilinear(self.reaction, -2 * logs[self.target], 2 * logs[self.source])

    def log_step(self, logs: Tensor) -> Tensor:
        """Compute the log of the step of each row, which its largest number determines."""
        return self._log_sizes(logs).flatten(1).amax(1) + math.log(self.step)

    def smooth_log_step(self, start: Tensor, power: float) -> Callable[[Tensor], Tensor]:
        """Return the log of the step of each row as a function of log s, with p-norms in the place of maxima.

        Numbers far below the largest one at ``start`` count as zero: their powers underflow.
        """
        sizes = self._log_sizes(start)
        largest = sizes.flatten(1).amax(1)
        powers = (power * (sizes - largest[:, None, None, None])).exp()

        def log_step(logs: Tensor) -> Tensor:
            moved = power * (logs - start)
            log_sum = _log_bilinear(powers, moved[self.target], -moved[self.source])
            return largest + log_sum / power + math.log(self.step)

        return log_step

    def _log_sizes(self, logs: Tensor) -> Tensor:
        return self.size.log() + logs[self.target] - logs[self.source]


def _log_bilinear(matrix: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """Compute log sum_BTS exp(target)_BT matrix_BTS exp(source)_BS of each row."""
    largest = target.detach().amax(), source.detach().amax()
    columns = (source - largest[1]).exp().transpose(-1, -2)
    sums = (matrix @ columns) * (target - largest[0]).exp()
    return sums.flatten(1).sum(1).clamp_min(LEAST).log() + largest[0] + largest[1]


def rounding_factors(network: Network, factors: Tensor, scheme: Scheme) -> Tensor:
    """Return the factors that lead to the least J, float64 ``[C]``.

    Args:
        network: a traced network.
        factors: those of the member at which the search begins.
        scheme: how the network is rounded.

    Raises:
        FloatingPointError: a derivative on the data is not finite.
        UnmatchedForwardError: the forward pass on the data is not the traced one.
    """
    scales = Scales.of(network, factors.device)
    parts = rounded_weights(network, factors, scheme)
    if scheme.activations is not None:
        parts += rounded_values(network, factors, scheme.calibration, scheme.activations)
    return factors * best_for_rounding(parts, scales, torch.zeros_like(factors)).exp()


def best_for_rounding(parts: Sequence[Rounded], scales: Scales, start: Tensor) -> Tensor:
    """Return log s at which J is least, ``[C]``.

    Args:
        parts: what is rounded.
        scales: of the network.
        start: log s at which the search begins.
    """
    if not parts or not len(start):
        return start
    best = start
    least = log_error(parts, scales, start)
    x = start
    for power in POWERS:
        x = _smooth_minimum(parts, scales, x, power)
        error = log_error(parts, scales, x)
        if error < least:
            best = x
            least = error
    return best


@torch.no_grad()
def log_error(parts: Sequence[Rounded], scales: Scales, x: Tensor) -> float:
    """Compute log J at log s = x."""
    logs = scales.log(x, scales.labels)
    rows = [2 * part.log_step(logs) + part.log_reaction(logs) for part in parts]
    return float(torch.cat(rows).logsumexp(0))


@torch.enable_grad()
def _smooth_minimum(
    parts: Sequence[Rounded], scales: Scales, start: Tensor, power: float
) -> Tensor:
    """Return log s at which J with p-norms is least."""
    steps = [part.smooth_log_step(scales.log(start, scales.labels), power) for part in parts]
    x = start.detach().clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [x],
        max_iter=STEPS,
        history_size=20,
        tolerance_grad=1e-10,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        logs = scales.log(x, scales.labels)
        pairs = zip(parts, steps, strict=True)
        rows = [2 * log_step(logs) + part.log_reaction(logs) for part, log_step in pairs]
        error = torch.cat(rows).logsumexp(0)
        error.backward()
        return error

    solver.step(closure)
    return x.detach()


# -- what is rounded -------------------------------------------------------------------------------


def rounded_weights(network: Network, factors: Tensor, scheme: Scheme) -> list[Rounded]:
    """Return the weights that are rounded, as a rescaling by ``factors`` would make them.

    Args:
        network: a traced network.
        factors: float64, ``[C]``.
        scheme: how the network is rounded.
    """
    reactions = _reactions(network, scheme.calibration)
    step = 1 / (2 ** (scheme.bits - 1) - 1)
    parts = []
    for name, parameter in network.parameters.items():
        if parameter.dim() < 2:
            continue
        a = network.edge_factors(name, factors)
        size = (parameter.detach().to(factors.device, torch.float64) * a).abs()
        reaction = reactions[name].to(factors.device, torch.float64) / a.square()
        reaction = reaction.masked_fill(size == 0, 0.0)
        parts.append(_arranged(size, reaction, network.edges[name], scheme.per, step))
    return [part for part in parts if len(part.size)]


def _reactions(network: Network, calibration: Any) -> Mapping[str, Tensor]:
    """Return kappa, or E[(df/dw)^2] on data, by parameter."""
    if calibration is not None:
        return data_dependent_kappa(network, calibration, alpha=1.0, estimator="auto")
    return kappa_in_float64(network)


def rounded_values(network: Network, factors: Tensor, calibration: Any, bits: int) -> list[Rounded]:
    """Return the values that enter layers, one part for each layer, as a rescaling by ``factors`` would make them.

    Args:
        network: a traced network.
        factors: float64, ``[C]``.
        calibration: data.
        bits: of a rounded value.
    """
    replayed = replay(network, calibration, wide=True)
    _, psi = path_share(network, replayed, 1.0, "second_moment", [])
    seeds, _ = sign_seeds(replayed, psi, "second_moment", torch.Generator().manual_seed(0))
    if not seeds:
        return []
    names = {id(leaf): name for name, leaf in replayed.leaves.items()}
    parts = []
    for use, delta in zip(replayed.uses, Seeded.of(replayed, seeds).deltas, strict=True):
        name = names.get(id(use.args[1])) if len(use.args) > 1 else None
        if name is None or delta is None or use.kwargs:
            continue
        part = _rounded_input(network, replayed, use, delta, name, factors, bits)
        if part is not None:
            parts.append(part)
    return parts


def _rounded_input(
    network: Network,
    replayed: Replay,
    use: Use,
    delta: Tensor,
    name: str,
    factors: Tensor,
    bits: int,
) -> Rounded | None:
    """Return what enters a layer; None if its units are not known."""
    x = use.args[0]
    ranges = entering(use, x, largest)
    if ranges is None:
        return None
    # E[(df/dh)^2] through this layer
    gradient = torch.func.vjp(on_batch(use, x, use.data), x)[1](delta)[0]
    reaction = entering(use, gradient, _sum_of_squares)
    assert reaction is not None
    labels = in_dims(network.edges[name].source, ranges.dim())
    scale = network.scale_of(factors, labels.to(factors.device))
    sizes = ranges.to(factors.device) * scale
    total = gradient.square().sum()
    if not bool(total > 0):
        return None
    # a channel that several groups of weights read stands there several times; a whole number, so
    # that the scales of channels do not show in its rounding
    copies = (reaction.expand(sizes.shape).sum() / total).round()
    share = reaction.to(factors.device) / scale.square() / (copies * replayed.count)
    share = share.masked_fill(sizes == 0, 0.0)
    # values of both signs take twice the range
    step = (2 if bool((x < 0).any()) else 1) / (2**bits - 1)
    part = _arranged(
        sizes, share, EdgeLabels(labels, torch.zeros_like(labels).flatten()[:1]), "tensor", step
    )
    return part if len(part.size) else None


def _arranged(size: Tensor, reaction: Tensor, labels: EdgeLabels, per: Per, step: float) -> Rounded:
    """Bring numbers into the form of :class:`Rounded`, without rows that move no output.

    Args:
        size: |w|, of any shape.
        reaction: K, of the same shape.
        labels: of the numbers.
        per: whether all numbers have one step, or each row has its own.
        step: of numbers up to 1.
    """
    dims = size.dim()
    target = in_dims(labels.target, dims).to(size.device)
    source = in_dims(labels.source, dims).to(size.device)
    rows = [0] if per == "row" else []
    # along these dimensions all numbers have the same scale: only their largest and their sum count
    free = [d for d in range(dims) if d not in rows and target.shape[d] == source.shape[d] == 1]
    if free:
        size = size.amax(free, keepdim=True)
        reaction = reaction.sum(free, keepdim=True)
    # R, B, T, S
    kinds = _kindsin_dims(target, source, rows)
    size = _merge_dims(size, kinds)
    reaction = _merge_dims(reaction, kinds)
    target = _merge_dims(target, kinds)
    source = _merge_dims(source, kinds)
    kept = reaction.flatten(1).sum(1) > 0
    if len(target) > 1:
        target = target[kept]
    if len(source) > 1:
        source = source[kept]
    return Rounded(size[kept], reaction[kept], target, source, step)


def _kindsin_dims(target: Tensor, source: Tensor, rows: list[int]) -> list[list[int]]:
    """Sort dimensions by the ends of edges that depend on them: rows, both ends, targets, sources."""
    both = []
    targets = []
    sources = []
    for d in range(target.dim()):
        if d in rows:
            continue
        if target.shape[d] == 1:
            sources.append(d)
        elif source.shape[d] == 1:
            targets.append(d)
        else:
            both.append(d)
    return [rows, both, targets, sources]


def _merge_dims(x: Tensor, kinds: list[list[int]]) -> Tensor:
    """Merge the dimensions of each kind into one."""
    lengths = [math.prod(x.shape[d] for d in kind) for kind in kinds]
    order: list[int] = []
    for kind in kinds:
        order += kind
    return x.permute(order).reshape(lengths)


def _sum_of_squares(rows: Tensor) -> Tensor:
    return rows.square().sum(0)
