"""Muon for matrices and AdamW for all other parameters, as one optimizer; their rules are torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from pathspace.optim.rules.division import (
    SHARD_OF,
    DividedRule,
    Exchange,
    compute_in_shares,
    divides,
)
from pathspace.optim.rules.newton_schulz import orthogonalization_cost, orthogonalized_all
from pathspace.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_

_ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")

AdjustLr = Literal["match_rms_adamw", "original"]
ROW_BLOCKS = "_row_blocks"
"""Attribute of a parameter: sizes of the blocks of rows that are matrices of their own."""


class MuonAdamW(DividedRule):
    """``torch.optim.Muon`` for parameters of two dimensions, ``torch.optim.AdamW`` for the others.

    Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in
    neural networks", 2024; the sizes of its steps: Liu et al., "Muon is Scalable for LLM Training",
    2025. A parameter that has ``ROW_BLOCKS`` is as many matrices.

    Args:
        params: parameters or param groups.
        lr: learning rate of both rules.
        momentum: decay rate of Muon's momentum.
        nesterov: orthogonalize a mean of the gradient and the momentum.
        weight_decay: decoupled decay of every parameter, times lr.
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        adjust_lr: see ``adjust_lr_fn`` of ``torch.optim.Muon``; ``"match_rms_adamw"`` gives steps
            of AdamW's size, so that one lr serves both rules.
        ns_steps: Newton-Schulz iterations, which torch does in bfloat16.
        use_muon: False leaves the matrices, too, to AdamW.
        maximize: ascend instead.
        process_group: processes that have the same weights and gradients, over which the matrices
            are divided; ``"default"``: those of torch.distributed, where it is initialised; None:
            each process does all of them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        adjust_lr: AdjustLr = "match_rms_adamw",
        ns_steps: int = 5,
        use_muon: bool = True,
        maximize: bool = False,
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "adjust_lr": adjust_lr,
            "ns_steps": ns_steps,
            "use_muon": use_muon,
            "maximize": maximize,
        }
        super().__init__(params, defaults, process_group)
        self._adamw: AdamW | None = None

    def _take(self) -> None:
        split = [_split(group) for group in self.param_groups]
        self._expect_equal_once([p for matrices, _ in split for p in matrices])
        matrices: list[MuonMatrix] = []
        for group, (of_muon, of_adamw) in zip(self.param_groups, split, strict=True):
            if of_adamw:
                self._step_vectors(of_adamw, group)
            if of_muon:
                matrices += self._with_momenta(of_muon, group)
        step_matrices(matrices, self.process_group)

    def _step_vectors(self, params: list[Tensor], group: Mapping[str, Any]) -> None:
        """Take a step of torch's AdamW, whose state is kept here."""
        if self._adamw is None:
            self._adamw = AdamW(params)
        options = {name: group[name] for name in _ADAMW_OPTIONS}
        # one call for all of them; on a GPU the counts would have to be there
        options["fused"] = all(p.is_cpu for p in params)
        self._adamw.state = self.state
        self._adamw.param_groups[0].update(options, params=params)
        self._adamw.step()
        self._adamw.param_groups[0]["params"] = []  # of the caller, who may let go of them

    def _with_momenta(self, params: Sequence[Tensor], group: Mapping[str, Any]) -> list[MuonMatrix]:
        """Update the momenta of matrices, and decay these; return what else a step of them needs."""
        gradients = []
        momenta = []
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            momenta.append(state["momentum_buffer"])
            gradients.append(-p.grad if group["maximize"] else p.grad)
        # B = momentum B + (1 - momentum) G
        foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = _updates(gradients, momenta, group, is_split=hasattr(params[0], SHARD_OF))
        if group["weight_decay"]:
            foreach_mul_(list(params), 1 - float(group["lr"]) * group["weight_decay"])
        return [
            MuonMatrix(
                p.detach(), update, group, getattr(p, ROW_BLOCKS, ()), getattr(p, SHARD_OF, None)
            )
            for p, update in zip(params, updates, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": None}


def _split(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the parameters of a group that have a gradient into those of Muon and those of AdamW."""
    matrices = []
    others = []
    for p in group["params"]:
        if p.grad is None:
            continue
        if p.dim() == 2 and group["use_muon"]:
            matrices.append(p)
        else:
            others.append(p)
    return matrices, others


def _updates(
    gradients: list[Tensor], momenta: list[Tensor], group: Mapping[str, Any], *, is_split: bool
) -> Sequence[Tensor]:
    """Return what is orthogonalized: (1 - momentum) G + momentum B, or B without nesterov.

    Where parameters are split over processes, it is in bfloat16 at once, with which the iteration
    begins: less memory, and less to send.
    """
    momentum = group["momentum"]
    if not is_split:
        return foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
    if not group["nesterov"]:
        return [B.bfloat16() for B in momenta]
    return [G.lerp(B, momentum).bfloat16() for G, B in zip(gradients, momenta, strict=True)]


@dataclass(frozen=True)
class MuonMatrix:
    """A parameter of two dimensions in a step of Muon.

    Attributes:
        weights: the parameter, or the rows of it that are in this process.
        update: what is orthogonalized, of the same shape: a mean of gradients.
        group: the options.
        block_sizes: rows of the matrices that the parameter is made of; empty if it is one.
        shard: the parameter, if it is split over processes.
    """

    weights: Tensor
    update: Tensor
    group: Mapping[str, Any]
    block_sizes: Sequence[int] = ()
    shard: Any = None

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Shapes of the matrices that the whole parameter is made of."""
        tensor = self.weights if self.shard is None else self.shard
        sizes = self.block_sizes or (tensor.shape[0],)
        return [(size, self.weights.shape[1]) for size in sizes]

    @property
    def step_sizes(self) -> list[float]:
        """Learning rate of each of these matrices."""
        lr = float(self.group["lr"])
        return [_step_size(lr, self.group["adjust_lr"], shape) for shape in self.blocks]


def step_matrices(matrices: Sequence[MuonMatrix], process_group: Any = None) -> None:
    """Orthogonalize the updates of parameters, and take the step.

    Args:
        matrices: the parameters.
        process_group: the processes that divide the work on those that are whole in each.
    """
    shards = [each for each in matrices if each.shard is not None]
    wholes = [each for each in matrices if each.shard is None]
    if wholes:
        step_wholes(wholes, process_group)
    if shards:
        step_shards(shards)


def step_wholes(matrices: Sequence[MuonMatrix], process_group: Any = None) -> None:
    """Orthogonalize the updates of parameters that are whole in this process, and take the step.

    Args:
        matrices: the parameters.
        process_group: the processes that divide the work, if any.
    """
    weights: list[Tensor] = []
    updates: list[Tensor] = []
    counts: list[int] = []
    sizes: list[float] = []
    for each in matrices:
        rows = [rows for rows, _ in each.blocks]
        weights += each.weights.split(rows)
        updates += each.update.split(rows)
        counts += [each.group["ns_steps"]] * len(rows)
        sizes += each.step_sizes
    if not divides(process_group):
        _add_steps(weights, orthogonalized_all(updates, counts), sizes)
        return

    def compute(jobs: Sequence[int]) -> list[list[Tensor]]:
        found = orthogonalized_all([updates[i] for i in jobs], [counts[i] for i in jobs])
        return [[direction] for direction in found]

    # bfloat16, as the iteration has it: nothing is rounded on the way to other processes
    directions = [torch.empty_like(update, dtype=torch.bfloat16) for update in updates]
    costs = [
        orthogonalization_cost(update.shape, count)
        for update, count in zip(updates, counts, strict=True)
    ]
    compute_in_shares(compute, costs, [[direction] for direction in directions], process_group)
    _add_steps(weights, directions, sizes)


def step_shards(matrices: Sequence[MuonMatrix]) -> None:
    """Orthogonalize the updates of parameters that are split over processes, and take the step.

    Each parameter becomes whole in one process, which sends the rows of the result back.
    """
    shapes = []
    costs = []
    for each in matrices:
        shapes.append((each.shard.shape[0], each.weights.shape[1]))
        costs.append(
            sum(orthogonalization_cost(block, each.group["ns_steps"]) for block in each.blocks)
        )
    exchange = Exchange(shapes, costs, matrices[0].shard.device_mesh)
    own = _own_directions(exchange, matrices)
    received = exchange.to_all(own, matrices[0].update)
    for job, (each, direction) in enumerate(zip(matrices, received, strict=True)):
        _add_steps_of_rows(each, direction, exchange.first_row(job))


def _own_directions(exchange: Exchange, matrices: Sequence[MuonMatrix]) -> list[Tensor]:
    """Orthogonalize the updates of the parameters that this process owns."""
    blocks: list[Tensor] = []
    counts: list[int] = []
    wholes = exchange.to_owners([each.update for each in matrices])
    for job, whole in zip(exchange.own, wholes, strict=True):
        rows = [rows for rows, _ in matrices[job].blocks]
        blocks += whole.split(rows)
        counts += [matrices[job].group["ns_steps"]] * len(rows)
    directions = orthogonalized_all(blocks, counts)
    own = []
    start = 0
    for job in exchange.own:
        end = start + len(matrices[job].blocks)
        own.append(directions[start] if end == start + 1 else torch.cat(directions[start:end]))
        start = end
    return own


def _add_steps_of_rows(matrix: MuonMatrix, direction: Tensor, first: int) -> None:
    """Take the step of some rows of a parameter, each with the rate of its block.

    Args:
        matrix: the parameter.
        direction: of these rows.
        first: place of the first of them in the whole parameter.
    """
    weights: list[Tensor] = []
    directions: list[Tensor] = []
    sizes: list[float] = []
    start = -first
    for (rows, _), size in zip(matrix.blocks, matrix.step_sizes, strict=True):
        here = slice(max(start, 0), max(start + rows, 0))
        weights.append(matrix.weights[here])
        directions.append(direction[here])
        sizes.append(size)
        start += rows
    _add_steps(weights, directions, sizes)


def _add_steps(
    weights: Sequence[Tensor], directions: Sequence[Tensor], sizes: Sequence[float]
) -> None:
    """Subtract size times direction from each matrix, those of one size and type in one call."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, w in enumerate(weights):
        alike.setdefault((sizes[i], w.dtype, w.device), []).append(i)
    for (size, dtype, _), places in alike.items():
        steps = [directions[i].to(dtype) for i in places]
        foreach_add_([weights[i] for i in places], steps, alpha=-size)


def _step_size(lr: float, adjustment: str, shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix of some shape."""
    n, m = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(n, m)) * lr
    return math.sqrt(max(1, n / m)) * lr
