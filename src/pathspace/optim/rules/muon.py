"""Muon for matrices and AdamW for all other parameters, as one optimizer; both are torch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.optimizer import ParamsT

AdjustLr = Literal["match_rms_adamw", "original"]
ROW_BLOCKS = "_row_blocks"
"""Attribute of a parameter: sizes of the blocks of rows that are matrices of their own."""


class MuonAdamW(Optimizer):
    """``torch.optim.Muon`` for parameters of two dimensions, ``torch.optim.AdamW`` for the others.

    Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in neural networks",
    2024; the sizes of its steps: Liu et al., "Muon is Scalable for LLM Training", 2025. A parameter that has
    ``ROW_BLOCKS`` is as many matrices.

    Args:
        params: parameters or param groups.
        lr: learning rate of both rules.
        momentum: decay rate of Muon's momentum.
        nesterov: orthogonalize a mean of the gradient and the momentum.
        weight_decay: decoupled decay of every parameter, times lr.
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        adjust_lr: see ``adjust_lr_fn`` of ``torch.optim.Muon``; ``"match_rms_adamw"`` gives steps of AdamW's size, so
            that one lr serves both rules.
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
            moved = [p for p in group["params"] if p.grad is not None]
            others = [p for p in moved if p.dim() != 2 or not group["use_muon"]]
            matrices = [p for p in moved if p.dim() == 2] if group["use_muon"] else []
            if others:
                options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
                self._let_step(AdamW, others, options)
            if matrices:
                options = {
                    name: group[name] for name in ("lr", "momentum", "nesterov", "weight_decay", "ns_steps")
                }
                with _negated(matrices) if group["maximize"] else nullcontext():  # torch's Muon only descends
                    self._let_step(Muon, matrices, {**options, "adjust_lr_fn": group["adjust_lr"]})
        return loss

    def _let_step(
        self, kind: type[AdamW] | type[Muon], params: list[Tensor], options: dict[str, Any]
    ) -> None:
        """A step of one of torch's rules, whose state is kept here."""
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = AdamW(params) if kind is AdamW else Muon(params)
        if kind is Muon:
            params, rule.state = self._matrices_of(params)
        else:
            rule.state = self.state
        rule.param_groups[0].update(options, params=params)
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
