"""Muon for matrices and AdamW for all other parameters, as one optimizer; both are torch's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.optimizer import ParamsT

# torch's own optimizers are made of these
_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_lerp = torch._foreach_lerp  # pyright: ignore[reportPrivateImportUsage]
_lerp_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]

_ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
_MUON_OPTIONS = ("lr", "momentum", "nesterov", "weight_decay", "ns_steps")

AdjustLr = Literal["match_rms_adamw", "original"]
ROW_BLOCKS = "_row_blocks"
"""Attribute of a parameter: sizes of the blocks of rows that are matrices of their own."""


class MuonAdamW(Optimizer):
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
        super().__init__(params, defaults)
        self._rules: dict[type[Optimizer], Optimizer] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; returns the closure's loss, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            matrices, others = _split(group)
            if others:
                self._let_step(AdamW, others, _chosen(group, _ADAMW_OPTIONS))
            if matrices:
                options = _chosen(group, _MUON_OPTIONS)
                options["adjust_lr_fn"] = group["adjust_lr"]
                # torch's Muon only descends
                with _negated(matrices) if group["maximize"] else nullcontext():
                    self._let_step(Muon, matrices, options)
        return loss

    def _let_step(
        self, kind: type[AdamW] | type[Muon], params: list[Tensor], options: dict[str, Any]
    ) -> None:
        """Take a step of one of torch's rules, whose state is kept here."""
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = AdamW(params) if kind is AdamW else Muon(params)
        if kind is Muon:
            params, rule.state = self._matrices_of(params)
        else:
            rule.state = self.state
        rule.param_groups[0].update(options, params=params)
        if kind is Muon and all(p.is_cuda for p in params):
            step_in_batches(params, rule.state, rule.param_groups[0])
        else:
            rule.step()
        rule.param_groups[0]["params"] = []  # of the caller, who may let go of them

    def _matrices_of(self, params: list[Tensor]) -> tuple[list[Tensor], defaultdict[Any, Any]]:
        """Return the matrices that parameters are made of, in their memory, and the state of each."""
        matrices: list[Tensor] = []
        states: defaultdict[Any, Any] = defaultdict(dict)
        for p in params:
            state = self.state[p]
            sizes = getattr(p, ROW_BLOCKS, ())
            if not sizes:
                matrices.append(p)
                states[p] = state
                continue
            assert p.grad is not None
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
            parts = zip(*(t.detach().split(sizes) for t in (p, p.grad, momentum)), strict=True)
            for matrix, gradient, kept in parts:
                matrix.grad = gradient
                matrices.append(matrix)
                states[matrix] = {"momentum_buffer": kept}
        return matrices, states

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rules": {}}


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


def _chosen(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: group[name] for name in names}


def step_in_batches(
    params: Sequence[Tensor], states: Mapping[Any, dict[str, Any]], group: Mapping[str, Any]
) -> None:
    """Take the step of ``torch.optim.Muon``, with matrices of one shape orthogonalized together.

    A GPU launches the products of a batch at once; torch's rule launches those of every matrix by
    themselves.

    Args:
        params: matrices with gradients.
        states: of each; its ``momentum_buffer`` is made where it lacks.
        group: the options of ``torch.optim.Muon``.
    """
    gradients = [p.grad for p in params if p.grad is not None]
    momenta = []
    for p, g in zip(params, gradients, strict=True):
        state = states[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(g)
        momenta.append(state["momentum_buffer"])
    momentum = group["momentum"]
    _lerp_(momenta, gradients, 1 - momentum)
    updates = momenta
    if group["nesterov"]:
        updates = list(_lerp(gradients, momenta, momentum))
    lr = float(group["lr"])
    if group["weight_decay"]:
        _mul_(list(params), 1 - lr * group["weight_decay"])
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, p in enumerate(params):
        alike.setdefault((p.shape, p.dtype, p.device), []).append(i)
    for (shape, dtype, _), places in alike.items():
        batch = torch.stack([updates[i] for i in places])
        steps = orthogonalized(batch, group).to(dtype)
        size = _step_size(lr, group["adjust_lr_fn"], shape)
        _add_([params[i] for i in places], list(steps), alpha=-size)


def orthogonalized(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return nearly U V^T of every matrix U S V^T, by the Newton-Schulz iteration of ``torch.optim.Muon``.

    Args:
        matrices: shape ``[N, n, m]``.
        group: with ``ns_coefficients``, ``ns_steps`` and ``eps``.

    Returns:
        In bfloat16, of the same shape.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _step_size(lr: float, adjustment: str | None, shape: torch.Size) -> float:
    """Return the learning rate of a matrix of some shape."""
    n, m = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(n, m)) * lr
    return math.sqrt(max(1, n / m)) * lr


@contextmanager
def _negated(params: list[Tensor]) -> Iterator[None]:
    gradients = [p.grad for p in params]
    try:
        for p, g in zip(params, gradients, strict=True):
            p.grad = None if g is None else -g
        yield
    finally:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
