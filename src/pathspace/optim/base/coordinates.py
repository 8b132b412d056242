"""Parameters in coordinates u = w / r, and what a rule did to them mapped back.

The rule finds u and h, takes its step du, and w becomes w + r du. Most rules do not look at u: their step is a function
of gradients, and a decay that is a factor of u. These are given u = 0, which saves four passes over the parameters (of
`Invariant` with AdamW on an MLP of 2 million weights: see docs/optim.md) and the rounding of u + du.

Letters: w parameter, g = dL/dw, r = 1 / sqrt(D), u coordinates, h = dL/du = r g, q the coordinates before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from pathspace.optim.base.network_optimizer import evaluated
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.soap import SOAP
from pathspace.paths.kernel.norm import widened

# by class, not by name: others have rules of these names that decay in other ways
_DECOUPLED = (optim.AdamW, optim.Muon, MuonAdamW, SOAP)  # u <- (1 - lr weight_decay) u
_BLIND = (
    *_DECOUPLED, optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.RMSprop,
    optim.Adadelta, optim.Rprop,
)  # fmt: skip
_NOTHING = (
    2.0**-80
)  # beside the largest entry: digits lost near zero, which depend on the scales of the weights


def as_shadow(p: Tensor, *, matrix: bool = False) -> nn.Parameter:
    """What a rule trains in the place of a parameter: its coordinates, float32 for half precision, without values."""
    shape = (p.shape[0], -1) if matrix and p.dim() > 2 else p.shape
    like = torch.zeros_like(widened(p.detach()), memory_format=torch.contiguous_format)
    return nn.Parameter(like.reshape(shape), requires_grad=p.requires_grad)


@contextmanager
def seen_from_zero(rule: Optimizer) -> Iterator[Callable[[Tensor], float] | None]:
    """Whether a rule may be given u = 0; if so, a context in which it does not decay.

    Yields:
        From a parameter of the rule's groups to what its decay multiplies it with; None for rules that must see u.
    """
    kind, groups = type(rule), rule.param_groups
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    if kind not in _BLIND or (any(decays) and kind not in _DECOUPLED):
        yield None
        return
    factors = {
        id(p): 1 - float(group["lr"]) * decay
        for group, decay in zip(groups, decays, strict=True)
        for p in (group["params"] if decay else ())
    }
    try:
        for group, decay in zip(groups, decays, strict=True):
            if decay:
                group["weight_decay"] = 0.0
        yield lambda p: factors.get(id(p), 1.0)
    finally:
        for group, decay in zip(groups, decays, strict=True):
            if decay:
                group["weight_decay"] = decay


class Entry:
    """One parameter, and what the rule trains in its place.

    Args:
        p: the parameter w.
        shadow: u, with h as its gradient; of p's size.

    Attributes:
        r: 1 / sqrt(D); None outside the network.
        has_zeros: whether some r are zero, where w stays.
    """

    __slots__ = ("_h", "_q", "_u", "has_zeros", "p", "r", "shadow")

    def __init__(self, p: Tensor, shadow: nn.Parameter) -> None:
        self.p, self.shadow = p, shadow
        self.r: Tensor | None = None
        self.has_zeros = False
        if shadow.device != p.device:  # the model was moved
            shadow.data = shadow.data.to(p.device)
        self._u = shadow.detach().view(p.shape)
        self._h, self._q = torch.empty_like(self._u), None

    @property
    def is_current(self) -> bool:
        """Whether the parameter is where it was, in the type that it had."""
        return self._u.device == self.p.device and self._u.dtype == widened(self.p).dtype

    def read_gradient(self, *, masked: bool) -> None:
        """h = r g, without a change of the user's own; ``masked``: what is nothing beside the largest becomes zero."""
        g, r, h = self.p.grad, self.r, self._h
        assert g is not None
        if r is None:
            h.copy_(g)
        elif r.dtype == g.dtype == h.dtype:
            torch.mul(g, r, out=h)
        else:
            h.copy_(g * r)
        if masked and h.numel():
            h.masked_fill_(h.abs() < _NOTHING * h.abs().amax(), 0.0)
        self.shadow.grad = h if h.shape == self.shadow.shape else h.view(self.shadow.shape)

    def put(self) -> None:
        """u = q = w / r."""
        q = self._q = torch.empty_like(self._u) if self._q is None else self._q
        q.copy_(self.p if self.r is None else self.p / self.r)
        if self.has_zeros:
            q.masked_fill_(self.r == 0, 0.0)
        self._u.copy_(q)

    def put_zero(self, decay: float) -> None:
        """u = 0, w = decay w; the weight itself outside the network."""
        if decay != 1:
            self.p.mul_(decay)
        if self.r is None:
            self._u.copy_(self.p)
        else:
            self._u.zero_()

    def map_back(self, *, from_zero: bool) -> None:
        """w = w + r (u - q)."""
        u, r = self._u, self.r
        if r is None:
            self.p.copy_(u)
            return
        if not from_zero:
            assert self._q is not None
            u.sub_(self._q)
        if self.p.dtype == u.dtype == r.dtype:
            self.p.addcmul_(u, r)
        else:
            self.p.add_((u * r).to(self.p.dtype))

    def move_to(self, start: Tensor) -> None:
        """w = start + r (u - q), with u kept."""
        assert self._q is not None
        self.p.copy_(self._u if self.r is None else start + (self._u - self._q) * self.r)


def squared_norm(entries: Sequence[Entry]) -> float:
    """The squared norm of all h."""
    flat = [h.reshape(-1) for e in entries if (h := e.shadow.grad) is not None]
    return float(torch.stack([torch.dot(h, h) for h in flat]).sum()) if flat else 0.0


def through(
    entries: Sequence[Entry], closure: Callable[[], Any], at_rest: Callable[[], AbstractContextManager[None]]
) -> Callable[[], Any]:
    """A closure for the rule, which evaluates the user's where the rule has put the coordinates.

    Args:
        entries: all parameters of the step.
        closure: the user's.
        at_rest: what it is evaluated in, with the model's parameters in the groups: it clears their gradients.
    """
    start = [e.p.clone() for e in entries]

    def evaluate() -> Any:
        for entry, w in zip(entries, start, strict=True):
            entry.move_to(w)
        with at_rest():
            loss = evaluated(closure)
        for entry, w in zip(entries, start, strict=True):
            if entry.p.grad is not None:
                entry.read_gradient(masked=False)
            entry.p.copy_(w)  # the step is mapped back from here
        return loss

    return torch.no_grad()(evaluate)
